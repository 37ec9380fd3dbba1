# SPDX-License-Identifier: Apache-2.0
"""`Videos`: video tokens laid out by frame, for methods that compare frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import group_by_frame
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.tokens import VisualTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Videos:
    """Tokens of videos, laid out by frame.

    Shapes use V videos, F frames in the longest video, P tokens in the largest frame, and S segments of N tokens.

    Args:
        tokens: Input of the method.
        segments: Indices of the segments that are videos, V entries.
        frames: Number of tokens in each frame, for each video.
        keep: Number of tokens to keep in the frames of each video, at least 1. Tokens outside of frames (such as a
            newline) are kept first and reduce this number.

    Examples:
        >>> from tokenprune.testing import visual_tokens
        >>> tokens = visual_tokens(torch.zeros(1, 12, 8), grids=[(3, 2, 2)], modality="video", keep=6, frames=[[4] * 3])
        >>> Videos.from_tokens(tokens).hidden.shape
        torch.Size([1, 3, 4, 8])
    """

    tokens: VisualTokens
    segments: list[int]
    frames: list[list[int]]
    keep: list[int]

    @staticmethod
    def from_tokens(tokens: VisualTokens, several_frames: bool = False) -> Videos | None:
        """Lay out the segments that lose tokens, or return None if no segment does.

        An image that keeps all its tokens is excluded: all frames would be padded to its size.

        Args:
            tokens: Input of the method. It must declare the observable "frames".
            several_frames: Also include segments with several frames that keep all their tokens.
        """
        facts = zip(tokens.counts, tokens.keep, tokens.frames, strict=True)
        chosen = [
            index
            for index, (count, keep, frames) in enumerate(facts)
            if keep < count or (several_frames and len(frames) > 1)
        ]
        if not chosen:
            return None
        frames = [tokens.frames[i] for i in chosen]
        outside = [tokens.counts[i] - sum(sizes) for i, sizes in zip(chosen, frames, strict=True)]
        keep = [max(1, tokens.keep[i] - count) for i, count in zip(chosen, outside, strict=True)]
        return Videos(tokens, chosen, frames, keep)

    @property
    def grids(self) -> list[tuple[int, int, int] | None]:
        """Grid of one frame of each video as (1, height, width). None if it is unknown."""
        return [None if (grid := self.tokens.grids[i]) is None else (1, *grid[1:]) for i in self.segments]

    @cached_property
    def budget(self) -> Tensor:
        """`keep` as a tensor on the device, shape (V,), int64."""
        return to_device(self.keep, self.mask.device)

    @cached_property
    def sizes(self) -> Tensor:
        """Number of tokens in each frame, shape (V, F), int64. Padding is 0."""
        num_frames = max(map(len, self.frames))
        return to_device([[*sizes, *[0] * (num_frames - len(sizes))] for sizes in self.frames], self.mask.device)

    @cached_property
    def num_frames(self) -> Tensor:
        """Number of frames of each video, shape (V,), int64."""
        return to_device([len(sizes) for sizes in self.frames], self.mask.device)

    @property
    def hidden(self) -> Tensor:
        """Hidden states at the cut, shape (V, F, P, D), float32. Padding and tokens that contain NaN or inf are 0."""
        return self._hidden_and_mask[0]

    @property
    def mask(self) -> Tensor:
        """Mask of tokens, shape (V, F, P), bool. Padding is False."""
        return self._hidden_and_mask[1]

    @cached_property
    def _hidden_and_mask(self) -> tuple[Tensor, Tensor]:
        hidden, mask = self.group_by_frame(self.tokens.hidden)
        hidden = hidden.float()
        return hidden.masked_fill(~hidden.isfinite().all(-1, keepdim=True), 0), mask

    def group_by_frame(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return values of shape (S, N, ...) as (V, F, P, ...), padded with zeros, and the mask."""
        frame_size = max(map(max, self.frames))
        return group_by_frame(self._select(values), *self._frame_indices, max(map(len, self.frames)), frame_size)

    def ungroup(self, values: Tensor) -> Tensor:
        """Return values of shape (V, F, P) in token order, shape (V, N). Tokens outside of frames get 0."""
        frame, index = self._frame_indices
        flat_index = frame.clamp(min=0) * values.shape[2] + index.clamp(min=0)
        return values.flatten(1).gather(1, flat_index).masked_fill(frame < 0, 0)

    def top(self, score: Tensor) -> Tensor:
        """Return the mask of the highest scores of each video, shape (V, F, P), bool.

        Ties go to the earlier token, and NaN ranks lowest.

        Args:
            score: Score of each token, shape (V, F, P), float.
        """
        keep = top_mask(score.flatten(1), self.mask.flatten(1), self.budget, max(self.keep))
        return keep.view_as(self.mask)

    def top_per_frame(self, score: Tensor, counts: Tensor) -> Tensor:
        """Return the mask of the highest scores of each frame, shape (V, F, P), bool.

        Args:
            score: Score of each token, shape (V, F, P), float.
            counts: Number of tokens to keep in each frame, shape (V, F), int64.
        """
        keep = top_mask(score.flatten(0, 1), self.mask.flatten(0, 1), counts.flatten(), score.shape[2])
        return keep.view_as(self.mask)

    def mask_from_indices(self, indices: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """Return a mask that is True at the listed token indices of each frame of each video, shape (V, F, P)."""
        mask = torch.zeros(self.mask.shape, dtype=torch.bool, device="cpu")
        for video, indices_of_frames in enumerate(indices):
            for frame, indices_of_frame in enumerate(indices_of_frames):
                mask[video, frame, list(indices_of_frame)] = True
        return to_device(mask, self.mask.device)

    def to_token_mask(self, keep: Tensor) -> Tensor:
        """Return the mask of kept tokens of all segments, shape (S, N), bool.

        Args:
            keep: Mask of kept tokens of the videos, shape (V, F, P), bool.
        """
        frame, _ = self._frame_indices
        outside = self._select(self.tokens.mask) & (frame < 0)
        max_outside = to_device([self.tokens.keep[i] for i in self.segments], keep.device) - self.budget
        kept = self.ungroup(keep) | (outside & (outside.cumsum(1) <= max_outside[:, None]))
        if self._has_all_segments:
            return kept
        return self.tokens.mask.index_copy(0, to_device(self.segments, keep.device), kept)

    @cached_property
    def _frame_indices(self) -> tuple[Tensor, Tensor]:
        return self._select(self.tokens.frame), self._select(self.tokens.place)

    @property
    def _has_all_segments(self) -> bool:
        return len(self.segments) == len(self.tokens.counts)

    def _select(self, values: Tensor) -> Tensor:
        """Return the rows of `values` that belong to the videos."""
        return values if self._has_all_segments else values.index_select(0, to_device(self.segments, values.device))
