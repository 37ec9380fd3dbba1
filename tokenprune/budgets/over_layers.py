# SPDX-License-Identifier: Apache-2.0
"""Budgets that are averages over the decoder's layers, solved for the layers at which a method cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tokenprune.errors import BudgetError
from tokenprune.models.decoder_shape import DecoderShape

Cuts = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CostShare:
    """Share of a cost of the decoder. target: "kv_share" (KV bytes of the visual tokens) or "flops_share" (prefill)."""

    target: str
    share: float


class OverLayers(Protocol):
    """The part of a `Budget` that is read here."""

    @property
    def target(self) -> str: ...

    @property
    def amount(self) -> Any: ...

    @property
    def share(self) -> float | None: ...

    def __hash__(self) -> int: ...


def solve(
    budget: OverLayers, cuts: Cuts, counts: tuple[int, ...], shape: DecoderShape, text_tokens: int
) -> list[list[int]]:
    """Return how many of each segment's tokens each cut keeps; see `Budget.solve`."""
    kept: Iterable[tuple[int, ...]]
    if budget.target == "flops_share":
        kept = _kept_for_flops(budget, cuts, counts, shape, text_tokens)
    else:
        kept = zip(*(_kept_on_average(budget, cuts, count, shape) for count in counts), strict=True)
    return [list(of_cut) for of_cut in kept]


@lru_cache(maxsize=4096)
def _kept_on_average(budget: OverLayers, cuts: Cuts, count: int, shape: DecoderShape) -> tuple[int, ...]:
    """Return the number of a segment's `count` tokens that each cut keeps; see `Budget.solve`."""
    sizes = shape.kv_widths if budget.target == "kv_share" else [1] * shape.layers
    ends = [layer for layer, _ in cuts[1:]] + [shape.layers]
    weights = [sum(sizes[layer:end]) for (layer, _), end in zip(cuts, ends, strict=True)]
    before, whole = sum(sizes[: cuts[0][0]]), sum(sizes)
    share = min(1.0, float(budget.amount) / count if budget.share is None else budget.share)
    if before and before >= share * whole * (1 - 1e-12) and share < 1:
        raise BudgetError(
            f"{budget} cannot be reached by a cut at layer {cuts[0][0]} of {shape.layers}: the layers before it alone "
            f"spend {before / whole:.3f} of the visual tokens; cut earlier or ask for more"
        )

    def spent(scale: float) -> float:
        kept = _kept(cuts, count, scale)
        return before * count + sum(weight * number for weight, number in zip(weights, kept, strict=True))

    return tuple(map(round, _kept(cuts, count, _largest(spent, share * whole * count, cuts))))


@lru_cache(maxsize=1024)
def _kept_for_flops(
    budget: OverLayers, cuts: Cuts, counts: tuple[int, ...], shape: DecoderShape, text: int
) -> tuple[tuple[int, ...], ...]:
    """Return for each cut how many of each segment's `counts` tokens it keeps; see `Budget.solve`."""
    target, visual, first = float(budget.amount), sum(counts), cuts[0][0]
    ends = [layer for layer, _ in cuts[1:]] + [shape.layers]
    spans = [end - layer for (layer, _), end in zip(cuts, ends, strict=True)]

    def flops(kept: Sequence[float]) -> float:
        after = [text + number for number, span in zip(kept, spans, strict=True) for _ in range(span)]
        return shape.prefill_flops([text + visual] * first + after)

    full, least = flops([visual] * len(cuts)), flops([0] * len(cuts))
    if least >= target * full:
        raise BudgetError(
            f"{budget} cannot be reached by a cut at layer {first}: text and the layers before it alone cost "
            f"{least / full:.3f} of the prefill; cut earlier or ask for more"
        )

    def spent(scale: float) -> float:
        return flops([sum(of_cut) for of_cut in zip(*(_kept(cuts, count, scale) for count in counts), strict=True)])

    scale = _largest(spent, target * full, cuts)
    return tuple(zip(*(map(round, _kept(cuts, count, scale)) for count in counts), strict=True))


def _kept(cuts: Cuts, count: int, scale: float) -> list[float]:
    return [max(1.0, min(count, scale * relative * count)) for _, relative in cuts]


def _largest(spent: Callable[[float], float], target: float, cuts: Cuts) -> float:
    """Return the largest scale that does not spend more than `target`, by bisection: the cost grows with the scale."""
    low, high = 0.0, 1 / min(relative for _, relative in cuts)  # at which every cut keeps all
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) > target else (middle, high)
    return low
