# SPDX-License-Identifier: Apache-2.0
"""LLaVA-NeXT-7B's decoder, 2880 visual tokens to 640, 320 and 160: prefill, choosing, oracle, memory; batch 8 and 1.

Oracle: the unpatched decoder on prompts as long as its layers see with the method. "as a graph": a replay of the same
run; a method whose prefill makes the host wait cannot be captured, and the file says where it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from kit import Sheet  # isort: skip
from clocks import Clocks
from prefills import COLUMNS, Prefills, model_of

METHODS = ("random", "divprune", "dart", "fastv", "visionzip", "cdpruner", "scope", "pyramiddrop", "sparsevlm")


def main(given: Sequence[str] | None = None) -> int:
    sheet = Sheet(
        "b_llava_next", "Prefill of 2880 visual tokens", "LLaVA-NeXT-7B's decoder", COLUMNS, __doc__, given
    )  # fmt: skip
    model, clocks = model_of(sheet), Clocks(sheet.device, sheet.tiny)
    visual, keeps, batches = (576, (64,), (2, 1)) if sheet.tiny else (2880, (320, 640, 160), (8, 1))
    for batch in batches:  # eight rows first: there a saving shows
        Prefills(sheet, clocks, model, visual, batch, rounds=5 if batch == 1 else 3).take(METHODS, keeps)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
