# SPDX-License-Identifier: Apache-2.0
"""Hand values from stage to stage of one method within a forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenprune.integrations.hf.sequence.segments import Kept


class Carry(dict[str, Any]):
    """Values that the stages of one method remember, by name; see `VisualTokens.remember`.

    original: visual tokens of each segment of the prompt that reached the first stage that ran. still: names of what
    does not follow cuts, whatever its shape.
    """

    def __init__(self, original: list[int]) -> None:
        super().__init__()
        self.original = original
        self.still: set[str] = set()

    def remember(self, name: str, value: Any, per_token: bool | None) -> None:
        """Keep `value`; see `VisualTokens.remember`."""
        self[name] = value
        self.still.discard(name)
        if per_token is False:
            self.still.add(name)

    def follow(self, kept: Kept) -> None:
        """Leave out what belongs to tokens, and to segments, that a cut took away."""
        for name, value in self.items():
            if name not in self.still and isinstance(value, Tensor) and value.shape[:2] == kept.keep.shape:
                self[name] = kept.follow(value)
            elif kept.withdraws and isinstance(value, (Tensor, list)) and len(value) == len(kept.counts):
                self[name] = kept.segments_of(value)
