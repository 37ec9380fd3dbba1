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
    """Share of an image's tokens that each decoder layer sees: a float32 table (recipes, layers), sorted by total."""

    kind = "tokenprune fitprune recipe"
    command = "fit fitprune"

    def __str__(self) -> str:
        return f"{len(self.table)} recipes for {self.table.shape[1]} layers"


@register("fitprune", site=Site.IN_LLM, needs=("head_maxima",), paper="arXiv 2409.10197, AAAI 2025")
@dataclass(frozen=True)
class FitPrune(MultiCutMethod):
    """Drop a few tokens at every decoder layer by a fitted recipe (FitPrune).

    A recipe states the share of tokens that each layer sees. It is fitted so that the attention distributions change as
    little as possible. Each layer drops the tokens with the lowest score: the mean attention from later visual tokens
    times the mean attention from the text after the image, both after a maximum over heads.

    `keep` is the average number of tokens over the decoder's layers.

    Args:
        recipe: Path of a file written by `tokenprune fit fitprune` for this model. None: every layer keeps the same
            share of its input tokens.

    Source:
        Ye et al., "Fit and Prune: Fast and Training-free Visual Token Pruning for Multi-modal Large Language Models"
        (arXiv 2409.10197), sections 3.2 and 3.3. The authors' code decides where the two differ: tokens are ranked by
        the product of the two means, and the recipe gives the number of dropped tokens.

    Differences from the paper:
        - One recipe covers all values of `keep`; values between two rows are interpolated. It stores shares, not
          counts.
        - Tokens leave at the input of the next layer. The authors drop them before the MLP of the same layer.
        - The schedule without a recipe is an addition.

    Examples:
        >>> model = tokenprune.patch(model, FitPrune(), keep=0.5)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        5
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.4
    fit = LazyFit("tokenprune_bench.calibration.attention_fitting", "fit_fitprune")

    recipe: str | Path | None = field(default=None, metadata={"file": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._fitted  # reject a missing or corrupt file before the model is patched

    @cached_property
    def _fitted(self) -> Recipe | None:
        return None if self.recipe is None else Recipe.load(self.recipe)

    def check_model(self, decoder: torch.nn.Module) -> None:
        if self._fitted is not None and self.recipe is not None:
            self._fitted.check_decoder(self.name, self.recipe, decoder)

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.target == "flops_share":
            raise BudgetError(f"{self.name} does not support {budget}. Pass keep or average_tokens.")
        rows = () if self._fitted is None else tuple(map(tuple, self._fitted.table.tolist()))
        if rows and len(rows[0]) != layers:
            self._check(False, f"{self.recipe} has {len(rows[0])} layers, but the decoder has {layers}")
        if budget.share is not None:
            compute_layer_shares(rows, layers, budget.share)  # raises BudgetError for an unreachable share
        budgets = [_ByRecipe(**budget.init_values(), rows=rows) for _ in range(1, layers)]
        return [(CutStage(self, layer - 1, layer), layer_budget) for layer, layer_budget in enumerate(budgets, 1)]

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.head_maxima.float().prod(1)


@dataclass(frozen=True, repr=False)
class _ByRecipe(Budget):
    """Budget of one layer. `rows` are the rows of a recipe; if empty, every layer keeps the same share of its input."""

    rows: tuple[tuple[float, ...], ...] = ()

    def resolve(
        self, counts: Sequence[int], *, layer: int, shape: DecoderShape, text_tokens: int,
        original: Sequence[int] | None = None,
    ) -> list[int]:  # fmt: skip
        kept = []
        for num_before, count in zip(counts, counts if original is None else original, strict=True):
            share = min(1.0, float(self.amount) / count) if self.share is None else self.share
            kept.append(
                min(num_before, max(1, round(count * _cached_layer_shares(self.rows, shape.layers, share)[layer])))
            )
        return kept


def compute_layer_shares(rows: Sequence[Sequence[float]], layers: int, share: float) -> list[float]:
    """Return the share of an image's tokens that each layer sees, so that the average is `share`.

    Args:
        rows: Rows of a recipe, one share per layer. Empty: every layer keeps the same share of its input.
        layers: Number of decoder layers.
        share: Requested average share.

    Raises:
        BudgetError: If the first layer, which sees all tokens, exceeds the budget.
    """
    if share * layers <= 1 and share < 1:
        raise BudgetError(
            f"keep={share:g} is too low: the first of {layers} layers sees all tokens. Pass a value above 1/{layers}."
        )
    if rows:
        few = [1.0] + [0.0] * (layers - 1)
        known = sorted([[1.0] * layers, *map(list, rows), few], key=sum, reverse=True)
        above = max(row for row in range(len(known)) if sum(known[row]) >= share * layers - 1e-9)
        below = min(above + 1, len(known) - 1)
        span = sum(known[above]) - sum(known[below])
        weight = (sum(known[above]) - share * layers) / span if span else 0.0
        return [
            (1 - weight) * share_above + weight * share_below
            for share_above, share_below in zip(known[above], known[below], strict=True)
        ]
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        low, high = (low, ratio) if sum(ratio**layer for layer in range(layers)) > share * layers else (ratio, high)
    return [low**layer for layer in range(layers)]


_cached_layer_shares = lru_cache(maxsize=64)(compute_layer_shares)  # called for every layer of every forward
