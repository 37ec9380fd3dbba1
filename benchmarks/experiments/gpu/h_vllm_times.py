# SPDX-License-Identifier: Apache-2.0
"""vLLM with the plugin on this GPU: the first token of one request, and requests a second of 64 that come together.

Models of 7 B shape with vLLM's own dummy weights, bfloat16, one image in a request: LLaVA-1.5-7B (576 visual tokens),
Qwen2.5-VL-7B (2,116). "first token": of a request alone, from the call on, median of eight; "requests/s": of 64 at
once that write 16 tokens each, of the engine, and "with preprocessing" of the whole call; "blocks": of the KV cache
that were taken at most. An engine is run eagerly, with CUDA graphs of decoding alone ("graphs"), or as vLLM does by
default (torch.compile, and graphs of both).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit import Sheet  # isort: skip
from children import rows_of
from vllm_kit.cases import ENGINES

SECONDS = 170.0  # that an engine may take; eagerly 35 to 63, as seen on an H200
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


def main(given: Sequence[str] | None = None) -> int:
    sheet = Sheet("h_vllm_times", "Requests in vLLM", "7 B models", COLUMNS, __doc__, given)
    for name in TINY if sheet.tiny else ENGINES:
        sheet.take((name,), lambda name=name: measure(name, sheet.tiny), SECONDS)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
