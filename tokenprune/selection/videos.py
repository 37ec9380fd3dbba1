# SPDX-License-Identifier: Apache-2.0
"""Tokens of videos laid out by frame, as methods that compare frames see them."""

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
    """The tokens of videos, laid out by frame: V videos, F frames of the longest, P tokens of the largest frame.

    tokens:   what the method was given.
    segments: list of int, which segments of these are the videos, V of them.
    frames:   of each video, a list of how many tokens each frame has.
    keep:     list of int, how many tokens of its frames each video keeps, at least one; tokens that are in no frame
              count, and stay as far as they leave room for that.
    """

    tokens: VisualTokens
    segments: list[int]
    frames: list[list[int]]
    keep: list[int]

    @staticmethod
    def from_tokens(tokens: VisualTokens, several_frames: bool = False) -> Videos | None:
        """Return those of the segments of which something has to go, as videos; None if there is none such.
        several_frames: and those of more than one frame, of which all may stay.

        An image beside a video is left out so: it would be one frame of many tokens, which all frames are padded to.
        """
        each = zip(tokens.counts, tokens.keep, tokens.frames, strict=True)
        cut = [i for i, one in enumerate(each) if one[1] < one[0] or (several_frames and len(one[2]) > 1)]
        if not cut:
            return None
        frames = [tokens.frames[i] for i in cut]
        in_none = [tokens.counts[i] - sum(sizes) for i, sizes in zip(cut, frames, strict=True)]
        return Videos(tokens, cut, frames, [max(1, tokens.keep[i] - n) for i, n in zip(cut, in_none, strict=True)])

    @property
    def grids(self) -> list[tuple[int, int, int] | None]:
        """(1, height, width) of a frame of each video, None where that is not known."""
        return [None if (grid := self.tokens.grids[i]) is None else (1, *grid[1:]) for i in self.segments]

    @cached_property
    def budget(self) -> Tensor:
        """long `[V]`: `keep`, on the device."""
        return to_device(self.keep, self.mask.device)

    @cached_property
    def sizes(self) -> Tensor:
        """long `[V, F]`: how many tokens each frame has, 0 for padding."""
        longest = max(map(len, self.frames))
        return to_device([[*sizes, *[0] * (longest - len(sizes))] for sizes in self.frames], self.mask.device)

    @cached_property
    def num_frames(self) -> Tensor:
        """long `[V]`: how many frames each video has."""
        return to_device([len(sizes) for sizes in self.frames], self.mask.device)

    @property
    def hidden(self) -> Tensor:
        """float32 `[V, F, P, D]`: the tokens as they arrive at the cut; zeros for padding, and for a token with NaN."""
        return self._laid_out[0]

    @property
    def mask(self) -> Tensor:
        """bool `[V, F, P]`, False for padding."""
        return self._laid_out[1]

    @cached_property
    def _laid_out(self) -> tuple[Tensor, Tensor]:
        hidden, mask = self.group_by_frame(self.tokens.hidden)
        hidden = hidden.float()
        return hidden.masked_fill(~hidden.isfinite().all(-1, keepdim=True), 0), mask

    def group_by_frame(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[V, F, P, ...]`, the values `[S, N, ...]` of the videos' tokens, zeros for padding, and `mask`."""
        most = max(map(max, self.frames))
        return group_by_frame(self._rows(values), *self._frame_and_place, max(map(len, self.frames)), most)

    def ungroup(self, values: Tensor) -> Tensor:
        """Return `[V, N]`, the values `[V, F, P]` in the order of the tokens; 0 for what is in no frame."""
        frame, place = self._frame_and_place
        spot = frame.clamp(min=0) * values.shape[2] + place.clamp(min=0)
        return values.flatten(1).gather(1, spot).masked_fill(frame < 0, 0)

    def top(self, score: Tensor) -> Tensor:
        """bool `[V, F, P]`: the highest scores (float `[V, F, P]`) of each video, as many as it keeps; of equal ones
        the earlier. NaN counts as lowest."""
        keep = top_mask(score.flatten(1), self.mask.flatten(1), self.budget, max(self.keep))
        return keep.view_as(self.mask)

    def top_per_frame(self, score: Tensor, counts: Tensor) -> Tensor:
        """bool `[V, F, P]`: the highest scores of each frame, as many as `counts` (long `[V, F]`) says."""
        keep = top_mask(score.flatten(0, 1), self.mask.flatten(0, 1), counts.flatten(), score.shape[2])
        return keep.view_as(self.mask)

    def mask_from_indices(self, places: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """bool `[V, F, P]`: the places that are listed for each frame of each video."""
        made = torch.zeros(self.mask.shape, dtype=torch.bool, device="cpu")
        for video, of_video in enumerate(places):
            for frame, of_frame in enumerate(of_video):
                made[video, frame, list(of_frame)] = True
        return to_device(made, self.mask.device)

    def to_token_mask(self, keep: Tensor) -> Tensor:
        """Return bool `[S, N]`, what stays of all segments, where `keep`, bool `[V, F, P]`, stays of the videos."""
        frame, _ = self._frame_and_place
        outside = self._rows(self.tokens.mask) & (frame < 0)
        room = to_device([self.tokens.keep[i] for i in self.segments], keep.device) - self.budget
        stays = self.ungroup(keep) | (outside & (outside.cumsum(1) <= room[:, None]))
        if self._whole:
            return stays
        return self.tokens.mask.index_copy(0, to_device(self.segments, keep.device), stays)

    @cached_property
    def _frame_and_place(self) -> tuple[Tensor, Tensor]:
        return self._rows(self.tokens.frame), self._rows(self.tokens.place)

    @property
    def _whole(self) -> bool:
        return len(self.segments) == len(self.tokens.counts)

    def _rows(self, values: Tensor) -> Tensor:
        return values if self._whole else values.index_select(0, to_device(self.segments, values.device))
