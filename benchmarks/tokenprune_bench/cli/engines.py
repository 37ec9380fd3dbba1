# SPDX-License-Identifier: Apache-2.0
"""Engines of `tokenprune bench`: a model in this process, or vLLM."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenprune.errors import OptionError
from tokenprune_bench.cli.common import load_model
from tokenprune_bench.group import select_device

if TYPE_CHECKING:
    from contextlib import ExitStack

    from tokenprune_bench.backend import BenchBackend
    from tokenprune_bench.profiling.model import Model

BACKENDS = ("hf", "vllm")


@dataclass(frozen=True)
class Engines:
    """Options that select the engine."""

    backend: str
    server: str | None
    engine_args: str | None
    model: str | None
    device: str | None
    threads: int | None
    dtype: str
    suffix: str | None

    def check(self) -> None:
        """Raise OptionError for conflicting options."""
        if self.backend not in BACKENDS:
            raise OptionError(f"--backend {self.backend!r} is none of {', '.join(BACKENDS)}")
        if self.backend == "hf":
            for name, value in (("--server", self.server), ("--engine-args", self.engine_args)):
                if value is not None:
                    raise OptionError(f"{name} goes with --backend vllm")
            return
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise OptionError(
                "--backend vllm runs in one process: vLLM shards by itself "
                "(--engine-args '{\"tensor_parallel_size\": 2}', or a server with --data-parallel-size)"
            )
        meant = {"device": self.device, "threads": self.threads}
        if self.server is not None:
            meant |= {"dtype": None if self.dtype == "auto" else self.dtype, "engine-args": self.engine_args}
        how = "vLLM: use --engine-args" if self.server is None else "a server, which was started with its own"
        for name, value in meant.items():
            if value is not None:
                raise OptionError(f"--{name} is no option of {how}")

    def open(self, stack: ExitStack, images: int) -> Model | BenchBackend:
        """Return the engine, which `stack` closes. `images` is the maximum number of images per question."""
        if self.backend == "hf":
            return load_model(self.model, select_device(self.device), self.threads, self.dtype, self.suffix)
        from tokenprune.models.model_config import SHIPPED, get_max_answer_tokens, get_shipped_checkpoint
        from tokenprune_bench.profiling.model import SHORT
        from tokenprune_bench.vllm_backend import VllmBackend

        name = self.model or SHIPPED[0]
        shipped = get_shipped_checkpoint(name) if self.server is None else None
        if self.server is not None:
            from tokenprune_bench.vllm_server import ServerEngine

            engine: Any = ServerEngine(self.server, self.model)
        else:
            from tokenprune_bench.vllm_offline import OfflineEngine

            model = self.model if shipped is None else None if name == SHIPPED[0] else str(shipped)
            engine = OfflineEngine(model, self.dtype, _read(self.engine_args), images)
        stack.callback(engine.close)
        suffix = (SHORT if shipped is None else "") if self.suffix is None else self.suffix
        if shipped is not None and (longest := get_max_answer_tokens(name)) is not None:
            return VllmBackend(engine, suffix, max_new_tokens=longest, metric="ending")
        return VllmBackend(engine, suffix, max_new_tokens=16 if shipped is None else 4)


def _read(engine_args: str | None) -> dict[str, Any]:
    try:
        read = json.loads(engine_args or "{}")
    except ValueError as error:
        raise OptionError(f"--engine-args {engine_args!r} is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise OptionError("--engine-args takes an object such as '{\"max_model_len\": 4096}'")
    return read
