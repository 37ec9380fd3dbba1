# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in this process, and output of rows. Import this module first: vLLM reads the environment at import.

A process has one engine: `python experiments/gpu/vllm_kit/answers.py llava.v2`. Each row is a line of JSON after a
mark, which `children.py` reads.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cases import EAGER, ENVIRONMENT, V1

ROOT = Path(__file__).parents[4]
MARK = "@@ "
TINY = "--tiny" in sys.argv  # on vLLM's CPU build

sys.path[:0] = [str(ROOT), str(ROOT / "tests/vllm")]
os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.pop("TRITON_INTERPRET", None)  # kernels must be compiled


def say(**row: Any) -> None:
    print(MARK + json.dumps(row), flush=True)


def exact() -> None:
    """Compute float32 matrix products in float32, without TF32."""
    import torch

    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def start(folder: str, setting: dict[str, Any] | None, runner: str = "", **options: Any) -> Any:
    """Start vLLM's `LLM`. `runner` is V1 or V2, or "" for vLLM's choice. Tiny runs are eager, with V1."""
    if TINY:
        runner, options = V1, {name: options[name] for name in options if not name.startswith(_OF_GPUS)} | EAGER
    if runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
    from vllm import LLM

    processor_arguments = None if setting is None else {"tokenprune": setting}
    return LLM(folder, mm_processor_kwargs=processor_arguments, seed=0, **options)


_OF_GPUS = ("gpu_", "kv_cache_memory", "attention_backend", "compilation_config")


def request(prompt: str, images: list[Any], setting: dict[str, Any] | None) -> dict[str, Any]:
    """Return a request with a setting, or without one to use the server's."""
    prompt_of_request: dict[str, Any] = {"prompt": prompt, "multi_modal_data": {"image": images} if images else {}}
    return (
        prompt_of_request if setting is None else prompt_of_request | {"mm_processor_kwargs": {"tokenprune": setting}}
    )


def about(llm: Any) -> dict[str, str]:
    """Return the fields of a row that describe the engine."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    config = llm.llm_engine.vllm_config
    return {
        "runner": type(runner).__module__, "graphs": str(config.compilation_config.cudagraph_mode),
        "compile": str(config.compilation_config.mode), "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }  # fmt: skip


def leave() -> None:
    """End the process without vLLM's shutdown, which can hang."""
    sys.stdout.flush()
    os._exit(0)
