# SPDX-License-Identifier: Apache-2.0
"""The base of methods that go on removing visual tokens while the answer is written."""

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
    """The groups of tokens that attention is summed over: text before the first image, visual tokens, the rest of the
    prompt, the answer."""

    SYS = 0
    IMG = 1
    INS = 2
    RES = 3


@dataclass(frozen=True)
class DecodeMethod(Pruner):
    """Base of methods at the site DECODE, whose options are all but how the rate is found.

    Layers before `layer` keep every token. At the input of `layer` a first cut is made in prefill, to `keep`; at each
    decode step the engine sums the attention of the newest token in the layer before over the four `TokenType`s, asks
    for a rate R, and leaves ceil((1 - R) N) of the N visual tokens of a row to the layers from `layer` on: those that
    this token attends to most. A row of which the prefill keeps every visual token loses none while decoding either.

    A subclass implements `next_rate`, and `decides` if it does not want to be asked at every step.
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
            "monotone=False lets tokens return, which mode='evict' has thrown away: use mode='mask'",
        )

    @property
    def query_aware(self) -> bool:
        return True

    def score(self, tokens: VisualTokens) -> Tensor:
        """Return the ranking of the first cut, by the prompt's last token; that of the later ones is the same, by
        theirs."""
        return tokens.last_row_attention.mean(dim=1)

    def next_rate(self, masses: Tensor, share: Tensor) -> Tensor:
        """Return the share of its visual tokens that each row shall go without from this step on, `[B]` in 0..1.

        masses: float32 `[B, 1 + T, H, 4]`, attention mass of each head on each `TokenType`, at the end of the prompt
        and at the T decode steps so far, this one included. share: float64 `[B]`, what prefill kept.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement next_rate()")

    def decides(self, step: int) -> bool:
        """Return True if `next_rate` is called at decode step 1, 2, ...; if not, the last rate stays."""
        return True

    def count_min_kept(self, visual: int) -> int:
        """Return how many of a row's `visual` tokens stay whatever the rate."""
        return max(1, math.ceil(self.k_min * visual - 1e-6))
