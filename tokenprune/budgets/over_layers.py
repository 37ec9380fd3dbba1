# SPDX-License-Identifier: Apache-2.0
"""Solve budgets that are averages over the decoder layers for the layers at which a method cuts."""

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
    """Share of a decoder cost.

    Args:
        target: "kv_share" (KV bytes of the visual tokens) or "flops_share" (FLOPs of the prefill).
        share: Share of the cost without pruning, in (0, 1].
    """

    target: str
    share: float


class OverLayers(Protocol):
    """Part of a `Budget` that this module reads."""

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
    """Return the number of kept tokens per segment for each cut. See `Budget.solve`."""
    kept: Iterable[tuple[int, ...]]
    if budget.target == "flops_share":
        kept = _solve_flops(budget, cuts, counts, shape, text_tokens)
    else:
        kept = zip(*(_solve_average(budget, cuts, count, shape) for count in counts), strict=True)
    return [list(kept_of_cut) for kept_of_cut in kept]


@lru_cache(maxsize=4096)
def _solve_average(budget: OverLayers, cuts: Cuts, count: int, shape: DecoderShape) -> tuple[int, ...]:
    """Return the number of tokens that each cut keeps of a segment with `count` tokens. See `Budget.solve`."""
    sizes = shape.kv_widths if budget.target == "kv_share" else [1] * shape.layers
    ends = [layer for layer, _ in cuts[1:]] + [shape.layers]
    weights = [sum(sizes[layer:end]) for (layer, _), end in zip(cuts, ends, strict=True)]
    before, total = sum(sizes[: cuts[0][0]]), sum(sizes)
    share = min(1.0, float(budget.amount) / count if budget.share is None else budget.share)
    if before and before >= share * total * (1 - 1e-12) and share < 1:
        raise BudgetError(
            f"{budget} cannot be reached by a cut at layer {cuts[0][0]} of {shape.layers}: the layers before it spend "
            f"{before / total:.3f} of the visual tokens. Cut earlier, or keep more."
        )

    def spent(scale: float) -> float:
        kept = _scale_counts(cuts, count, scale)
        return before * count + sum(weight * num_kept for weight, num_kept in zip(weights, kept, strict=True))

    return tuple(map(round, _scale_counts(cuts, count, _find_scale(spent, share * total * count, cuts))))


@lru_cache(maxsize=1024)
def _solve_flops(
    budget: OverLayers, cuts: Cuts, counts: tuple[int, ...], shape: DecoderShape, text: int
) -> tuple[tuple[int, ...], ...]:
    """Return the number of kept tokens per segment for each cut, for a share of the FLOPs. See `Budget.solve`."""
    target, visual, first = float(budget.amount), sum(counts), cuts[0][0]
    ends = [layer for layer, _ in cuts[1:]] + [shape.layers]
    spans = [end - layer for (layer, _), end in zip(cuts, ends, strict=True)]

    def flops(kept: Sequence[float]) -> float:
        after = [text + num_kept for num_kept, span in zip(kept, spans, strict=True) for _ in range(span)]
        return shape.prefill_flops([text + visual] * first + after)

    max_flops, min_flops = flops([visual] * len(cuts)), flops([0] * len(cuts))
    if min_flops >= target * max_flops:
        raise BudgetError(
            f"{budget} cannot be reached by a cut at layer {first}: text and the layers before it cost "
            f"{min_flops / max_flops:.3f} of the prefill. Cut earlier, or keep more."
        )

    def spent(scale: float) -> float:
        scaled = (_scale_counts(cuts, count, scale) for count in counts)
        return flops([sum(counts_of_cut) for counts_of_cut in zip(*scaled, strict=True)])

    scale = _find_scale(spent, target * max_flops, cuts)
    return tuple(zip(*(map(round, _scale_counts(cuts, count, scale)) for count in counts), strict=True))


def _scale_counts(cuts: Cuts, count: int, scale: float) -> list[float]:
    """Return the kept tokens of each cut in proportion to its relative size, from 1 to `count`."""
    return [max(1.0, min(count, scale * relative * count)) for _, relative in cuts]


def _find_scale(spent: Callable[[float], float], target: float, cuts: Cuts) -> float:
    """Return the largest scale whose cost is at most `target`, by bisection. The cost increases with the scale."""
    low, high = 0.0, 1 / min(relative for _, relative in cuts)  # at `high`, every cut keeps all tokens
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) > target else (middle, high)
    return low
