# SPDX-License-Identifier: Apache-2.0
"""Base class of methods that merge the frames of a video inside the vision tower (IN_ENCODER)."""

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
    """Merged frames of a video after a block, in temporal order. Each is a weighted mean of one or two input frames.

    Args:
        first: Index of the first input frame of each merged frame, ascending from 0.
        second: Index of the second input frame. Equals `first` if there is none.
        weight: Weight of the first input frame, in [0, 1]. The second has the rest. Frames in neither list are dropped.

    Examples:
        >>> mix = FrameMix.from_frames([(0, 1, 0.5), (2, 2, 1.0)])
        >>> mix.apply(torch.tensor([[1.0], [3.0], [5.0]]))
        tensor([[2.],
                [5.]])
    """

    first: list[int]
    second: list[int]
    weight: list[float]

    @staticmethod
    def from_frames(frames: Sequence[tuple[int, int, float]]) -> FrameMix:
        """Build a mix from (first, second, weight) of each merged frame."""
        first, second, weight = map(list, zip(*frames, strict=True))
        return FrameMix(first, second, weight)

    def apply(self, x: Tensor) -> Tensor:
        """Merge frames of shape (F, ...). A frame without a second input frame is copied bit for bit."""
        out = x[to_device(self.first, x.device)]
        merged = [i for i, (a, b) in enumerate(zip(self.first, self.second, strict=True)) if a != b]
        if not merged:
            return out
        first, second = (x[to_device([side[i] for i in merged], x.device)] for side in (self.first, self.second))
        weight = to_device([self.weight[i] for i in merged], x.device, torch.float32).view(-1, *[1] * (x.ndim - 1))
        value = (weight * first + (1 - weight) * second).to(x.dtype)
        return out.index_copy(0, to_device(merged, x.device), value)

    def find_owners(self, frames: int) -> list[int]:
        """Return the index of the merged frame that represents each of the `frames` input frames.

        A dropped frame is represented by the merged frame before it.
        """
        return [bisect_right(self.first, frame) - 1 for frame in range(frames)]


@dataclass(frozen=True)
class FrameMerger(TowerMethod):
    """Base class of methods that merge video frames after blocks of the vision tower, and then select tokens.

    Later blocks run on fewer frames. A subclass implements `blocks`, `mix`, `groups` and `choose_tokens`, which receive
    one video at a time. The engine handles images, positions, budgets, and the way back to the frames of the prompt.

    Attributes:
        reads: Name of the tower observable that `choose_tokens` receives, averaged over the heads.

    Examples:
        >>> class MergePairs(FrameMerger):
        ...     def blocks(self, depth):
        ...         return [depth // 2]
        ...
        ...     def mix(self, hidden):
        ...         last = len(hidden) - 1
        ...         return FrameMix.from_frames([(i, min(i + 1, last), 0.5) for i in range(0, len(hidden), 2)])
        ...
        ...     def groups(self, hidden):
        ...         return [len(hidden)]
        ...
        ...     def choose_tokens(self, received, groups, keep):
        ...         return received >= received.flatten().topk(keep).values[-1]
        >>> MergePairs().mix(torch.zeros(5, 4, 8)).first
        [0, 2, 4]
    """

    needs: ClassVar[frozenset[str]] = frozenset({"frames"})
    chooses_count: ClassVar[bool] = True
    reads = "encoder_received_attention"

    def blocks(self, depth: int) -> list[int]:
        """Return the blocks after which frames merge, ascending, at least one.

        Args:
            depth: Number of blocks that the model reads.

        Raises:
            OptionError: If an option names a block that does not exist.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement blocks()")

    def mix(self, hidden: Tensor) -> FrameMix:
        """Return the merged frames after a block.

        Args:
            hidden: Output of the block, shape (F, N, D), for the N patches of each remaining frame.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement mix()")

    def groups(self, hidden: Tensor) -> list[int]:
        """Return the sizes of groups of consecutive frames.

        Args:
            hidden: Frames after the last merge, shape (F, N, D).
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement groups()")

    def choose_tokens(self, received: Tensor, groups: Sequence[int], keep: int) -> Tensor:
        """Return the mask of kept tokens of the remaining frames, shape (F, P), bool.

        Args:
            received: Observable `reads` in the last block with a merge, shape (F, P), float32, on the host. Values of
                merged frames are merged with the same weights.
            groups: Result of `groups`.
            keep: Maximum number of kept tokens. At least one must be kept.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement choose_tokens()")
