# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.methods.fitted import FittedTable, LazyFit
from tokenprune.methods.multi_cut import CutStage, MultiCutMethod
from tokenprune.methods.registry import register
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.method import Method, Site
from tokenprune.selection.tokens import VisualTokens


class Recipe(FittedTable):
    """Shares of an image's tokens that each decoder layer sees: float32 `[recipes, layers]`, from all to few."""

    kind = "tokenprune fitprune recipe"
    command = "fit fitprune"

    def __str__(self) -> str:
        return f"{len(self.table)} recipes for {self.table.shape[1]} layers"


@register("fitprune", site=Site.IN_LLM, needs=("head_maxima",), paper="arXiv 2409.10197, AAAI 2025")
@dataclass(frozen=True)
class FitPrune(MultiCutMethod):
    """Drop a few visual tokens at every decoder layer, as many as a recipe says that was fitted so that attention
    stays what it was.

    Those leave of which the image's own tokens and the text after it make least: the product of the two means, of each
    row the most attention of any head.

    keep: tokens averaged over the decoder's layers.
    recipe: path of a file that `tokenprune fit fitprune` made for the model; None: every layer keeps the same share of
    what reaches it.

    Source: Ye et al., "Fit and Prune: Fast and Training-free Visual Token Pruning for Multi-modal Large Language
    Models", sections 3.2 and 3.3, and the authors' code where the two differ: tokens are ranked by the product of the
    two means, and the recipe says how many go.

    Differs from the paper: the recipe is fitted for the whole range of `keep` at once, and read between two of its
    rows, as shares of an image's tokens and not as their numbers. Tokens leave at the input of the next layer (there
    before the MLP of the same one, which later states do not tell). Without a recipe the schedule is ours.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.4
    fit = LazyFit("tokenprune_bench.calibration.attention_fitting", "fit_fitprune")

    recipe: str | Path | None = field(default=None, metadata={"file": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._fitted  # a file that is missing or broken is refused before a model is touched

    @cached_property
    def _fitted(self) -> Recipe | None:
        return None if self.recipe is None else Recipe.load(self.recipe)

    def check_model(self, decoder: torch.nn.Module) -> None:
        if self._fitted is not None and self.recipe is not None:
            self._fitted.check_decoder(self.name, self.recipe, decoder)

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.target == "flops_share":
            raise BudgetError(f"{self.name}: {budget} is not solved for a recipe: give keep or average_tokens")
        rows = () if self._fitted is None else tuple(map(tuple, self._fitted.table.tolist()))
        if rows and len(rows[0]) != layers:
            self._check(False, f"{self.recipe} is for {len(rows[0])} layers, and this decoder has {layers}")
        if budget.share is not None:
            compute_layer_shares(rows, layers, budget.share)  # raises for what cannot be
        parts = [_ByRecipe(**budget.init_values(), rows=rows) for _ in range(1, layers)]
        return [(CutStage(self, layer - 1, layer), part) for layer, part in enumerate(parts, 1)]

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.head_maxima.float().prod(1)


@dataclass(frozen=True, repr=False)
class _ByRecipe(Budget):
    """The budget of a layer by a recipe. rows: of the recipe; none: the same share at each layer."""

    rows: tuple[tuple[float, ...], ...] = ()

    def resolve(
        self, counts: Sequence[int], *, layer: int, shape: DecoderShape, text_tokens: int,
        original: Sequence[int] | None = None,
    ) -> list[int]:  # fmt: skip
        left = []
        for now, count in zip(counts, counts if original is None else original, strict=True):
            share = min(1.0, float(self.amount) / count) if self.share is None else self.share
            left.append(min(now, max(1, round(count * _known_shares(self.rows, shape.layers, share)[layer]))))
        return left


def compute_layer_shares(rows: Sequence[Sequence[float]], layers: int, share: float) -> list[float]:
    """Return what share of an image's tokens each layer sees, so that the average is `share`.

    rows: of a recipe; none: each layer keeps the same share of what reaches it. Raises BudgetError for what the first
    layer alone spends.
    """
    if share * layers <= 1 and share < 1:
        raise BudgetError(
            f"keep={share:g} cannot be reached: the first of {layers} layers alone spends it; ask for more"
        )
    if rows:
        few = [1.0] + [0.0] * (layers - 1)
        known = sorted([[1.0] * layers, *map(list, rows), few], key=sum, reverse=True)
        above = max(row for row in range(len(known)) if sum(known[row]) >= share * layers - 1e-9)
        below = min(above + 1, len(known) - 1)
        span = sum(known[above]) - sum(known[below])
        part = (sum(known[above]) - share * layers) / span if span else 0.0
        return [(1 - part) * one + part * other for one, other in zip(known[above], known[below], strict=True)]
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        low, high = (low, ratio) if sum(ratio**layer for layer in range(layers)) > share * layers else (ratio, high)
    return [low**layer for layer in range(layers)]


_known_shares = lru_cache(maxsize=64)(compute_layer_shares)  # asked at every layer of every call
