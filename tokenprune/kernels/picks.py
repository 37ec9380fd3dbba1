# SPDX-License-Identifier: Apache-2.0
"""State of a greedy selection: the selected tokens of each segment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Picks:
    """Tokens selected one after the other in each segment. No method synchronizes with the device.

    Args:
        mask: Candidates, bool `[S, N]`.

    Attributes:
        bar: 0, or -inf at tokens that cannot be selected, float32 `[S, N]`.
    """

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask
        self._taken: list[Tensor] = []
        # Adding -inf is several times faster than masked_fill.
        self.bar = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)

    def mask_taken(self, score: Tensor) -> Tensor:
        """Return finite scores with -inf at tokens that cannot be selected, float32 `[S, N]`."""
        return score + self.bar

    def take_best(self, score: Tensor) -> Tensor:
        """Select the highest score of `mask_taken` in each segment, long `[S]`. Ties go to the lower index."""
        pick = score.argmax(1)
        self.bar.scatter_(1, pick.unsqueeze(1), -torch.inf)
        self._taken.append(pick)
        return pick

    @property
    def available(self) -> Tensor:
        """Tokens that can still be selected, bool `[S, N]`."""
        return self.bar == 0

    def first_picks(self, count: Tensor, taken: Tensor | None = None) -> Tensor:
        """Return the first `count` (long `[S]`) selected tokens of each segment, bool `[S, N]`.

        taken: Selected tokens in order, long `[S, K]`, if they were not selected by `take_best`.
        """
        keep = torch.nn.functional.pad(torch.zeros_like(self._mask), (0, 1))  # the last column receives later picks
        if taken is None and self._taken:
            taken = torch.stack(self._taken, 1)
        if taken is not None:
            behind = torch.arange(taken.shape[1], device=count.device) >= count.unsqueeze(1)
            keep.scatter_(1, taken.masked_fill_(behind, self._mask.shape[1]), True)
        return keep[:, :-1] & self._mask
