# SPDX-License-Identifier: Apache-2.0
"""Data classes that describe visual tokens: segments, patches, text, layer inputs and observed attention."""

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
    """Visual tokens of a batch, grouped into segments (an image, a video or a tile) that each have a budget.

    Shapes use S segments and N tokens in the longest segment.

    Args:
        row: Batch row of each segment.
        ordinal: Index of each segment in its row.
        counts: Number of tokens in each segment.
        position: Position of each token in the sequence of this call, shape (S, N), int64, ascending. Padding repeats
            the first position.
        mask: Mask of tokens, shape (S, N), bool. Padding is False.
        grids: Grid of each segment as (frames, height, width) in tokens. None if it is incomplete or unknown.
        modality: "image" or "video" for each segment.
        frames: Number of tokens in each frame, for each segment. An image has one frame. Tokens after the last frame
            belong to no frame. None for a video whose frames are unknown or already pruned. Empty if no segment has
            this information.
        clips: Facts about videos that budgets read. None for an image. Empty if there are none.

    Examples:
        >>> from tokenprune.testing import visual_tokens
        >>> visual_tokens(torch.zeros(2, 4, 8), counts=[4, 3]).segments.row_index
        tensor([[0],
                [1]])
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
        """Cache of tensors derived from these segments. Prompts that share the segments share the cache."""
        return FIFOCache()

    @cached_property
    def has_padding(self) -> bool:
        """True if the segments have different numbers of tokens."""
        return min(self.counts, default=0) < self.mask.shape[1]

    def flat_indices(self, width: int) -> Tensor:
        """Return the index of each token in a flattened batch of rows of `width` slots, shape (S, N), int64."""
        return self.cache.get(("flat_indices", width), lambda: self.position + self.row_starts(width))

    def row_starts(self, width: int) -> Tensor:
        """Return the index of the first slot of each segment's row in a flattened batch, shape (S, 1), int64."""
        return self.cache.get(("starts", width), lambda: self.row_index * width)

    @cached_property
    def row_index(self) -> Tensor:
        """Batch row of each segment as a tensor, shape (S, 1), int64."""
        # Training and inference share the tensor, so it is not created in inference mode.
        with torch.inference_mode(False):
            return to_device(self.row, self.position.device)[:, None]


def square_grid(count: int) -> tuple[int, int, int] | None:
    """Return the grid of a square image with `count` tokens, or None if `count` is not a square number."""
    side = math.isqrt(count)
    return (1, side, side) if side * side == count else None


@dataclass(frozen=True)
class Patches:
    """Location of each visual token in the vision tower. All tensors have shape (S, N) and dtype int64.

    Args:
        tile: Index of the tile of an image, or of the frame of a video. -1 for padding and for tokens without a patch
            (newlines, a class token).
        row: Row in the token grid of the tile.
        column: Column in the token grid of the tile.
        height: Height of the token grid of the tile.
        width: Width of the token grid of the tile.
        size: Number of patches per token.
        tiles: Exclusive upper bound of the tile indices.

    Examples:
        >>> Patches(*torch.zeros(6, 1, 4, dtype=torch.long), tiles=1).tile.shape
        torch.Size([1, 4])
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
        """Cache of tensors derived from these patches. Prompts that share the patches share the cache."""
        return FIFOCache()


class TextView(Protocol):
    """Text tokens after each segment, as observables read them. See `TextTokens`."""

    @property
    def mask(self) -> Tensor: ...

    @property
    def position(self) -> Tensor: ...

    @property
    def segments(self) -> Segments: ...

    @property
    def hidden(self) -> Tensor: ...


class VisualView(Protocol):
    """Visual tokens at a cut, as a source reads them. See `VisualTokens`."""

    @property
    def segments(self) -> Segments: ...

    @property
    def hidden(self) -> Tensor: ...

    @property
    def text(self) -> TextView: ...


@dataclass(frozen=True)
class LayerInput:
    """Input of a decoder layer.

    Args:
        hidden: Hidden states, shape (B, W, D).
        rotation: Cosines and sines of the rotary embedding, shape (B, W, R) each. None if the decoder has none.
    """

    hidden: Tensor
    rotation: tuple[Tensor, Tensor] | None = None


class ObservedAttention(Protocol):
    """Queries and keys of one attention call, after rotary embedding. The last Q of the K keys belong to the queries.

    Attributes:
        query: Queries, shape (B, H, Q, Dh).
        key: Keys, shape (B, Hkv, K, Dh).
        value: Values, shape (B, Hkv, K, Dv). None if they were not read.
        starts: Boundaries of packed sequences that share the sequence axis. None if there is one sequence per row.
        scaling: Factor of the logits before the softmax.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    starts: Tensor | None
    scaling: float

    def query_heads(self, queries: int) -> Tensor:
        """Return the last `queries` queries, shape (B, queries, H, Dh)."""

    def keys(self, queries: int) -> Tensor:
        """Return the keys of the last `queries` tokens, shape (B, queries, Hkv * Dh)."""

    def values(self, queries: int) -> Tensor:
        """Return the values of the last `queries` tokens, shape (B, queries, Hkv * Dv)."""

    def value_heads(self, queries: int) -> Tensor:
        """Return the values of the last `queries` tokens, shape (B, queries, Hkv, Dv)."""

    def rows(self, index: Tensor) -> Tensor:
        """Return the softmax attention of the queries at `index`, shape (B, H, R, K), float32.

        Args:
            index: Indices of the queries, shape (B, R), int64.
        """

    def visible_keys(self, index: Tensor) -> Tensor:
        """Return the mask of the keys that the queries at `index` may attend to, shape (B, 1 or H, R, K), bool."""

    def column_means(self, valid: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Return the mean attention that each token receives, shape (B, H, Q), float32.

        Args:
            valid: Mask of the queries to average over, shape (B, Q), bool. Only queries that see a token count for it.
            starts: Boundaries of packed sequences.
        """


@dataclass(frozen=True)
class Sizes:
    """Sizes of synthetic tokens for tests of methods.

    Args:
        counts: Number of tokens in each segment.
        text: Number of text tokens after each segment.
        width: Number of features (D).
        heads: Number of attention heads (H).
    """

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
