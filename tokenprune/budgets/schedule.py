# SPDX-License-Identifier: Apache-2.0
"""Split one budget over several cuts of a method. Used by `Method.stages` of these methods."""

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
    """One of several cuts.

    Attributes:
        layer: Decoder layer at whose input the cut is made. 0 is the input of the decoder.
        budget: Budget of the cut.
    """

    layer: int
    budget: StageBudget


def plan_cuts(layers: int, cuts: Sequence[tuple[float | int, float]], budget: Budget) -> list[PlannedCut]:
    """Return the layer and the budget of each cut, so that `budget` is met on average over the layers.

    A float `keep` then means the same as `average_share`, and an int the same as `average_tokens`. `kv_share` and
    `flops_share` keep their meaning. `Budget.solve` computes the counts once the tokens of an image are known. The
    average over the layers is within one token of the budget. With `keep=1.0`, every budget is the identity.

    Args:
        layers: Number of decoder layers.
        cuts: (depth, relative) of each cut, in order. An int depth is a layer, a float depth the share of the layers
            before the cut. Cuts keep tokens in proportion to `relative`, which must not increase. PyramidDrop is
            ((0.25, 4), (0.5, 2), (0.75, 1)).
        budget: Budget of the method.

    Raises:
        OptionError: If the cuts are not in order, or two cuts are at the same layer.
        BudgetError: If the layers before the first cut spend more than the budget.

    Examples:
        >>> [cut.layer for cut in plan_cuts(32, ((0.25, 2), (0.5, 1)), Budget(keep=0.5))]
        [8, 16]
    """
    layer_cuts = tuple((_find_layer(depth, layers), float(relative)) for depth, relative in cuts)
    if not layer_cuts:
        raise OptionError("A schedule needs at least one cut.")
    for (layer, relative), (next_layer, next_relative) in pairwise(layer_cuts):
        if next_layer <= layer:
            raise OptionError(
                f"cuts {list(cuts)} are at layer {layer} and then at layer {next_layer} of {layers}. "
                "Pass increasing layers."
            )
        if next_relative > relative:
            raise OptionError(
                f"The cut at layer {next_layer} keeps more than the cut before it: {next_relative} > {relative}."
            )
    if not all(0 < relative < float("inf") for _, relative in layer_cuts):
        raise OptionError(f"The relative sizes of cuts must be positive numbers: {list(cuts)}.")
    counts_tokens = budget.keep is not None or budget.average_share is not None  # bytes and FLOPs differ between layers
    share = budget.share if counts_tokens else None
    first = layer_cuts[0][0]
    if share is not None and first >= share * layers and share < 1:
        raise BudgetError(
            f"{budget} cannot be reached by cuts from layer {first} of {layers} on: the layers before it spend "
            f"{first / layers:.3f} of the visual tokens. Cut earlier, or keep more."
        )
    values = budget.init_values() | {"total": budget, "cuts": layer_cuts}
    stages = (StageBudget(**values, index=index) for index in range(len(layer_cuts)))
    return [PlannedCut(layer, stage) for (layer, _), stage in zip(layer_cuts, stages, strict=True)]


def choose_layers(depths: Sequence[float], layers: int, budget: Budget) -> list[int]:
    """Return the decoder layers of several cuts, for `plan_cuts`.

    Each cut has its own layer, from layer 1 on. If the layers before the first cut would spend more than three quarters
    of the share that `budget` keeps, all depths shrink in proportion, until these layers spend half of it. A number of
    tokens changes no depth, because it has no share before an image is known.

    Args:
        depths: Share of the layers before each cut, increasing.
        layers: Number of decoder layers.
        budget: Budget of the method.

    Raises:
        OptionError: If the decoder has too few layers.

    Examples:
        >>> choose_layers((0.25, 0.5, 0.75), 32, Budget(keep=0.5))
        [8, 16, 24]
    """
    if layers <= len(depths):
        raise OptionError(
            f"A decoder of {layers} layers is too shallow for {len(depths)} cuts at different layers. "
            "Use a method with one cut, such as fastv."
        )
    share = budget.share
    shrink = share / 2 / depths[0] if share is not None and depths[0] > share * 3 / 4 else 1.0
    chosen: list[int] = []
    for index, depth in enumerate(depths):
        lowest, highest = (chosen[-1] if chosen else 0) + 1, layers - len(depths) + index
        chosen.append(min(highest, max(lowest, round(depth * shrink * layers))))
    return chosen


def _find_layer(depth: float | int, layers: int) -> int:
    layer = int(depth) if isinstance(depth, numbers.Integral) else round(depth * layers)
    if not 0 <= layer < layers:
        raise OptionError(f"A cut at layer {layer} is out of range: the decoder has layers 0 to {layers - 1}.")
    return layer


@dataclass(frozen=True, repr=False)
class StageBudget(Budget):
    """Budget of one of several cuts. Created by `plan_cuts`.

    Args:
        total: Budget that the cuts share.
        cuts: (layer, relative) of all cuts.
        index: Index of this cut.
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
        """Return the number of kept tokens per segment. See `Budget.resolve`.

        Args:
            counts: Tokens of each segment before this cut.
            layer: Ignored.
            shape: Sizes of the decoder.
            text_tokens: Number of text tokens of the prompt.
            original: Tokens of each segment at the first cut of the method. None at the first cut.
        """
        original = counts if original is None else original
        assert self.total is not None  # the default exists only because dataclass fields need one
        planned = self.total.solve(self.cuts, original, shape=shape, text_tokens=text_tokens)[self.index]
        return [min(count, num_kept) for count, num_kept in zip(counts, planned, strict=True)]
