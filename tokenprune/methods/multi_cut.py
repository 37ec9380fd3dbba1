# SPDX-License-Identifier: Apache-2.0
"""Base classes of methods with several cuts inside the decoder, and the text attention that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import choose_layers, plan_cuts
from tokenprune.selection.method import Method, Pruner, Selection
from tokenprune.selection.tokens import VisualTokens

# Observables that `sum_text_attention` reads.
TEXT_ATTENTION = frozenset({"text_attention", "last_row_attention"})


@dataclass(frozen=True)
class MultiCutMethod(Pruner):
    """Base class of methods whose `stages` are several `CutStage`s inside the decoder."""

    def choose(self, tokens: VisualTokens, cut: int) -> Selection:
        """Return the selection at the cut with index `cut`. By default, every cut calls `select`."""
        return self.select(tokens)

    def budget_at(self, cut: int, count: int, keep: int) -> int:
        """Return the number of kept tokens at a cut with the budget `keep`. See `Method.resolve_count`."""
        return self.resolve_count(count, keep)


@dataclass(frozen=True)
class SharedBudgetCuts(MultiCutMethod):
    """Base class of methods whose cuts share one budget. Subclasses implement `score`, `select` or `choose`.

    Args:
        layers: Decoder layers whose inputs are cut, one per cut and rising. None uses `depths`.

    Attributes:
        depths: Share of the decoder layers before each cut.
        sizes: Relative number of kept tokens after each cut.
    """

    if TYPE_CHECKING:  # class attributes, or properties if they depend on options

        @property
        def depths(self) -> Sequence[float]: ...

        @property
        def sizes(self) -> Sequence[float]: ...

    layers: Sequence[Annotated[int, Ge(1)]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            num_cuts = len(self.depths)
            is_rising = all(layer < next_layer for layer, next_layer in pairwise(self.layers))
            self._check(
                len(self.layers) == num_cuts and is_rising,
                f"layers={self.layers!r} must be {num_cuts} rising decoder layers",
            )

    @property
    def cut_layer(self) -> int:
        return self.layers[0] if self.layers else 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        cut_layers = self.layers or choose_layers(self.depths, layers, budget)
        cuts = plan_cuts(layers, list(zip(cut_layers, self.sizes, strict=True)), budget)
        return [(CutStage(self, index, cut.layer), cut.budget) for index, cut in enumerate(cuts)]


def _from_method(name: str) -> Any:
    """Return a property that reads the attribute of the stage's method."""
    return property(attrgetter(f"method.{name}"))


@dataclass(frozen=True)
class CutStage(Pruner):
    """One cut of a method.

    Args:
        method: Method that the cut belongs to.
        index: Index of the cut, from 0.
        layer: Decoder layer whose input is cut.
    """

    method: MultiCutMethod
    index: int
    layer: int

    name, site = _from_method("name"), _from_method("site")
    paper, merges = _from_method("paper"), _from_method("merges")
    needs, chooses_count, min_tokens = _from_method("needs"), _from_method("chooses_count"), _from_method("min_tokens")
    encoder_layers, query_aware = _from_method("encoder_layers"), _from_method("query_aware")
    prefix_cache_safe = _from_method("prefix_cache_safe")

    def check_model(self, decoder: torch.nn.Module) -> None:
        self.method.check_model(decoder)

    def resolve_count(self, count: int, keep: int) -> int:
        return self.method.budget_at(self.index, count, keep)

    def select(self, tokens: VisualTokens) -> Selection:
        return self.method.choose(tokens, self.index)


def sum_text_attention(tokens: VisualTokens, weights: torch.Tensor) -> torch.Tensor:
    """Sum the attention of the text after each image to its visual tokens, in the layer before the cut.

    The method must need `TEXT_ATTENTION`.

    Args:
        tokens: Visual tokens.
        weights: Weight of each text token, (S, M) or (S, H, M).

    Returns:
        Attention per head, float32 (S, H, N). Images without text after them use the last prompt token.
    """
    mask, attention = tokens.text.mask, tokens.attention_from(weights)
    # On the CPU, reading the mask costs no synchronization and saves computing the last row.
    if mask.device.type == "cpu" and mask.numpy().any(axis=1).all():
        return attention
    return torch.where(mask.any(1)[:, None, None], attention, tokens.last_row_attention)
