# SPDX-License-Identifier: Apache-2.0
"""Parts of the methods that cut several times inside the decoder: their base, and the attention of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import place, profile
from tokenprune.selection.method import Method, Pruner, Selection
from tokenprune.selection.tokens import VisualTokens

# What `sum_text_attention` reads.
TEXT_ATTENTION = frozenset({"text_attention", "last_row_attention"})


@dataclass(frozen=True)
class MultiCutMethod(Pruner):
    """Base of the methods that make cuts inside the decoder which it places itself in `stages`, each a `CutStage`."""

    def choose(self, tokens: VisualTokens, cut: int) -> Selection:
        """Return which visual tokens stay at a cut, counted from 0; all choose alike where this is not overridden."""
        return self.select(tokens)

    def budget_at(self, cut: int, count: int, keep: int) -> int:
        """Return how many of `count` tokens a cut keeps where its budget asks for `keep`; see `Method.budget`."""
        return self.budget(count, keep)


@dataclass(frozen=True)
class SharedBudgetCuts(MultiCutMethod):
    """Base of those that share one budget among their cuts; a subclass implements `score`, `select` or `choose`.

    depths: for each cut the share of the decoder's layers before it, where no `layers` are given (see `place`).
    sizes:  what each cut keeps, in proportion to the others; a property where options say it.
    layers: an option, the decoder layer at whose input each cut is made.
    """

    if TYPE_CHECKING:  # attributes of a class, or properties where options say it

        @property
        def depths(self) -> Sequence[float]: ...

        @property
        def sizes(self) -> Sequence[float]: ...

    layers: Sequence[Annotated[int, Ge(1)]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            number = len(self.depths)
            rises = all(one < later for one, later in pairwise(self.layers))
            self._check(
                len(self.layers) == number and rises,
                f"layers={self.layers!r} must name {number} decoder layers, each after the one before",
            )

    @property
    def cut_layer(self) -> int:
        return self.layers[0] if self.layers else 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        placed = self.layers or place(self.depths, layers, budget)
        cuts = profile(layers, list(zip(placed, self.sizes, strict=True)), budget)
        return [(CutStage(self, number, cut.layer), cut.budget) for number, cut in enumerate(cuts)]


def _from_method(name: str) -> Any:
    """Return a property of a cut that is its method's."""
    return property(attrgetter(f"method.{name}"))


@dataclass(frozen=True)
class CutStage(Pruner):
    """One of the cuts of a method. method: the method. index: of the cut, from 0. layer: at whose input it is made."""

    method: MultiCutMethod
    index: int
    layer: int

    name, site, paper, merges = (
        _from_method("name"),
        _from_method("site"),
        _from_method("paper"),
        _from_method("merges"),
    )
    needs, by_content_count, least = _from_method("needs"), _from_method("by_content_count"), _from_method("least")
    encoder_layers, query_aware = _from_method("encoder_layers"), _from_method("query_aware")
    prefix_cache_safe = _from_method("prefix_cache_safe")

    def check_model(self, decoder: torch.nn.Module) -> None:
        self.method.check_model(decoder)

    def budget(self, count: int, keep: int) -> int:
        return self.method.budget_at(self.index, count, keep)

    def select(self, tokens: VisualTokens) -> Selection:
        return self.method.choose(tokens, self.index)


def sum_text_attention(tokens: VisualTokens, weights: torch.Tensor) -> torch.Tensor:
    """float32 `[S, H, N]`: attention that the text after each image pays to each visual token in the layer before the
    cut, summed over its tokens with `weights`, `[S, M]` or `[S, H, M]`; that of the prompt's last token where no text
    is after an image. The method has to need `TEXT_ATTENTION`."""
    alone, votes = ~tokens.text.mask.any(1), tokens.attention_from(weights)
    if alone.device.type == "cpu" and not alone.any():  # the host may be asked, and then needs no other row
        return votes
    return torch.where(alone[:, None, None], tokens.last_row_attention, votes)
