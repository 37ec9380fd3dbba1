# SPDX-License-Identifier: Apache-2.0
"""Measure prefills of LLaVA-1.5-7B's decoder, 576 visual tokens to 192, 128 and 64 (the budgets of most papers).

b_llava_next.py describes the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from kit import Sheet  # isort: skip
from b_llava_next import METHODS
from clocks import Clocks
from prefills import COLUMNS, Prefills, model_of


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("f_llava15", "Prefill of 576 visual tokens", "LLaVA-1.5-7B's decoder", COLUMNS, __doc__, argv)
    keeps, methods = ((64,), METHODS[:3]) if sheet.tiny else ((64, 128, 192), METHODS)
    Prefills(sheet, Clocks(sheet.device, sheet.tiny), model_of(sheet), 576, 1, rounds=9).take(methods, keeps)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
