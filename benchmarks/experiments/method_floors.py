# SPDX-License-Identifier: Apache-2.0
"""Run the arithmetic of each method as bare PyTorch operations, to be timed beside the method (efficiency.py).

A floor has the matrix products of a method and its passes over their results. It excludes sorting, masks and the cut.
It follows the algorithm on the method's page: a greedy choice of k tokens by coverage reads the table of all pairs k
times, even if another algorithm could read it less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]
_A_ROUND = 8  # tokens that vispruner drops per round


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call of a method.

    Attributes:
        images: Number of images.
        visual: Tokens of each image before the selection.
        kept: Tokens of each image after the selection.
        width: Hidden size of the model.
        heads: Number of attention heads.
        text: Text tokens after the image.
        layers: Visual tokens of an image in each decoder layer.
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

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """Visual tokens before and after each cut inside the decoder."""
        return [(a, b) for a, b in zip(self.layers, self.layers[1:], strict=False) if b < a]

    # -- the operations

    def product(self, rows: int, columns: int, width: int | None = None) -> Run:
        """Return similarities of `rows` tokens to `columns` other tokens."""
        width = width or self.width
        a, b = self.random(self.images, rows, width), self.random(self.images, width, columns)
        return lambda: a @ b

    def steps(self, num_steps: int, count: int) -> Run:
        """Return updates of a row of `count` entries with one row after the other."""
        table, row = self.random(num_steps, self.images, count), self.random(self.images, count)

        def run() -> None:
            for other in table:
                torch.minimum(row, other, out=row)

        return run

    def passes(self, num_passes: int, rows: int, columns: int) -> Run:
        """Return repeated passes over a table."""
        table = self.random(self.images, rows, columns)
        return lambda: [table.sum(2) for _ in range(num_passes)]

    def factor(self, num_rows: int, count: int) -> Run:
        """Return the rows of a Cholesky factor, each computed from the rows before."""
        table = self.random(self.images, num_rows, count)
        return lambda: [table[:, step : step + 1, :step] @ table[:, :step] for step in range(min(num_rows, count))]

    def spectrum(self, count: int, vectors: bool) -> Run:
        """Return eigenvalues in float64."""
        side = min(count, self.width)
        x = self.random(self.images, side, max(count, self.width), dtype=torch.double)
        solve = torch.linalg.eigh if vectors else torch.linalg.eigvalsh
        return lambda: solve(x @ x.transpose(1, 2))

    def rounds(self, count: int, num_kept: int) -> Run:
        """Return the rounds of vispruner, which compare both halves of the remaining tokens."""
        lines = [self.random(self.images, -(-n // 2), n // 2) for n in range(count, num_kept, -_A_ROUND)]
        return lambda: [table.amax(2) for table in lines]

    def means(self, count: int, num_targets: int) -> Run:
        """Return sums of tokens into the tokens that they merge with."""
        x, out = self.random(self.images * count, self.width), self.random(self.images * num_targets, self.width)
        target = torch.randint(0, len(out), (len(x),), device=self.device)
        return lambda: out.index_add(0, target, x)

    def attention(self, rows: int, count: int) -> Run:
        """Return the softmax of rows of attention in all heads."""
        query = self.random(self.images, self.heads, rows, self.width // self.heads)
        key = self.random(self.images, self.heads, self.width // self.heads, count)
        return lambda: (query @ key).softmax(3)

    def projections(self, count: int) -> Run:
        """Return the queries and keys of a layer, computed once more."""
        x, weight = self.random(self.images * count, self.width), self.random(self.width, 2 * self.width)
        return lambda: x @ weight

    def values(self, count: int) -> Run:
        """Return a pass over the hidden states of all tokens."""
        x = self.random(self.images, count, self.width)
        return lambda: x.square().sum(2)


def _at_cuts(build_runs: Callable[[Sizes, int, int], Sequence[Run]]) -> Callable[[Sizes], list[Run]]:
    return lambda s: [run for before, behind in s.cuts for run in build_runs(s, before, behind)]


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
    num_recycled = int(0.3 * (before - behind)) + 1
    return [
        *_words(s, before, behind),
        s.product(num_recycled, num_recycled),
        s.means(num_recycled, max(1, num_recycled // 10)),
    ]


def _visipruner(s: Sizes) -> list[Run]:
    read_layers = range(min(len(s.layers) - 1, round(6 / 32 * len(s.layers)) + 2), len(s.layers))
    return [run for layer in read_layers for run in (s.values(s.layers[layer - 1]), s.values(s.layers[layer - 1]))]


FLOORS: dict[str, Callable[[Sizes], list[Run]]] = {
    **dict.fromkeys(
        # Their scores already exist, or cost no more than a row.
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
            "priortr",
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
    # Ten basis tokens: distances of all tokens to them, and the reconstruction of all tokens from them.
    "apet": lambda s: [s.product(s.visual, 20), s.product(s.visual, s.kept), s.means(s.visual, s.kept)],
    "autoprune": _at_cuts(_words),
    "cdpruner": lambda s: [s.product(s.visual, s.text), *_determinant(s)],
    "clse": _nothing,  # Fourier transforms of the features, which are not measured here
    "d2pruner": lambda s: [_pairs(s), s.steps(int(0.3 * s.kept), s.visual)],
    "dart": lambda s: [s.product(s.visual, 8), s.values(s.visual)],
    # Each pair is multiplied once.
    "divprune": lambda s: [s.product(s.visual, s.visual // 2), s.steps(s.kept, s.visual)],
    "eadp": _asked,
    "entropyprune": _nothing,  # eigenvalues of small tables, independent of the number of tokens
    "f3a": lambda s: [_pairs(s), s.steps(s.kept, s.visual)],
    "feather": _at_cuts(_next_layer),
    "fitprune": _at_cuts(lambda s, before, behind: [s.attention(before + s.text, before + 2 * s.text)]),
    # Queries of the text and keys of the image in the first layer.
    "hawk": lambda s: [s.product(s.text + s.visual, s.width), s.product(s.visual, s.heads)],
    "idselection": lambda s: [_pairs(s), s.steps(s.kept, s.visual)],
    "ivc_prune": lambda s: [s.attention(s.text + s.visual // 100, s.visual + s.text)],
    # The hidden layer of the scoring head, then the pairs of divprune.
    "learned": lambda s: [s.product(s.visual, 128), s.product(s.visual, s.visual // 2), s.steps(s.kept, s.visual)],
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
    """Return a function that runs a method's arithmetic once, or None if it is negligible."""
    runs = FLOORS[name](sizes)
    return (lambda: [run() for run in runs]) if runs else None
