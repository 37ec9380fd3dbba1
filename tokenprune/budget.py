# SPDX-License-Identifier: Apache-2.0
"""What `keep` is turned into: a number of visual tokens for each image."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from tokenprune.accounting import DecoderShape
from tokenprune.errors import BudgetError

_SCOPES = ("image", "frame", "prompt")
TARGETS = ("keep", "average_tokens", "kv_share", "flops_share")


@dataclass(frozen=True)
class Budget:
    """How many visual tokens stay; exactly one of the first four fields is given.

    keep:            float in (0, 1]: share of the visual tokens of each image; int >= 1: tokens per image.
    average_tokens:  tokens per image averaged over the decoder's layers, what papers mean by "192 tokens".
    kv_share:        share of the visual tokens' KV bytes that remains, in (0, 1].
    flops_share:     share of the decoder's prefill FLOPs that remains (text included), in (0, 1].
    per:             "image": every image, video or tile has the budget for itself; "frame": so has every frame of a
                     video, such as the decoder sees (Qwen's towers join two); "prompt": all visual tokens of a prompt
                     share it, and compete.

    The last three are solved for the layer at which the method cuts, from closed forms (accounting.py).
    Raises BudgetError for anything else, and, when solved, for a target that this layer cannot reach.
    """

    keep: float | int | None = None
    average_tokens: float | None = None
    kv_share: float | None = None
    flops_share: float | None = None
    per: str = "image"

    def __post_init__(self) -> None:
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise BudgetError(
                f"a Budget needs exactly one of {', '.join(TARGETS)}; given: {', '.join(given) or 'none'}"
            )
        if self.per not in _SCOPES:
            raise BudgetError(f"per={self.per!r} is not known; use one of {', '.join(map(repr, _SCOPES))}")
        value = getattr(self, given[0])
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:  # NaN
            raise BudgetError(f"{given[0]} must be a number, not {value!r}")
        if given[0] == "keep":
            self._check_keep(value)
        elif not value > 0 or (given[0] != "average_tokens" and value > 1) or value == math.inf:
            limit = "" if given[0] == "average_tokens" else ", and at most 1"
            raise BudgetError(f"{given[0]}={value!r} is out of range: it must be positive{limit}")

    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)!r}" for name in TARGETS if getattr(self, name) is not None]
        return f"Budget({', '.join([*given, f'per={self.per!r}'] if self.per != 'image' else given)})"

    @staticmethod
    def _check_keep(keep: float | int) -> None:
        if isinstance(keep, numbers.Integral):
            if keep < 1:
                raise BudgetError(
                    f"keep={keep} keeps nothing: use an int >= 1 (tokens per image) or a float in (0, 1] (share)"
                )
        elif not 0 < keep <= 1:
            raise BudgetError(
                f"keep={keep!r} is no share: use a float in (0, 1], where 0.25 keeps a quarter of each image, "
                "or an int for tokens per image"
            )

    @classmethod
    def of(cls, keep: Any) -> Budget:
        """Return `keep` as a Budget: a number, or a Budget already."""
        if isinstance(keep, cls):
            return keep
        if keep is None:
            raise BudgetError("keep=None keeps nothing: use a float in (0, 1], an int >= 1 or a Budget")
        return cls(keep=keep)

    def is_identity(self) -> bool:
        """Whether this keeps every token of any image."""
        return self.keep == 1 and not isinstance(self.keep, numbers.Integral)

    def resolve(self, counts: list[int], *, layer: int, shape: DecoderShape, text_tokens: int) -> list[int]:
        """Return how many of each segment's `counts` tokens to keep, at least 1 and at most all, for one prompt.

        layer: the decoder layer at whose input the cut is made. shape: the decoder's sizes. text_tokens: tokens of the
        prompt that are not visual (for flops_share).
        """
        if self.keep is not None and isinstance(self.keep, numbers.Integral):
            return [min(int(self.keep), count) for count in counts]
        if self.keep is not None:
            return [self._share(count, self.keep) for count in counts]
        if self.average_tokens is not None:
            return [
                self._share(count, self._share_after(self.average_tokens / count, layer, [1] * shape.layers))
                for count in counts
            ]
        if self.kv_share is not None:
            share = self._share_after(self.kv_share, layer, shape.kv_widths)
        else:
            share = self._share_for_flops(sum(counts), layer, shape, text_tokens)
        return [self._share(count, share) for count in counts]

    @staticmethod
    def _share(count: int, share: float) -> int:
        return min(count, max(1, round(count * share)))

    def _share_after(self, average: float, layer: int, sizes: list[int]) -> float:
        """The share r kept from `layer` on so that the mean over layers is `average`: with K layers before it out of T
        that are alike, (K + (T - K) r) / T = average. sizes: what a token weighs in each layer."""
        before, behind = sum(sizes[:layer]), sum(sizes[layer:])
        share = (min(average, 1.0) * (before + behind) - before) / behind if behind else 0.0
        if share <= 0:
            raise BudgetError(
                f"{self} cannot be reached by a cut at layer {layer} of {len(sizes)}: the layers before it alone "
                f"spend {before / (before + behind):.3f} of the visual tokens; cut earlier or ask for more"
            )
        return share

    def _share_for_flops(self, visual: int, layer: int, shape: DecoderShape, text: int) -> float:
        """Bisection: FLOPs grow with the share."""
        full = shape.prefill_flops([text + visual] * shape.layers)

        def cost(share: float) -> float:
            return (
                shape.prefill_flops([text + visual] * layer + [text + share * visual] * (shape.layers - layer)) / full
            )

        if cost(0.0) >= self.flops_share:
            raise BudgetError(
                f"{self} cannot be reached by a cut at layer {layer}: text and the layers before it alone cost "
                f"{cost(0.0):.3f} of the prefill; cut earlier or ask for more"
            )
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if cost(middle) > self.flops_share else (middle, high)
        return high
