# SPDX-License-Identifier: Apache-2.0
"""Share one budget among several cuts of a method: `profile` is what `Method.stages` of such a method calls."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError
from tokenprune.models.decoder_shape import DecoderShape


class PlannedCut(NamedTuple):
    """One of several cuts: the decoder layer at whose input it is made (0: the decoder's entry), and its budget."""

    layer: int
    budget: StageBudget


def plan_cuts(layers: int, cuts: Sequence[tuple[float | int, float]], budget: Budget) -> list[PlannedCut]:
    """Return the layer and the budget of each cut of a method, such that `budget` is met as an average over the layers.

    layers: of the decoder. cuts: (depth, relative) of each cut, in order. depth: an int is a layer, a float the share
    of the layers that come before the cut. relative: what the cut keeps of the tokens that arrive at the first one, in
    proportion to the other cuts; it may not rise from cut to cut. ((0.25, 4), (0.5, 2), (0.75, 1)) is PyramidDrop's.

    A float `keep` is then the average share of an image's tokens, like `average_share`, an int the average number, like
    `average_tokens`; `kv_share` and `flops_share` mean what they mean for one cut. The counts are solved when an
    image's tokens are known (`Budget.solve`): each is at least 1 and at most what arrives, and their average over the
    layers is within one token of what was asked for. With `keep=1.0` every budget is the identity.

    Raises OptionError for cuts that are not in order, or fall on one layer in a decoder of so few, and BudgetError for
    a share that the layers before the first cut spend alone.
    """
    placed = tuple((_layer_at(depth, layers), float(relative)) for depth, relative in cuts)
    if not placed:
        raise OptionError("a schedule needs at least one cut")
    for (layer, relative), (later, less) in pairwise(placed):
        if later <= layer:
            raise OptionError(
                f"cuts {list(cuts)} fall on layer {layer} and then on layer {later} of {layers}: name layers that are "
                "apart, and in order"
            )
        if less > relative:
            raise OptionError(f"the cut at layer {later} may not keep more than the one before it: {less} > {relative}")
    if not all(0 < relative < float("inf") for _, relative in placed):
        raise OptionError(f"relative sizes of cuts must be positive numbers: {list(cuts)}")
    tokens = budget.keep is not None or budget.average_share is not None  # not bytes or FLOPs, for which layers differ
    share = budget.share if tokens else None
    if share is not None and placed[0][0] >= share * layers and share < 1:
        raise BudgetError(
            f"{budget} cannot be reached by cuts from layer {placed[0][0]} of {layers} on: the layers before it alone "
            f"spend {placed[0][0] / layers:.3f} of the visual tokens; cut earlier or ask for more"
        )
    values = budget.init_values() | {"total": budget, "cuts": placed}
    stages = (StageBudget(**values, index=index) for index in range(len(placed)))
    return [PlannedCut(layer, stage) for (layer, _), stage in zip(placed, stages, strict=True)]


def choose_layers(depths: Sequence[float], layers: int, budget: Budget) -> list[int]:
    """Return the decoder layers at which a method that cuts several times inside the decoder does so, for `profile`.

    depths: for each cut the share of the layers that come before it, rising. layers: of the decoder. Cuts are at
    layer 1 or after it, each at a layer of its own, however few there are. Where the layers before the first cut alone
    would spend more than three quarters of the share that `budget` asks for, all depths shrink in proportion, until
    they spend half of it. A number of tokens says no share before an image is seen, and moves nothing.

    Raises OptionError for a decoder that has fewer layers than that takes.
    """
    if layers <= len(depths):
        raise OptionError(
            f"a decoder of {layers} layers is too shallow for {len(depths)} cuts, each at a layer of its own after "
            "the first: use a method that cuts once, such as fastv"
        )
    share = budget.share
    shrink = share / 2 / depths[0] if share is not None and depths[0] > share * 3 / 4 else 1.0
    placed: list[int] = []
    for number, depth in enumerate(depths):
        least, most = (placed[-1] if placed else 0) + 1, layers - len(depths) + number
        placed.append(min(most, max(least, round(depth * shrink * layers))))
    return placed


def _layer_at(depth: float | int, layers: int) -> int:
    layer = int(depth) if isinstance(depth, numbers.Integral) else round(depth * layers)
    if not 0 <= layer < layers:
        raise OptionError(f"a cut at layer {layer} of {layers} is out of range: the last one is layer {layers - 1}")
    return layer


@dataclass(frozen=True, repr=False)
class StageBudget(Budget):
    """The part that one of several cuts has in a budget; `profile` makes them.

    total: the budget that the cuts share. cuts: (layer, relative) of all of them. index: which of them this is.
    """

    total: Budget | None = None
    cuts: tuple[tuple[int, float], ...] = ()
    index: int = 0

    def resolve(
        self,
        counts: Sequence[int],
        *,
        layer: int,
        shape: DecoderShape,
        text_tokens: int,
        original: Sequence[int] | None = None,
    ) -> list[int]:
        """Return how many of each segment's `counts` tokens to keep; see `Budget.resolve`. original: tokens of each
        segment at the method's first cut; None at that cut itself."""
        original = counts if original is None else original
        assert self.total is not None  # a default for dataclasses alone
        planned = self.total.solve(self.cuts, original, shape=shape, text_tokens=text_tokens)[self.index]
        return [min(count, number) for count, number in zip(counts, planned, strict=True)]
