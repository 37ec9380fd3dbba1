# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.pairs import PickedRows, Products, normalize
from tokenprune.kernels.take import adjust_count, top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.fitted import FittedTable, LazyFit
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_MIN_PRIOR = 1e-3  # minimum of a cell of the prior, as a share of the prior's mean


class AttentionPrior(FittedTable):
    """Image-independent attention of the prompt's last token, as a float32 table of shape (rows, columns)."""

    kind = "tokenprune attention prior"
    command = "fit d2pruner"

    def __str__(self) -> str:
        rows, columns = self.table.shape
        return f"{rows} x {columns} attention prior, maximum {self.table.max():.3g}"


@register(
    "d2pruner", site=Site.IN_LLM, needs=("last_row_attention",), paper="arXiv 2512.19443, AAAI 2026",
    reconstruction=True,
)  # fmt: skip
@dataclass(frozen=True)
class D2Pruner(Pruner):
    """Keep tokens with more attention than their position explains, and diverse ones (D2Pruner).

    Importance is the attention from the prompt's last token, divided by a prior: the attention at the same position of
    the image, averaged over many images. A share of the budget goes to the most important tokens. The rest is filled in
    order of importance; each pick suppresses the tokens similar to it. If all remaining tokens are suppressed,
    importance decides.

    Args:
        layer: First decoder layer that runs on the kept tokens. The layer before it provides the attention.
        prior: Path of a file written by `tokenprune fit d2pruner` for this model. None: a uniform prior.
        pivots: Share of the kept tokens that is chosen by importance only, in (0, 1]. At least one token.
        alpha: Weight of the similarity of two tokens against their spatial proximity, in [0, 1]. The authors use 1 for
            understanding and 0.5 for localisation.
        threshold: Similarity above which a pick suppresses another token.
        radius: Standard deviation of the spatial proximity, in cells of the token grid.

    Source:
        Zhang et al., "D2Pruner: Debiased Importance and Structural Diversity for MLLM Token Pruning" (arXiv
        2512.19443). Reconstruction: neither the paper's text nor its code was available. It follows the abstract, a
        review with formulas, and two ports that quote the settings.

    Differences from the paper:
        - Proximity is exp(-d^2 / (2 radius^2)), a guess. It is 0 between frames and for images with an unknown grid.
        - Similarity is the cosine of the hidden states that enter the layer.
        - The prior is interpolated to the grid of an image, or along the token order if the grid is unknown. Each cell
          counts at least a thousandth of the mean.

    Examples:
        >>> model = tokenprune.patch(model, D2Pruner(layer=2, pivots=0.5), keep=0.25)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.25
    fit = LazyFit("tokenprune_bench.calibration.attention_fitting", "fit_d2pruner")
    fit_limit: ClassVar[int | None] = 200  # the authors use 1000 images

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
            f"layer={self.layer} does not match {self.prior}. Pass layer={fitted and fitted.layer}.",
        )

    @cached_property
    def _fitted(self) -> AttentionPrior | None:
        return None if self.prior is None else AttentionPrior.load(self.prior)

    def check_model(self, decoder: torch.nn.Module) -> None:
        if self._fitted is not None and self.prior is not None:
            self._fitted.check_decoder(self.name, self.prior, decoder)

    def select(self, tokens: VisualTokens) -> Selection:
        importance = tokens.last_row_attention.float().mean(1) / self._compute_prior(tokens)
        importance = importance.nan_to_num(nan=-1.0)
        num_pivots = [max(1, int(self.pivots * keep)) for keep in tokens.keep]
        kept = top_mask(importance, tokens.mask, to_device(num_pivots, tokens.mask.device), max(num_pivots))
        num_diverse = max(keep - count for keep, count in zip(tokens.keep, num_pivots, strict=True))
        if num_diverse:
            candidates, num_picks = tokens.mask & ~kept, tokens.budget - kept.sum(1)
            kept = kept | self._pick_diverse(tokens, importance, candidates, num_picks, num_diverse)
        return Selection(adjust_count(kept, importance, tokens.mask, tokens.budget), counts=tokens.keep)

    def _compute_prior(self, tokens: VisualTokens) -> torch.Tensor:
        """Return the prior at the position of each token, shape (segments, tokens), float32, above 0."""
        prior = torch.ones(tokens.mask.shape, dtype=torch.float32, device="cpu")
        if self._fitted is None:
            tokens.note(f"{self.name}: prior=None, using raw attention. Run `tokenprune fit d2pruner` to fit a prior.")
        else:
            for row, (count, grid) in enumerate(zip(tokens.counts, tokens.grids, strict=True)):
                prior[row, :count] = resize_table(self._fitted.table, count, grid)
            prior = prior.clamp(min=max(_MIN_PRIOR * float(self._fitted.table.mean()), 1e-12))
        return to_device(prior, tokens.mask.device)

    def _pick_diverse(
        self,
        tokens: VisualTokens,
        importance: torch.Tensor,
        candidates: torch.Tensor,
        num_picks: torch.Tensor,
        max_picks: int,
    ) -> torch.Tensor:
        """Return up to `num_picks` diverse candidates by importance, shape (segments, tokens), bool."""
        cells, rows = self._get_cells(tokens), torch.arange(len(candidates), device=candidates.device)
        available, picked = candidates, torch.zeros_like(candidates)
        get_row = PickedRows(Products(normalize(tokens.hidden)))
        for step in range(max_picks):
            best = importance.masked_fill(~available, -torch.inf)
            pick = best.argmax(1)
            similarity = self.alpha * get_row(pick, best)
            if self.alpha < 1:
                similarity = similarity + (1 - self.alpha) * self._compute_proximity(cells, cells[rows, pick])
            new = torch.zeros_like(available).scatter(1, pick[:, None], True) & available & (step < num_picks)[:, None]
            picked = picked | new
            available = available & ~((similarity > self.threshold) & new.any(1, keepdim=True)) & ~new
        return picked

    def _get_cells(self, tokens: VisualTokens) -> torch.Tensor:
        """Return frame, row and column of each token, (segments, tokens, 3). Unknown grid: each token is a frame."""
        cells = torch.zeros(*tokens.mask.shape, 3, dtype=torch.float32, device="cpu")
        if self.alpha < 1:
            for row, (count, grid) in enumerate(zip(tokens.counts, tokens.grids, strict=True)):
                axes = [torch.arange(size, device="cpu") for size in (grid or (count, 1, 1))]
                cells[row, :count] = torch.cartesian_prod(*axes).view(count, 3).float()
        return to_device(cells, tokens.mask.device)

    def _compute_proximity(self, cells: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        """Return the proximity of all cells (segments, tokens, 3) to one cell (segments, 3), in [0, 1]."""
        cell = cell.unsqueeze(1)
        squared_distance = (cells[..., 1:] - cell[..., 1:]).square().sum(-1)
        return torch.exp(-squared_distance / (2 * self.radius**2)).masked_fill(cells[..., 0] != cell[..., 0], 0)


def resize_table(table: torch.Tensor, count: int, grid: tuple[int, int, int] | None) -> torch.Tensor:
    """Interpolate a table to the tokens of an image and return a float32 tensor of shape (count,).

    Args:
        table: Values on a grid, shape (rows, columns), float32.
        count: Number of tokens.
        grid: Frames, height and width of the token grid. All frames get the same values. None: interpolate along the
            token order.
    """
    if grid is None:
        return torch.nn.functional.interpolate(table.flatten()[None, None], size=count, mode="linear")[0, 0]
    frames, height, width = grid
    frame = torch.nn.functional.interpolate(table[None, None], size=(height, width), mode="bilinear")[0, 0]
    return frame.flatten().repeat(frames)
