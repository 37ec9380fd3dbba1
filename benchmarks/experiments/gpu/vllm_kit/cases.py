# SPDX-License-Identifier: Apache-2.0
"""Cases and engines of the tables h, by name. This module does not need vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

# Of every process that imports vLLM.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "TOKENIZERS_PARALLELISM": "false",
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1",
}  # fmt: skip
V1, V2 = "0", "1"  # vLLM's model runners, as values of VLLM_USE_V2_MODEL_RUNNER
EAGER: dict[str, Any] = {"enforce_eager": True}
# Without mode 0, vLLM compiles by default, which takes a minute.
SMALL_DEFAULT: dict[str, Any] = {
    "enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
}  # fmt: skip


def graphs(mode: str, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> dict[str, Any]:
    """Return engine options for CUDA graphs without torch.compile. `mode` is vLLM's `cudagraph_mode`."""
    config = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": list(sizes)}
    return {"enforce_eager": False, "compilation_config": config}


EXACT, FAST = ("float32", "TRITON_ATTN"), ("bfloat16", "FLASH_ATTN")


class Case(NamedTuple):
    """A case of h_vllm_answers.py.

    Attributes:
        checkpoint: Name of a checkpoint in tests/vllm.
        runner: Model runner of vLLM.
        options: Engine options.
        dtype: dtype and attention backend.
        method: Method inside the decoder, or "" for settings per request.
        plugin: Whether vLLM loads the plugin.
    """

    checkpoint: str
    runner: str = V2
    options: dict[str, Any] = EAGER
    dtype: tuple[str, str] = EXACT
    method: str = ""
    plugin: bool = True


CASES = {
    "llava.v2": Case("llava"),
    "llava.v1": Case("llava", V1),
    "qwen2_5.v2": Case("qwen2_5_vl"),
    "qwen2_5.v1": Case("qwen2_5_vl", V1),
    "qwen3.v2": Case("qwen3_vl"),
    "onevision.v2": Case("llava_onevision"),
    "dart.v1": Case("llava_deep", V1, method="dart"),
    "fastv.v1": Case("llava_deep", V1, method="fastv"),
    # The defaults of a server: torch.compile and piecewise graphs. Their start takes longest. At these positions, each
    # has a process without other slow cases when ten processes share the cases.
    "llava.default": Case("llava", options=SMALL_DEFAULT),
    "qwen2_5.default": Case("qwen2_5_vl", options=SMALL_DEFAULT, dtype=FAST),
    "llava.v2.graphs": Case("llava", options=graphs("FULL")),
    "qwen2_5.v2.graphs": Case("qwen2_5_vl", options=graphs("FULL")),
    "qwen2_5.v1.graphs": Case("qwen2_5_vl", V1, graphs("FULL_DECODE_ONLY")),
    "llava.noplugin": Case("llava", plugin=False),
    "qwen2_5.noplugin": Case("qwen2_5_vl", plugin=False),
    "llava.v2.fa3": Case("llava", dtype=FAST),
    "qwen2_5.v2.fa3.graphs": Case("qwen2_5_vl", options=graphs("FULL"), dtype=FAST),
    "dart.v1.fa3": Case("llava_deep", V1, dtype=FAST, method="dart"),
}

OFF: dict[str, Any] = {"off": True}
TIMED = {
    "off": OFF,
    "divprune 0.25": {"method": "divprune", "keep": 0.25},
    "divprune 0.11": {"method": "divprune", "keep": 0.11},
}
DART = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}
DECODE = graphs("FULL_DECODE_ONLY", (1, 2, 4, 8, 16, 32, 64))
DEFAULT: dict[str, Any] = {"enforce_eager": False}  # torch.compile, graphs of prefill and decoding


class Engine(NamedTuple):
    """An engine of h_vllm_times.py.

    Attributes:
        shape: Name in `shapes.py`.
        options: Engine options.
        setting: Setting of the server.
        settings: Settings of requests by name; None uses the server's setting.
        runner: Model runner, "" for vLLM's choice.
    """

    shape: str
    options: dict[str, Any]
    setting: dict[str, Any] = OFF
    settings: dict[str, Any] = TIMED
    runner: str = ""


ENGINES = {
    "llava7b.default": Engine("llava", DEFAULT),
    "llava7b.eager": Engine("llava", EAGER),
    "qwen7b.eager": Engine("qwen", EAGER),
    "llava7b.graphs": Engine("llava", DECODE),
    "qwen7b.default": Engine("qwen", DEFAULT),
    "qwen7b.graphs": Engine("qwen", DECODE),
    "llava7b.dart": Engine(
        "llava", EAGER | {"disable_chunked_mm_input": True}, DART, {"off": OFF, "dart 0.25": None}, V1
    ),
}
