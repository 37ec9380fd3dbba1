# SPDX-License-Identifier: Apache-2.0
"""What `tokenprune bench` asks: a model in this process, or vLLM."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tokenprune.cli.common import load_subject
from tokenprune.errors import OptionError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from tokenprune.bench.backend import Backend
    from tokenprune.bench.model import Subject

BACKENDS = ("hf", "vllm")


def check_engine(backend: str, server: str | None, engine_args: str | None, **local: Any) -> None:
    """Raise OptionError for options that do not go together. local: those that say how a model runs in this process."""
    if backend not in BACKENDS:
        raise OptionError(f"--backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend == "hf":
        for name, value in (("--server", server), ("--engine-args", engine_args)):
            if value is not None:
                raise OptionError(f"{name} goes with --backend vllm")
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise OptionError(
            "--backend vllm runs in one process: vLLM shards by itself "
            "(--engine-args '{\"tensor_parallel_size\": 2}', or a server with --data-parallel-size)"
        )
    meant = {name: value for name, value in local.items() if value is not None}
    if server is not None:
        meant |= {"engine-args": engine_args} if engine_args is not None else {}
    else:
        meant.pop("dtype", None)
    if meant:
        how = "of a server, which was started with its own" if server is not None else "of vLLM: use --engine-args"
        raise OptionError(f"--{next(iter(meant))} is no option {how}")


def open_engine(
    stack: ExitStack,
    backend: str,
    server: str | None,
    engine_args: str | None,
    model: str | None,
    device: str | None,
    threads: int | None,
    dtype: str,
    suffix: str | None,
    pictures: int,
) -> Subject | Backend:
    """Return what answers; `stack` ends it. pictures: the most that a question has."""
    if backend == "hf":
        return load_subject(model, device, threads, dtype, suffix)
    from tokenprune.bench.model import SHORT
    from tokenprune.bench.vllm_backend import VllmBackend

    if server is not None:
        from tokenprune.bench.vllm_server import ServerEngine

        engine: Any = ServerEngine(server, model)
    else:
        from tokenprune.bench.vllm_offline import OfflineEngine

        engine = OfflineEngine(model, dtype, _read(engine_args), pictures)
    stack.callback(engine.close)
    ours = model is None and server is None
    if suffix is None:
        suffix = "" if ours else SHORT
    return VllmBackend(engine, suffix, 4 if ours else 16)


def _read(engine_args: str | None) -> dict[str, Any]:
    try:
        read = json.loads(engine_args or "{}")
    except ValueError as error:
        raise OptionError(f"--engine-args {engine_args!r} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise OptionError("--engine-args takes an object such as '{\"max_model_len\": 4096}'")
    return read
