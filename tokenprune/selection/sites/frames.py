# SPDX-License-Identifier: Apache-2.0
"""The base of methods that merge the frames of a video inside the vision tower (IN_ENCODER)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.encoder import TowerMethod

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FrameMix:
    """The frames of a video that are left behind a block, in order of time; all on the host.

    first: of each, the earliest frame that it is made of; rising, from 0. second: of each, the other one, or the first
    again where there is none. weight: of each, the first one's in the sum, in [0, 1]; the second has the rest. A frame
    that stands in neither is lost.
    """

    first: list[int]
    second: list[int]
    weight: list[float]

    @staticmethod
    def from_frames(frames: Sequence[tuple[int, int, float]]) -> FrameMix:
        """Return the mix of which `frames` lists (first, second, weight)."""
        first, second, weight = map(list, zip(*frames, strict=True))
        return FrameMix(first, second, weight)

    def apply(self, x: Tensor) -> Tensor:
        """`[F, ...]` -> `[F', ...]`, in the dtype of x; what is made of one frame is bit-equal to it."""
        out = x[to_device(self.first, x.device)]
        mixed = [i for i, (a, b) in enumerate(zip(self.first, self.second, strict=True)) if a != b]
        if not mixed:
            return out
        first, second = (x[to_device([side[i] for i in mixed], x.device)] for side in (self.first, self.second))
        weight = to_device([self.weight[i] for i in mixed], x.device, torch.float32).view(-1, *[1] * (x.ndim - 1))
        value = (weight * first + (1 - weight) * second).to(x.dtype)
        return out.index_copy(0, to_device(mixed, x.device), value)

    def find_owners(self, frames: int) -> list[int]:
        """Return, for each of the `frames` frames that there were, which of those left holds it; a lost one is with the
        frame before it."""
        return [bisect_right(self.first, frame) - 1 for frame in range(frames)]


@dataclass(frozen=True)
class FrameMerger(TowerMethod):
    """Base of the methods that merge frames of a video after blocks of the vision tower (IN_ENCODER), so that later
    blocks run on fewer, and then choose among the tokens of those left.

    A subclass implements `blocks`, `mix`, `groups` and `choose_tokens`. It sees one video at a time, and never a model.
    Images, the way back to the frames of the prompt, positions and budgets are the engine's.

    reads: name of the observable of a tower's block, mean over heads, that `choose_tokens` gets.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"frames"})
    chooses_count: ClassVar[bool] = True
    reads = "encoder_received_attention"

    def blocks(self, depth: int) -> list[int]:
        """Return after which of the `depth` blocks that the model reads frames merge: indices, rising, at least one.
        Raises OptionError for blocks that there are not."""
        raise NotImplementedError(f"{type(self).__name__} does not implement blocks()")

    def mix(self, hidden: Tensor) -> FrameMix:
        """Return which frames of a video are left behind a block.

        hidden: `[F, N, D]`, the block's output for the N patches of each frame that was left before it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement mix()")

    def groups(self, hidden: Tensor) -> list[int]:
        """Return how many frames each group has, of frames that follow each other. hidden: `[F, N, D]`, the frames that
        are left behind the last block at which some merge."""
        raise NotImplementedError(f"{type(self).__name__} does not implement groups()")

    def choose_tokens(self, received: Tensor, groups: Sequence[int], keep: int) -> Tensor:
        """Return which tokens of the frames left stay, bool `[F, P]`: at least one, at most `keep`.

        received: float32 `[F, P]`, on the host, what `reads` says of the patches of each token in the last block after
        which frames merge, the attention that they receive; of a mixed frame it is mixed alike. groups: see `groups`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement choose_tokens()")
