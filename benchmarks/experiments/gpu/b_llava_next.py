# SPDX-License-Identifier: Apache-2.0
"""Measure prefills of LLaVA-NeXT-7B's decoder, 2880 visual tokens to 640, 320 and 160, with batch 8 and 1.

The oracle is the unpatched decoder on prompts of the lengths that its layers see with the method. "as a graph" is a
CUDA graph replay of the same run. A prefill in which the host waits for the GPU cannot be captured; the raw file has
the code line of the wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from kit import Sheet  # isort: skip
from clocks import Clocks
from prefills import COLUMNS, Prefills, model_of

METHODS = ("random", "divprune", "dart", "fastv", "visionzip", "cdpruner", "scope", "pyramiddrop", "sparsevlm")


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet(
        "b_llava_next", "Prefill of 2880 visual tokens", "LLaVA-NeXT-7B's decoder", COLUMNS, __doc__, argv
    )  # fmt: skip
    model, clocks = model_of(sheet), Clocks(sheet.device, sheet.tiny)
    visual, keeps, batches = (576, (64,), (2, 1)) if sheet.tiny else (2880, (320, 640, 160), (8, 1))
    for batch in batches:  # eight rows first, where savings are largest
        Prefills(sheet, clocks, model, visual, batch, rounds=5 if batch == 1 else 3).take(METHODS, keeps)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
