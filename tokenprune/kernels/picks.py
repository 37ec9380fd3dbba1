# SPDX-License-Identifier: Apache-2.0
"""Tokens that are taken one after the other, each by a score of its own turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Picks:
    """The tokens taken so far in each segment, among `mask`, bool `[S, N]`. Asks the device nothing."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask
        self._taken: list[Tensor] = []
        # Added to a score it bars what cannot be taken: several times faster than filling by a mask.
        self._bar = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)

    def mask_taken(self, score: Tensor) -> Tensor:
        """float32 `[S, N]`: `score`, which is finite; -inf for what cannot be taken any more."""
        return score + self._bar

    def take_best(self, score: Tensor) -> Tensor:
        """long `[S]`: take the highest of `mask_taken` of each segment, of equal ones the first."""
        pick = score.argmax(1)
        self._bar.scatter_(1, pick.unsqueeze(1), -torch.inf)
        self._taken.append(pick)
        return pick

    @property
    def available(self) -> Tensor:
        """bool `[S, N]`: what can still be taken."""
        return self._bar == 0

    def first_picks(self, number: Tensor) -> Tensor:
        """bool `[S, N]`: the first `number` (long `[S]`) tokens that each segment took."""
        keep = torch.nn.functional.pad(torch.zeros_like(self._mask), (0, 1))  # the last entry is for those after them
        if self._taken:
            turn = torch.arange(len(self._taken), device=number.device)
            behind = turn >= number.unsqueeze(1)
            keep.scatter_(1, torch.stack(self._taken, 1).masked_fill_(behind, self._mask.shape[1]), True)
        return keep[:, :-1] & self._mask
