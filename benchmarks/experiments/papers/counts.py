# SPDX-License-Identifier: Apache-2.0
"""The meaning of token counts in papers and their code, and the average over the decoder's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from papers.published import BUDGETS
from papers.settings import average, describe_type
from papers.tables import Table

import tokenprune

_OUTPUT = "tokens after each cut layer; the layer itself has the tokens before the cut"
_SCHEDULE = "none: the schedule of its code"


@dataclass(frozen=True)
class Count:
    """A paper's number for 576 tokens and 32 layers.

    Attributes:
        method: Name of the method.
        called: The paper's number.
        counts: Meaning of the number.
        cuts: (layer, tokens) for each cut of the authors' code: the layer at whose input it cuts, and its number.
        options: Options with which our method keeps as many tokens at a cut as the authors' code.
    """

    method: str
    called: str
    counts: str
    cuts: tuple[tuple[int, int], ...]
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def left(self) -> list[tuple[int, int]]:
        """(layer, tokens from that layer on) for each cut, including tokens that the code keeps in addition."""
        method, count, cuts = tokenprune.method(self.method, **self.options), 576, []
        for layer, requested in self.cuts:
            count = min(count, method.resolve_count(count, requested))
            cuts.append((layer, count))
        return cuts

    @property
    def average(self) -> float:
        return average(self.left)


# A cut "after layer l" in a paper's code is at the input of layer l + 1 here.
COUNTS = (
    *(Count("dart", str(n), "tokens requested at the cut + 4", ((2, n),), {"exact": False}) for n in BUDGETS),
    Count("fastv", "50 %", "tokens removed at the cut (its tables)", ((2, 288),)),
    Count("fastv", "75 %", "tokens removed at the cut (its tables)", ((2, 144),)),
    *(
        Count("sparsevlm", str(n), f"{_OUTPUT}; merged tokens come on top (v1.5)",
              tuple(zip((3, 7, 16), kept, strict=True)), {"exact": False})
        for n, kept in zip(BUDGETS, ((300, 200, 110), (303, 110, 36), (66, 30, 17)), strict=True)
    ),
    *(
        Count("sparsevlm", f"{n}, SparseVLM+", _OUTPUT, tuple(zip((3, 7, 16), kept, strict=True)), {"version": "+"})
        for n, kept in zip(BUDGETS, ((300, 200, 118), (238, 108, 60), (66, 34, 20)), strict=True)
    ),
    *(
        Count("adaptinfer", str(n), _OUTPUT, tuple(zip((2, 11, 21), kept, strict=True)))
        for n, kept in ((128, (290, 72, 18)), (64, (133, 27, 3)))
    ),
    *(
        Count("tops", f"{n}, both stages", "the second of three numbers: twice as many enter, a quarter stays",
              ((0, 2 * n), (12, n), (24, n // 4)))
        for n in BUDGETS
    ),
    Count("vscan", "64", "an average over layers", ((0, 96), (16, 32))),
    Count("pyramiddrop", "270", "an average over layers (its own schedule)", ((8, 288), (16, 144), (24, 72))),
    Count("v2drop", "default", _SCHEDULE, ((3, 288), (17, 144), (22, 1))),
    Count("transprune", "High", _SCHEDULE, ((7, 504), (9, 360), (12, 72))),
    Count("ivc_prune", "30 %", "tokens kept at the cut and in the cache of all layers", ((16, 173),)),
)  # fmt: skip


def table() -> Table:
    """Return the table of tokens per layer and their average for each number of a paper."""
    lines = [
        [
            f"`{count.method}`",
            count.called,
            describe_type(count.left),
            f"{count.average:.1f} ({count.average / 576:.1%})",
        ]
        for count in COUNTS
        if count.options.get("version") is None
    ]
    header = ["method", "paper's number", "tokens in the authors' code", "average over layers"]
    about = (
        "For LLaVA-1.5-7B, with 576 visual tokens and 32 layers. The third column comes from the authors' code. The "
        'average is computed. For methods that cut before the decoder, "64" means 64 in every layer.'
    )
    return Table("Meaning of a paper's number", header, lines, about)
