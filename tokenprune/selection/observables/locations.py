# SPDX-License-Identifier: Apache-2.0
"""Observables of the places of tokens: frames of a video, and patches of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.errors import TokenPruneError
from tokenprune.selection.frames import compute_frame_indices
from tokenprune.selection.observable import Backend, Observable, ObservedAt
from tokenprune.selection.observable_registry import register_observable, select_observables
from tokenprune.selection.segments import ObservedAttention, Patches, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FrameObservable(Observable):
    """Base of what is known of the frames of videos; whoever declares one may read all."""

    where = ObservedAt.FRAMES
    backends = frozenset({Backend.HF, Backend.VLLM})

    def is_declared(self, needs: frozenset[str]) -> bool:
        return bool(select_observables(needs, ObservedAt.FRAMES))


@register_observable("frames")
class FrameSizes(FrameObservable):
    """S lists of ints, on the host: how many tokens each frame of each segment has. An image is one frame; tokens
    after the last frame of a video (a newline) are in none."""

    axes = ""

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> list[list[int]]:
        frames = [one for one in segments.frames if one is not None]
        if len(frames) != len(segments):
            raise TokenPruneError("the frames of a video are not known here, or tokens of it are gone already")
        return frames

    def example(self, sizes: Sizes, generator: torch.Generator) -> list[list[int]]:
        """Two frames each, as far as the tokens are even."""
        return [[count // 2] * 2 if count > 1 else [count] for count in sizes.counts]


@register_observable("frame")
class Frame(FrameObservable):
    """long `[S, N]`: index of each token's frame in its segment; -1 for what is in no frame (a newline after a video,
    padding)."""

    axes = "SN"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        frames = FrameSizes().compute_visual(source, segments)
        return compute_frame_indices(frames, segments.mask.shape[1], segments.mask.device)[0]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return compute_frame_indices(FrameSizes().example(sizes, generator), sizes.tokens, torch.device("cpu"))[0]


@register_observable("place")
class IndexInFrame(FrameObservable):
    """long `[S, N]`: index of each token in its frame; -1 for what is in no frame."""

    axes = "SN"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        frames = FrameSizes().compute_visual(source, segments)
        return compute_frame_indices(frames, segments.mask.shape[1], segments.mask.device)[1]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return compute_frame_indices(FrameSizes().example(sizes, generator), sizes.tokens, torch.device("cpu"))[1]


@register_observable("patches")
class PatchLocations(Observable):
    """`Patches`, long `[S, N]` each: where in the vision tower the tokens come from. Whoever reads anything else of the
    tower may read it too."""

    where = ObservedAt.TOWER
    axes = ""
    backends = frozenset({Backend.HF, Backend.VLLM})

    def is_declared(self, needs: frozenset[str]) -> bool:
        return bool(select_observables(needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK))

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        """Return `[rows, H, patches]`, of any value: how many patches there are is all that is asked."""
        return seen.key[:, :, protected:, 0]

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Patches:
        return source.patches(segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Patches:
        counts = torch.tensor(sizes.counts, device="cpu")[:, None]
        column = torch.arange(sizes.tokens, device="cpu").expand(sizes.segments, -1)
        row, one = torch.zeros_like(column), torch.ones_like(column)
        return Patches(torch.where(column < counts, 0, -1), row, column, one, counts * one, one, tiles=1)
