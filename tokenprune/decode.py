# SPDX-License-Identifier: Apache-2.0
"""What a method that goes on removing visual tokens while the answer is written has to say: how many, and when."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tokenprune.base import Pruner
from tokenprune.tokens import VisualTokens

_MODES = ("evict", "mask")
_POLICIES = ("ragged", "shared")


class TokenType(enum.IntEnum):
    """What attention is summed over: text before the first image, visual tokens, the rest of the prompt, the
    answer."""

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

    layer: int = 3
    mode: str = "evict"
    k_min: float = 0.1
    max_rate: float = 1.0
    monotone: bool = True
    batch_policy: str = "ragged"

    def __post_init__(self) -> None:
        self._check_int("layer", 1)
        self._check_one_of("mode", _MODES)
        self._check_number("k_min", 0, 1)
        self._check_number("max_rate", 0, 1)
        self._check(isinstance(self.monotone, bool), f"monotone={self.monotone!r} must be True or False")
        self._check(
            self.monotone or self.mode != "evict",
            "monotone=False lets tokens return, which mode='evict' has thrown away: use mode='mask'",
        )
        self._check_one_of("batch_policy", _POLICIES)

    @property
    def query_aware(self) -> bool:
        return True

    def score(self, tokens: VisualTokens) -> Tensor:
        """The ranking of the first cut, by the prompt's last token; that of the later ones is the same, by theirs."""
        return tokens.last_row_attention.mean(dim=1)

    def next_rate(self, masses: Tensor, share: Tensor) -> Tensor:
        """Return the share of its visual tokens that each row shall go without from this step on, `[B]` in 0..1.

        masses: float32 `[B, 1 + T, H, 4]`, attention mass of each head on each `TokenType`, at the end of the prompt
        and at the T decode steps so far, this one included. share: float64 `[B]`, what prefill kept.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement next_rate()")

    def decides(self, step: int) -> bool:
        """Whether `next_rate` is to be asked at decode step 1, 2, ...; if not, the last rate stays."""
        return True

    def check_model(self, decoder: nn.Module) -> None:
        """Raise OptionError if the method was fitted to another decoder than this one."""

    def fewest(self, visual: int) -> int:
        """Return how many of a row's `visual` tokens stay whatever the rate."""
        return max(1, math.ceil(self.k_min * visual - 1e-6))

    def _check_one_of(self, option: str, values: Sequence[str]) -> None:
        value = getattr(self, option)
        self._check(value in values, f"{option}={value!r} must be one of {', '.join(map(repr, values))}")

    def _check_number(self, option: str, low: float, high: float) -> None:
        self._check(is_number(getattr(self, option), low, high), f"{option} must be a number from {low} to {high}")


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a plain number from `low` to `high`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
