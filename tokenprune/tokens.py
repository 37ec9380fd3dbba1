# SPDX-License-Identifier: Apache-2.0
"""The read-only view of the visual tokens that a method gets; everything costly in it is computed on first use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.transfer import sent


@dataclass(frozen=True)
class Segments:
    """The visual tokens of a batch, grouped into the pieces that have a budget each (an image, a video, a tile).

    row:      list of int, the batch row of each of the S segments.
    ordinal:  list of int, the how-manieth segment of its row it is.
    counts:   list of int, tokens in each segment; N is the largest.
    position: long `[S, N]`, position of each token in this call's sequence, ascending; padding repeats position 0.
    mask:     bool `[S, N]`, False for padding.
    grids:    list of (frames, height, width) in tokens, or None where a segment is no full grid or this is not known.
    modality: list of "image" or "video".
    frames:   list of how many tokens each frame has, in order; tokens behind the last frame are in none. An image is
              one frame; None for a video of which this is not known, or of which tokens are gone. An empty list tells
              it of no segment.
    """

    row: list[int]
    ordinal: list[int]
    counts: list[int]
    position: Tensor
    mask: Tensor
    grids: list[tuple[int, int, int] | None]
    modality: list[str]
    frames: list[list[int] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.counts)

    def to(self, device: torch.device) -> Segments:
        """Return the segments with their tensors on `device`."""
        if self.mask.device == device:
            return self
        return dataclasses.replace(self, position=self.position.to(device), mask=self.mask.to(device))

    @cached_property
    def row_index(self) -> Tensor:
        """long `[S, 1]`: the batch row of each segment, ready for advanced indexing."""
        return sent(self.row, self.position.device)[:, None]


def square_grid(count: int) -> tuple[int, int, int] | None:
    """Return the grid of a square image of `count` tokens; None if `count` is no square."""
    side = math.isqrt(count)
    return (1, side, side) if side * side == count else None


@dataclass(frozen=True)
class TextTokens:
    """The text tokens that follow each segment in its row.

    mask: bool `[S, M]`; hidden: `[S, M, D]`; keys: `[S, M, F]` (needs "keys").
    """

    mask: Tensor
    _position: Tensor
    _gather: Callable[[str, Tensor], Tensor]

    @cached_property
    def hidden(self) -> Tensor:
        return self._gather("hidden", self._position)

    @cached_property
    def keys(self) -> Tensor:
        return self._gather("keys", self._position)


@dataclass(frozen=True)
class Patches:
    """Where in the vision tower visual tokens come from; all long `[S, N]`.

    tile:          number of the tile of a picture, or of the frame of a video; -1 for what is no patch (newlines, a
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


@dataclass(frozen=True, eq=False)
class VisualTokens:
    """Visual tokens at the place where a method acts. S segments (images), N tokens in the longest, D model width.

    mask:     bool `[S, N]`; False marks the padding of short segments: never keep it, never let it influence a score.
    budget:   long `[S]`, how many tokens each segment has to keep; `keep` is the same as a list of int.
    segments: the `Segments` (rows, grids, positions, modality).
    """

    segments: Segments
    keep: list[int]
    _sources: Any = field(repr=False)

    @property
    def mask(self) -> Tensor:
        return self.segments.mask

    @property
    def counts(self) -> list[int]:
        return self.segments.counts

    @property
    def grids(self) -> list[tuple[int, int, int] | None]:
        return self.segments.grids

    @property
    def frames(self) -> list[list[int]]:
        """How many tokens each frame of each segment has, on the host; an image is one frame. Raises TokenPruneError
        where the frames of a video are not known."""
        frames = self.segments.frames or [None] * len(self.segments)
        if None in frames:
            raise TokenPruneError(
                'the frames of a video are not known here: a method that reads them says "frames" in its needs, and '
                "acts before tokens are removed"
            )
        return frames

    @cached_property
    def frame(self) -> Tensor:
        """long `[S, N]`: index of each token's frame in its segment; -1 for what is in no frame (a newline behind a
        video, padding)."""
        return self._frame_and_place[0]

    @cached_property
    def place(self) -> Tensor:
        """long `[S, N]`: index of each token in its frame; -1 for what is in no frame."""
        return self._frame_and_place[1]

    @cached_property
    def _frame_and_place(self) -> Tensor:
        """long `[2, S, N]`; made on the host, so that the device is not asked."""
        made = torch.full((2, *self.mask.shape), -1)
        for segment, counts in enumerate(self.frames):
            length = torch.tensor(counts)
            frame = torch.arange(len(counts)).repeat_interleave(length)
            start = (length.cumsum(0) - length).repeat_interleave(length)
            made[0, segment, : len(frame)] = frame
            made[1, segment, : len(frame)] = torch.arange(len(frame)) - start
        return sent(made, self.mask.device)

    @cached_property
    def budget(self) -> Tensor:
        return sent(self.keep, self.mask.device)

    @cached_property
    def hidden(self) -> Tensor:
        """`[S, N, D]`, model dtype: the tokens as they arrive at the cut (PRE_LLM: the projected embeddings)."""
        return self._sources.gather("hidden", self.segments.position, self.segments)

    @cached_property
    def normed(self) -> Tensor:
        """`[S, N, D]`: `hidden` after the decoder's final norm."""
        return self._sources.final_norm(self.hidden)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the decoder's final norm to `hidden` `[..., D]`."""
        return self._sources.final_norm(hidden)

    @cached_property
    def keys(self) -> Tensor:
        """`[S, N, Hkv * Dh]`: keys of the layer before the cut, after rotary embedding, heads flattened (needs
        "keys")."""
        return self._sources.gather("keys", self.segments.position, self.segments)

    @cached_property
    def last_row_attention(self) -> Tensor:
        """float32 `[S, H, N]`: softmax attention of the last prompt token over each visual token, in the layer before
        the cut (needs "last_row_attention")."""
        return self._attention("last_row")

    @cached_property
    def received_attention(self) -> Tensor:
        """float32 `[S, H, N]`: mean attention that each visual token receives from all tokens that may see it, in the
        layer before the cut (needs "received_attention")."""
        return self._attention("received")

    @cached_property
    def next_row_attention(self) -> Tensor:
        """float32 `[S, H, N]`: softmax attention that the last prompt token would pay to each visual token in the layer
        behind the cut, by that layer's own projections, if nothing was cut (needs "next_row_attention")."""
        return self._attention("next_row")

    def encoder_attention(self, layer: int | float) -> Tensor:
        """float32 `[S, H, N]`: attention that visual tokens get in a block of the vision tower (needs
        "encoder_attention"), 0 for tokens that are no patch.

        The class token's attention to each patch where the tower has one, else the mean over all patches of the tile or
        frame. A token made of several patches gets their mean. layer: one of the method's `encoder_layers`.
        """
        return self._sources.encoder_attention(layer, self.segments)

    @cached_property
    def patches(self) -> Patches:
        """Where in the vision tower the tokens come from (needs "encoder_attention")."""
        return self._sources.patches(self.segments)

    def _attention(self, kind: str) -> Tensor:
        columns = self._sources.attention(kind)  # [B, H, W] over the slots of the sequence
        slots = self._sources.slots(self.segments.position, self.segments)
        columns = columns[self.segments.row_index.squeeze(1)]
        return columns.gather(2, slots[:, None, :].expand(-1, columns.shape[1], -1))

    @cached_property
    def text(self) -> TextTokens:
        """The text tokens after each segment, later pictures and padding left out."""
        position, mask = self._sources.text_after(self.segments)
        return TextTokens(mask, position, lambda what, where: self._sources.gather(what, where, self.segments))

    @property
    def carry(self) -> Mapping[str, Any]:
        """What earlier stages of the method remember, by name; to be read only (see `remember`)."""
        return self._sources.carry

    def remember(self, name: str, value: Any, per_token: bool | None = None) -> None:
        """Keep `value` for later stages of the method, which find it in `carry`.

        A tensor `[S, N, ...]` follows the visual tokens: later stages find the entries of those that reach them, in
        their order, and 0 at padding. Tensors and lists of S entries lose those of images that are withdrawn. All else
        is kept as it is. per_token: False for a tensor that has S and N for its first two sizes by chance alone.
        """
        self._sources.carry.remember(name, value, per_token)

    def generator(self, segment: int, seed: int) -> torch.Generator:
        """A CPU generator that depends on `seed` and the segment's place in its row only: a batch equals its single
        rows."""
        return torch.Generator().manual_seed((seed * 1_000_003 + self.segments.ordinal[segment]) % 2**63)


def require(value: Tensor | None, what: str) -> Tensor:
    """Return `value`, or raise: the method reads something that it did not declare in `needs`."""
    if value is None:
        raise TokenPruneError(f"{what!r} was read but not declared: add it to the method's needs in @register(...)")
    return value
