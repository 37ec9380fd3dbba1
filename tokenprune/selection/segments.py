# SPDX-License-Identifier: Apache-2.0
"""Plain data of a view: segments of visual tokens, patches, text, and what attention layers saw."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from tokenprune.budgets.video import Clip
from tokenprune.kernels.transfer import FIFOCache, to_device

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The visual tokens of a batch, grouped into the pieces that have a budget each (an image, a video, a tile).

    row:      list of int, the batch row of each of the S segments.
    ordinal:  list of int, index of this segment in its row.
    counts:   list of int, tokens in each segment; N is the largest.
    position: long `[S, N]`, position of each token in this call's sequence, ascending; padding repeats position 0.
    mask:     bool `[S, N]`, False for padding.
    grids:    list of (frames, height, width) in tokens, or None where a segment is no full grid or this is not known.
    modality: list of "image" or "video".
    frames:   list of how many tokens each frame has, in order; tokens after the last frame are in none. An image is
              one frame; None for a video of which this is not known, or of which tokens are gone. An empty list tells
              it of no segment.
    clips:    list of what budgets of videos go by, None for an image; empty where there is none to go by.
    """

    row: list[int]
    ordinal: list[int]
    counts: list[int]
    position: Tensor
    mask: Tensor
    grids: list[tuple[int, int, int] | None]
    modality: list[str]
    frames: list[list[int] | None] = field(default_factory=list)
    clips: list[Clip | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.counts)

    def to(self, device: torch.device) -> Segments:
        """Return the segments with their tensors on `device`."""
        if self.mask.device == device:
            return self
        return dataclasses.replace(self, position=self.position.to(device), mask=self.mask.to(device))

    @cached_property
    def cache(self) -> FIFOCache:
        """Values that follow from these segments and their key alone: prompts that share the segments share them."""
        return FIFOCache()

    @cached_property
    def has_padding(self) -> bool:
        """True if some segments are shorter than others."""
        return min(self.counts, default=0) < self.mask.shape[1]

    def flat_indices(self, width: int) -> Tensor:
        """Return long `[S, N]`, places of the tokens in rows of `width` tokens, laid end to end."""
        return self.cache.get(("places", width), lambda: self.position + self.row_starts(width))

    def row_starts(self, width: int) -> Tensor:
        """Return long `[S, 1]`, the place of the first token of each segment's row among such rows."""
        return self.cache.get(("starts", width), lambda: self.row_index * width)

    @cached_property
    def row_index(self) -> Tensor:
        """long `[S, 1]`: the batch row of each segment, ready for advanced indexing."""
        with torch.inference_mode(False):  # prompts share it, in training too
            return to_device(self.row, self.position.device)[:, None]


def square_grid(count: int) -> tuple[int, int, int] | None:
    """Return the grid of a square image of `count` tokens; None if `count` is no square."""
    side = math.isqrt(count)
    return (1, side, side) if side * side == count else None


@dataclass(frozen=True)
class Patches:
    """Places of visual tokens in the vision tower; all long `[S, N]`.

    tile:          number of the tile of an image, or of the frame of a video; -1 for what is no patch (newlines, a
                   class token) and for padding.
    row, column:   place on the tile's grid of tokens.
    height, width: size of that grid.
    size:          patches that a token is made of.
    tiles:         an int, no tile's number is as large.
    """

    tile: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor
    size: Tensor
    tiles: int

    @cached_property
    def cache(self) -> FIFOCache:
        """Values that follow from these places and their key alone: prompts that share the places share them."""
        return FIFOCache()


class TextView(Protocol):
    """The text tokens that follow each segment in its row, as observables read them (see `TextTokens`)."""

    @property
    def mask(self) -> Tensor:
        """bool `[S, M]`, False for padding."""

    @property
    def position(self) -> Tensor:
        """long `[S, M]`, in this call's sequence."""

    @property
    def segments(self) -> Segments:
        """The segments that the text follows."""

    @property
    def hidden(self) -> Tensor:
        """`[S, M, D]`, what arrives at the cut."""


class VisualView(Protocol):
    """The visual tokens at a cut, as their source reads them (see `VisualTokens`)."""

    @property
    def segments(self) -> Segments:
        """The segments that the tokens belong to."""

    @property
    def hidden(self) -> Tensor:
        """`[S, N, D]`, what arrives at the cut."""

    @property
    def text(self) -> TextView:
        """The text that follows each segment."""


@dataclass(frozen=True)
class LayerInput:
    """The input of a decoder layer. hidden: `[B, W, D]`. rotation: (cos, sin), `[B, W, R]` each, or None."""

    hidden: Tensor
    rotation: tuple[Tensor, Tensor] | None = None


class ObservedAttention(Protocol):
    """Queries and keys of one attention call, after rotary embedding: `[B, H, Q, Dh]` and `[B, Hkv, K, Dh]`, of which
    the last Q keys belong to the queries; and values, `[B, Hkv, K, Dv]`, if they were read.

    starts: where packed sequences begin and end, if several share one axis. scaling: factor before the softmax.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    starts: Tensor | None
    scaling: float

    def query_heads(self, queries: int) -> Tensor:
        """Return `[B, queries, H, Dh]`, the last `queries` queries, head by head."""

    def keys(self, queries: int) -> Tensor:
        """Return `[B, queries, Hkv * Dh]`, keys of the last `queries` tokens, heads flattened."""

    def values(self, queries: int) -> Tensor:
        """Return `[B, queries, Hkv * Dv]`, their values."""

    def value_heads(self, queries: int) -> Tensor:
        """Return `[B, queries, Hkv, Dv]`, their values, head by head."""

    def rows(self, index: Tensor) -> Tensor:
        """Return float32 `[B, H, R, K]`, softmax attention of the queries at `index`, long `[B, R]`."""

    def visible_keys(self, index: Tensor) -> Tensor:
        """Return bool `[B, 1 or H, R, K]`, which keys these queries may attend to."""

    def column_means(self, valid: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Return float32 `[B, H, Q]`, the mean attention that each token receives from the queries that are `valid`,
        bool `[B, Q]`, and see it."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of made-up tokens. counts: tokens of each of S segments, of which the longest has N. text: M text tokens
    after each. width: D. heads: H."""

    counts: tuple[int, ...]
    text: int = 0
    width: int = 16
    heads: int = 2

    @property
    def segments(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> int:
        return max(self.counts)
