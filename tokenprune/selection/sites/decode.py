# SPDX-License-Identifier: Apache-2.0
"""Base class of methods that remove further visual tokens during decoding (DECODE)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from tokenprune.selection.method import Pruner
from tokenprune.selection.tokens import VisualTokens

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, Ge(0), Le(1)]


class TokenType(enum.IntEnum):
    """Groups of tokens over which attention is summed.

    SYS is the text before the first image, IMG the visual tokens, INS the rest of the prompt, RES the answer.
    """

    SYS = 0
    IMG = 1
    INS = 2
    RES = 3


@dataclass(frozen=True)
class DecodeMethod(Pruner):
    """Base class of DECODE methods. A subclass implements `next_rate`, and `decides` to skip steps.

    Layers before `layer` keep every token. The first cut is made in prefill at the input of `layer`, to the budget. At
    each decode step, the engine sums the attention of the newest token in the layer before by `TokenType` and calls
    `next_rate` for a pruning rate R. Layers from `layer` on then keep ceil((1 - R) * n) of the n visual tokens of a
    row: the tokens with the most attention from the newest token. A row that keeps all visual tokens in prefill also
    keeps them while decoding.

    Args:
        layer: Index of the decoder layer at whose input tokens are removed.
        mode: "evict" removes tokens from the cache. "mask" hides them, so that they can return.
        k_min: Minimum share of the visual tokens that is kept.
        max_rate: Upper limit of the pruning rate.
        monotone: True if the rate never decreases. Requires mode="mask" if False.
        batch_policy: "ragged" applies a rate per row. "shared" applies one rate to all rows.

    Examples:
        >>> class HalfOfTheRest(DecodeMethod):
        ...     def next_rate(self, masses, share):
        ...         return 1 - share / 2
        >>> HalfOfTheRest(layer=2).count_min_kept(100)
        10
    """

    layer: Annotated[int, Ge(1)] = 3
    mode: Literal["evict", "mask"] = "evict"
    k_min: Share = 0.1
    max_rate: Share = 1.0
    monotone: bool = True
    batch_policy: Literal["ragged", "shared"] = "ragged"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            self.monotone or self.mode != "evict",
            "monotone=False restores tokens, which mode='evict' has deleted. Use mode='mask'.",
        )

    @property
    def query_aware(self) -> bool:
        return True

    def score(self, tokens: VisualTokens) -> Tensor:
        """Return the attention of the last prompt token to each visual token, averaged over the heads.

        Later cuts rank tokens in the same way, by the attention of the newest token.
        """
        return tokens.last_row_attention.mean(dim=1)

    def next_rate(self, masses: Tensor, share: Tensor) -> Tensor:
        """Return the share of visual tokens to remove from this step on, shape (B,), in [0, 1].

        Args:
            masses: Attention mass by head and `TokenType`, shape (B, 1 + T, H, 4), float32: at the end of the prompt,
                and at each of the T decode steps up to this one.
            share: Share of the visual tokens that prefill kept, shape (B,), float64.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement next_rate()")

    def decides(self, step: int) -> bool:
        """Return True if `next_rate` is called at this decode step (1, 2, ...). Otherwise the last rate applies."""
        return True

    def count_min_kept(self, visual: int) -> int:
        """Return the minimum number of kept tokens of a row with `visual` visual tokens."""
        return max(1, math.ceil(self.k_min * visual - 1e-6))
