# SPDX-License-Identifier: Apache-2.0
"""Measure vLLM with the plugin on this GPU: first token of a single request, and throughput of 64 concurrent requests.

The models have 7 B shapes with vLLM's dummy weights in bfloat16, and one image per request: LLaVA-1.5-7B (576 visual
tokens) and Qwen2.5-VL-7B (2,116). "first token" is the median of eight single requests. "requests/s" is the engine's
throughput for 64 concurrent requests that write 16 tokens each; "with preprocessing" is the throughput of the entire
call. "blocks" is the maximum number of used KV cache blocks. An engine runs eagerly, with CUDA graphs for decoding
("graphs"), or with vLLM's defaults (torch.compile and graphs for both).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit import Sheet  # isort: skip
from children import rows_of
from vllm_kit.cases import ENGINES

SECONDS = 170.0  # maximum per engine; eager engines took 35 to 63 on an H200
TINY = ("llava7b.eager",)
COLUMNS = {
    "engine": "engine", "setting": "setting", "prompt": "tokens of a prompt", "first_ms": "first token ms",
    "rate": "requests/s", "whole_rate": "with preprocessing", "of_off": "as many as off", "blocks": "blocks",
    "bound": "ended",
}  # fmt: skip


def measure(name: str, tiny: bool) -> list[dict[str, Any]]:
    """Return the rows of an engine."""
    rows = rows_of("times", name, tiny)
    return [{"engine": name} | row | {"of_off": row["rate"] / rows[0]["rate"]} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("h_vllm_times", "Requests in vLLM", "7 B models", COLUMNS, __doc__, argv)
    for name in TINY if sheet.tiny else ENGINES:
        sheet.take((name,), lambda name=name: measure(name, sheet.tiny), SECONDS)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
