# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.pairs import PickedRows, Products, unit
from tokenprune.kernels.take import settle, top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.fitted import FittedTable, LazyFit
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LEAST = 1e-3  # of the prior's mean, which a cell of it counts at least


class AttentionPrior(FittedTable):
    """The attention of the prompt's last token that does not depend on the image: float32 `[rows, columns]`."""

    kind = "tokenprune attention prior"
    command = "fit d2pruner"

    def __str__(self) -> str:
        rows, columns = self.table.shape
        return f"{rows} x {columns} places; the most attended to gets {self.table.max():.3g}"


@register(
    "d2pruner", site=Site.IN_LLM, needs=("last_row_attention",), paper="arXiv 2512.19443, AAAI 2026",
    reconstruction=True,
)  # fmt: skip
@dataclass(frozen=True)
class D2Pruner(Pruner):
    """Keep the visual tokens that are attended to more than their place explains, and beside them such that are unlike
    each other (D2Pruner).

    Importance is the attention of the prompt's last token over a prior: the same attention, averaged over many images,
    at that place of the image. The most important tokens stay; of the others the next most important one stays, those
    like it are passed over, and so on.

    layer: int >= 1, the decoder layer at whose input the cut is made; the attention is that of the layer before it.
    prior: path of a file that `tokenprune fit d2pruner` made for the model; None takes attention as it is.
    pivots: share in (0, 1] of what is kept that goes by importance alone, at least one token.
    alpha: in [0, 1], how much the likeness of two tokens counts against how near they stand; 1 for understanding,
    0.5 for localisation.
    threshold: above which likeness one of two tokens is passed over.
    radius: > 0, how far nearness reaches, in cells of the grid.

    Source: Zhang et al., "D2Pruner: Debiased Importance and Structural Diversity for MLLM Token Pruning", from its
    abstract and a review with formulas, and two ports that quote its settings.

    Differs from the paper: neither its text nor its code was to be had, so this is a reconstruction. Nearness is
    exp(-d^2 / (2 radius^2)), a guess, and 0 between frames and where the grid is not known; likeness is the cosine of
    what enters the layer. The prior is stretched to the grid of an image, or along its order where that is not known,
    and counts at least a thousandth of its mean. Where the tokens unlike each other run out, importance fills up.
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.25
    fit = LazyFit("tokenprune_bench.calibration.attention_fitting", "fit_d2pruner")
    fit_limit: ClassVar[int | None] = 200  # the authors take 1000

    layer: Annotated[int, Ge(1)] = 2
    prior: str | Path | None = field(default=None, metadata={"file": True})
    pivots: Annotated[float, Gt(0), Le(1)] = 0.7
    alpha: Annotated[float, Ge(0), Le(1)] = 1.0
    threshold: float = 0.8
    radius: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fitted = self._fitted
        self._check(
            fitted is None or fitted.layer == self.layer,
            f"{self.prior} was fitted for layer={fitted and fitted.layer}: pass this option",
        )

    @cached_property
    def _fitted(self) -> AttentionPrior | None:
        return None if self.prior is None else AttentionPrior.load(self.prior)

    def check_model(self, decoder: torch.nn.Module) -> None:
        if self._fitted is not None and self.prior is not None:
            self._fitted.check_decoder(self.name, self.prior, decoder)

    def select(self, tokens: VisualTokens) -> Selection:
        importance = tokens.last_row_attention.float().mean(1) / self._expected(tokens)
        importance = importance.nan_to_num(nan=-1.0)
        sure = [max(1, int(self.pivots * keep)) for keep in tokens.keep]
        kept = top_mask(importance, tokens.mask, to_device(sure, tokens.mask.device), max(sure))
        more = max(keep - number for keep, number in zip(tokens.keep, sure, strict=True))
        if more:
            kept = kept | self._unlike(tokens, importance, tokens.mask & ~kept, tokens.budget - kept.sum(1), more)
        return Selection(settle(kept, importance, tokens.mask, tokens.budget), counts=tokens.keep)

    def _expected(self, tokens: VisualTokens) -> torch.Tensor:
        """float32 `[S, N]`, above 0: the prior at the place of each token."""
        expected = torch.ones(tokens.mask.shape, dtype=torch.float32, device="cpu")
        if self._fitted is None:
            tokens.note(f"{self.name}: no prior was given, so attention counts as it is (`tokenprune fit d2pruner`)")
        else:
            for row, (count, grid) in enumerate(zip(tokens.counts, tokens.grids, strict=True)):
                expected[row, :count] = resize_table(self._fitted.table, count, grid)
            expected = expected.clamp(min=max(_LEAST * float(self._fitted.table.mean()), 1e-12))
        return to_device(expected, tokens.mask.device)

    def _unlike(
        self, tokens: VisualTokens, importance: torch.Tensor, left: torch.Tensor, number: torch.Tensor, most: int
    ) -> torch.Tensor:
        """bool `[S, N]`: up to `number` tokens of `left`, in order of importance, none of which is like one before."""
        cells, rows = self._cells(tokens), torch.arange(len(left), device=left.device)
        free, taken, row_of = left, torch.zeros_like(left), PickedRows(Products(unit(tokens.hidden)))
        for step in range(most):
            best = importance.masked_fill(~free, -torch.inf)
            pick = best.argmax(1)
            alike = self.alpha * row_of(pick, best)
            if self.alpha < 1:
                alike = alike + (1 - self.alpha) * self._near(cells, cells[rows, pick])
            new = torch.zeros_like(free).scatter(1, pick[:, None], True) & free & (step < number)[:, None]
            taken, free = taken | new, free & ~((alike > self.threshold) & new.any(1, keepdim=True)) & ~new
        return taken

    def _cells(self, tokens: VisualTokens) -> torch.Tensor:
        """float32 `[S, N, 3]`: frame, row and column of each token; where a grid is not known each is in a frame."""
        cells = torch.zeros(*tokens.mask.shape, 3, dtype=torch.float32, device="cpu")
        if self.alpha < 1:
            for row, (count, grid) in enumerate(zip(tokens.counts, tokens.grids, strict=True)):
                axes = [torch.arange(size, device="cpu") for size in (grid or (count, 1, 1))]
                cells[row, :count] = torch.cartesian_prod(*axes).view(count, 3).float()
        return to_device(cells, tokens.mask.device)

    def _near(self, cells: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        """float32 `[S, N]`, in 0..1: of all cells `[S, N, 3]` to one `[S, 3]`."""
        one = one.unsqueeze(1)
        square = (cells[..., 1:] - one[..., 1:]).square().sum(-1)
        return torch.exp(-square / (2 * self.radius**2)).masked_fill(cells[..., 0] != one[..., 0], 0)


def resize_table(table: torch.Tensor, count: int, grid: tuple[int, int, int] | None) -> torch.Tensor:
    """float32 `[count]`: a table `[rows, columns]` at the places of a grid's tokens, the same in each frame; along the
    order of the tokens where the grid is not known."""
    if grid is None:
        return torch.nn.functional.interpolate(table.flatten()[None, None], size=count, mode="linear")[0, 0]
    frames, height, width = grid
    frame = torch.nn.functional.interpolate(table[None, None], size=(height, width), mode="bilinear")[0, 0]
    return frame.flatten().repeat(frames)
