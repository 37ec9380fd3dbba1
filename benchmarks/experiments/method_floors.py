# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that a method cannot do without: its products, and its passes over what they make, as bare operations
of PyTorch, to be timed beside it. What it needs beyond that (order, masks, the cut itself) is not among it.

A floor is of a method as its page says it: a greedy choice of k tokens by coverage reads the table of all pairs k
times, whether or not another algorithm could do with less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]
_A_ROUND = 8  # tokens that a round of vispruner lets go


@dataclass(frozen=True)
class Sizes:
    """What a call of a method works on.

    images: side by side. visual, kept: tokens of each, before and behind its choice. width: of the model. heads: of its
    attention. text: tokens behind the image. layers: visual tokens that each layer of the decoder sees, of an image.
    """

    images: int
    visual: int
    kept: int
    width: int
    heads: int
    text: int
    layers: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype

    def made(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """Visual tokens before and behind each cut inside the decoder."""
        return [(a, b) for a, b in zip(self.layers, self.layers[1:], strict=False) if b < a]

    # -- the parts

    def product(self, rows: int, columns: int, width: int | None = None) -> Run:
        """Similarities of `rows` tokens to `columns` others."""
        width = width or self.width
        a, b = self.made(self.images, rows, width), self.made(self.images, width, columns)
        return lambda: a @ b

    def steps(self, number: int, count: int) -> Run:
        """One row of `count` entries after the other."""
        table, row = self.made(number, self.images, count), self.made(self.images, count)

        def run() -> None:
            for other in table:
                torch.minimum(row, other, out=row)

        return run

    def passes(self, number: int, rows: int, columns: int) -> Run:
        """A whole table, again and again."""
        table = self.made(self.images, rows, columns)
        return lambda: [table.sum(2) for _ in range(number)]

    def factor(self, number: int, count: int) -> Run:
        """The rows of a Cholesky factor, each from those before."""
        table = self.made(self.images, number, count)
        return lambda: [table[:, step : step + 1, :step] @ table[:, :step] for step in range(min(number, count))]

    def spectrum(self, count: int, vectors: bool) -> Run:
        """Eigenvalues, in float64."""
        side = min(count, self.width)
        x = self.made(self.images, side, max(count, self.width), dtype=torch.double)
        solve = torch.linalg.eigh if vectors else torch.linalg.eigvalsh
        return lambda: solve(x @ x.transpose(1, 2))

    def rounds(self, count: int, left: int) -> Run:
        """Those of vispruner: tables of one half of a line and the other."""
        lines = [self.made(self.images, -(-n // 2), n // 2) for n in range(count, left, -_A_ROUND)]
        return lambda: [table.amax(2) for table in lines]

    def means(self, count: int, into: int) -> Run:
        """Tokens added to those that they join."""
        x, out = self.made(self.images * count, self.width), self.made(self.images * into, self.width)
        target = torch.randint(0, len(out), (len(x),), device=self.device)
        return lambda: out.index_add(0, target, x)

    def attention(self, rows: int, count: int) -> Run:
        """The softmax of rows of attention, all heads."""
        query = self.made(self.images, self.heads, rows, self.width // self.heads)
        key = self.made(self.images, self.heads, self.width // self.heads, count)
        return lambda: (query @ key).softmax(3)

    def projections(self, count: int) -> Run:
        """Queries and keys of a layer once more."""
        x, weight = self.made(self.images * count, self.width), self.made(self.width, 2 * self.width)
        return lambda: x @ weight

    def values(self, count: int) -> Run:
        """A pass over what all tokens hold."""
        x = self.made(self.images, count, self.width)
        return lambda: x.square().sum(2)


def _at_cuts(of: Callable[[Sizes, int, int], Sequence[Run]]) -> Callable[[Sizes], list[Run]]:
    return lambda s: [run for before, behind in s.cuts for run in of(s, before, behind)]


def _nothing(s: Sizes) -> list[Run]:
    return []


def _pairs(s: Sizes) -> Run:
    return s.product(s.visual, s.visual)


def _covering(s: Sizes) -> list[Run]:
    return [_pairs(s), s.passes(s.kept, s.visual, s.visual)]


def _asked(s: Sizes) -> list[Run]:
    return [s.product(s.visual, s.text), *_covering(s)]


def _determinant(s: Sizes) -> list[Run]:
    return [_pairs(s), s.factor(s.kept, s.visual)]


def _words(s: Sizes, before: int, behind: int) -> list[Run]:
    return [s.attention(s.text, before + 2 * s.text)]


def _next_layer(s: Sizes, before: int, behind: int) -> list[Run]:
    return [s.projections(before)]


def _sparsevlm(s: Sizes, before: int, behind: int) -> list[Run]:
    again = int(0.3 * (before - behind)) + 1
    return [*_words(s, before, behind), s.product(again, again), s.means(again, max(1, again // 10))]


def _visipruner(s: Sizes) -> list[Run]:
    asked = range(min(len(s.layers) - 1, round(6 / 32 * len(s.layers)) + 2), len(s.layers))
    return [run for layer in asked for run in (s.values(s.layers[layer - 1]), s.values(s.layers[layer - 1]))]


FLOORS: dict[str, Callable[[Sizes], list[Run]]] = {
    **dict.fromkeys(
        # What they choose by is there, or costs no more than a row.
        (
            "dyrate",
            "dymu",
            "fastervlm",
            "fastv",
            "flowcut",
            "globalcom2",
            "hiprune",
            "hired",
            "holov",
            "random",
            "saint",
            "tome",
            "uniform",
            "vtw",
        ),
        _nothing,
    ),
    "adaptinfer": _at_cuts(_words),
    "agilepruner": lambda s: [_pairs(s), s.spectrum(s.visual, vectors=False)],
    # Ten basis tokens: how far all are from them, and how well they make up all.
    "apet": lambda s: [s.product(s.visual, 20), s.product(s.visual, s.kept), s.means(s.visual, s.kept)],
    "autoprune": _at_cuts(_words),
    "cdpruner": lambda s: [s.product(s.visual, s.text), *_determinant(s)],
    "d2pruner": lambda s: [_pairs(s), s.steps(int(0.3 * s.kept), s.visual)],
    "dart": lambda s: [s.product(s.visual, 8), s.values(s.visual)],
    # Each pair is multiplied once.
    "divprune": lambda s: [s.product(s.visual, s.visual // 2), s.steps(s.kept, s.visual)],
    "eadp": _asked,
    "entropyprune": _nothing,  # small tables, whose eigenvalues are no arithmetic of tokens
    "f3a": lambda s: [_pairs(s), s.steps(s.kept, s.visual)],
    "feather": _at_cuts(_next_layer),
    "fitprune": _at_cuts(lambda s, before, behind: [s.attention(before + s.text, before + 2 * s.text)]),
    # The first layer's queries of the text and keys of the image.
    "hawk": lambda s: [s.product(s.text + s.visual, s.width), s.product(s.visual, s.heads)],
    "idselection": lambda s: [_pairs(s), s.steps(s.kept, s.visual)],
    "ivc_prune": lambda s: [s.attention(s.text + s.visual // 100, s.visual + s.text)],
    "mmtok": _asked,
    "mustdrop": _at_cuts(_words),
    "otprune": lambda s: [s.product(s.visual, s.visual, min(s.visual, s.width)), *_determinant(s)],
    # About half of the tokens are clustered.
    "pact": _at_cuts(
        lambda s, before, behind: [
            s.product(before // 2, before // 2),
            s.product(before, behind),
            s.means(before, behind),
        ]
    ),
    "pool": lambda s: [s.means(s.visual, s.kept)],
    "prumerge": lambda s: [s.means(s.visual, 1)],
    "prumerge_plus": lambda s: [s.means(s.visual, s.kept)],
    "prunesid": lambda s: [_pairs(s), s.spectrum(s.visual, vectors=True)],
    "pyramiddrop": _at_cuts(_next_layer),
    "resprune": lambda s: [s.product(s.visual, s.text), *_determinant(s)],
    "restore": lambda s: [_pairs(s), _pairs(s), s.means(s.visual, s.kept)],
    "scope": _covering,
    "sinkpruner": lambda s: [_pairs(s), *_at_cuts(_words)(s)],
    "sparsevlm": _at_cuts(_sparsevlm),
    "tops": _covering,
    "transprune": _at_cuts(lambda s, before, behind: [*_next_layer(s, before, behind), *_words(s, before, behind)]),
    "v2drop": _at_cuts(lambda s, before, behind: [s.values(before)]),
    "visionzip": lambda s: [s.product(s.visual, s.kept), s.means(s.visual, s.kept)],
    "visipruner": _visipruner,
    "vispruner": lambda s: [_pairs(s), s.rounds(s.visual - s.kept // 2, s.kept // 2)],
    "vitcop": _at_cuts(lambda s, before, behind: [s.product(before, before)]),
    "vscan": lambda s: [s.product(s.visual, s.layers[0]), s.means(s.visual, s.layers[0]), s.projections(s.layers[0])],
}


def floor_of(name: str, sizes: Sizes) -> Run | None:
    """Return what does a method's arithmetic once; None where there is nothing to speak of."""
    runs = FLOORS[name](sizes)
    return (lambda: [run() for run in runs]) if runs else None
