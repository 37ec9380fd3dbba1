# SPDX-License-Identifier: Apache-2.0
"""Observables of token locations: frames of a video, and patches of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.errors import TokenPruneError
from tokenprune.selection.frames import compute_frame_indices
from tokenprune.selection.observable import Backend, Input, Observable, ObservedAt
from tokenprune.selection.observable_registry import register_observable, select_observables
from tokenprune.selection.segments import ObservedAttention, Patches, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FrameObservable(Observable):
    """Base class of observables of video frames. A method that declares one of them may read all of them."""

    where = ObservedAt.FRAMES
    backends = frozenset({Backend.HF, Backend.VLLM})

    def is_declared(self, needs: frozenset[str]) -> bool:
        return bool(select_observables(needs, ObservedAt.FRAMES))


@register_observable("frames")
class FrameSizes(FrameObservable):
    """Number of tokens in each frame, as a list of ints per segment, on the host.

    An image has one frame. Tokens after the last frame of a video (a newline) belong to no frame.
    """

    axes = ""

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> list[list[int]]:
        frames = [counts for counts in segments.frames if counts is not None]
        if len(frames) != len(segments):
            raise TokenPruneError("The frames of a video are unknown, or some of its tokens were already dropped.")
        return frames

    def example(self, sizes: Sizes, generator: torch.Generator) -> list[list[int]]:
        """Return two frames per segment, without an odd last token."""
        return [[count // 2] * 2 if count > 1 else [count] for count in sizes.counts]


@register_observable("frame")
class Frame(FrameObservable):
    """Index of the frame of each token in its segment, shape (S, N), int64.

    -1 for tokens outside of frames (a newline, padding).
    """

    axes = "SN"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        frames = FrameSizes().compute_visual(source, segments)
        return compute_frame_indices(frames, segments.mask.shape[1], segments.mask.device)[0]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return compute_frame_indices(FrameSizes().example(sizes, generator), sizes.tokens, torch.device("cpu"))[0]


@register_observable("place")
class IndexInFrame(FrameObservable):
    """Index of each token in its frame, shape (S, N), int64. -1 outside of frames."""

    axes = "SN"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        frames = FrameSizes().compute_visual(source, segments)
        return compute_frame_indices(frames, segments.mask.shape[1], segments.mask.device)[1]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return compute_frame_indices(FrameSizes().example(sizes, generator), sizes.tokens, torch.device("cpu"))[1]


@register_observable("patches")
class PatchLocations(Observable):
    """Location of each token in the vision tower, as `Patches`. Available to methods that read the tower."""

    where = ObservedAt.TOWER
    axes = ""
    backends = frozenset({Backend.HF, Backend.VLLM})

    def is_declared(self, needs: frozenset[str]) -> bool:
        return bool(select_observables(needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK))

    from_input = Input.FEATURES

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        """Return a placeholder with the shape of values per patch, (rows, H, patches). Its values are not used."""
        return attention.key[:, :, protected:, 0]

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Patches:
        return source.patches(segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Patches:
        counts = torch.tensor(sizes.counts, device="cpu")[:, None]
        column = torch.arange(sizes.tokens, device="cpu").expand(sizes.segments, -1)
        row, ones = torch.zeros_like(column), torch.ones_like(column)
        return Patches(torch.where(column < counts, 0, -1), row, column, ones, counts * ones, ones, tiles=1)
