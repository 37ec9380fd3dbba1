# SPDX-License-Identifier: Apache-2.0
"""State of a call's tokens at the current decoder layer, and their layout in the compacted batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.sequence.segments import KeptTokens, drop_tokens
from tokenprune.kernels import compact
from tokenprune.kernels.transfer import FIFOCache, to_device
from tokenprune.selection.segments import Segments

# (extras, slots, layout after the cut) -> extras after the cut. See `Adapter.cut_extras`.
CutExtras = Callable[[Any, Tensor, "Layout"], Any]

TEXT, VISUAL, PADDING = 0, 1, 2

_RIGHT_ENDS = FIFOCache()


@dataclass(frozen=True)
class Layout:
    """Slots of a compacted batch. Each row holds the kept tokens at its right end, in their order.

    Attributes:
        index: Index of each slot's token in the full sequence of the call, shape (batch, width), int64. Shorter rows
            are filled on the left with distinct dropped tokens.
        valid: False for these filler slots, shape (batch, width), bool. None if there are none.
        length: Length of the full sequence, including padding.
        tokens_per_row: Number of kept tokens of each row, without padding, on the host. The first cut drops padding.
        width: Number of slots of a row.
        is_uncut: Whether no token was dropped.
    """

    index: Tensor
    valid: Tensor | None
    length: int
    tokens_per_row: list[int]
    width: int = field(init=False)
    is_uncut: bool = field(init=False)

    def __post_init__(self) -> None:
        known, width = self.__dict__, self.index.shape[1]  # attributes, because every layer reads them
        known["width"], known["is_uncut"] = width, width == self.length and self.valid is None

    @staticmethod
    def build_uncut(batch: int, length: int, device: torch.device, counts: list[int] | None = None) -> Layout:
        """Build the layout of a call before any cut. counts: Tokens of each row without padding, or None for all."""
        index = torch.arange(length, device=device).expand(batch, length)
        return Layout(index, None, length, [length] * batch if counts is None else counts)

    def to(self, device: torch.device) -> Layout:
        if self.index.device == device:
            return self
        valid = None if self.valid is None else self.valid.to(device)
        return Layout(self.index.to(device), valid, self.length, self.tokens_per_row)

    @cached_property
    def slot_index(self) -> Tensor:
        """Slot of each token of the full sequence, fillers included, shape (batch, length), int64, -1 if dropped."""
        if self.is_uncut:
            return self.index
        slots = torch.arange(self.width, device=self.index.device).expand_as(self.index)
        return torch.full((self.index.shape[0], self.length), -1, device=self.index.device).scatter_(
            1, self.index, slots
        )

    @cached_property
    def inverse(self) -> Tensor:
        """Slot of each token of the full sequence without fillers, shape (batch, length), int64, -1 if dropped."""
        if self.valid is None:
            return self.slot_index
        slots = self.slot_index
        return slots.masked_fill((slots >= 0) & ~self.valid.gather(1, slots.clamp(min=0)), -1)

    @cached_property
    def empty(self) -> Tensor:
        """True for filler slots, shape (batch, width), bool."""
        return self.index < 0 if self.valid is None else ~self.valid

    def cut(self, dropped: Tensor, kept_per_row: list[int]) -> tuple[Layout, Tensor]:
        """Drop slots.

        Args:
            dropped: Mask of dropped slots, shape (batch, width), bool.
            kept_per_row: Number of kept slots of each row, on the host.

        Returns:
            The layout after the cut, and its slots in this layout, shape (batch, new width), int64.
        """
        width = max(1, *kept_per_row)  # at least one slot, because layers do not support empty sequences
        # A stable sort of (kept, position) puts the kept tokens at the right end in their old order.
        slots = compact.partition(dropped)[:, -width:]
        valid = None
        if min(kept_per_row) < width:  # fillers are on the left
            device = dropped.device
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            valid = _RIGHT_ENDS.get((device, stream, *kept_per_row), lambda: _build_right_mask(kept_per_row, device))
        return Layout(slots if self.is_uncut else self.index.gather(1, slots), valid, self.length, kept_per_row), slots

    def scatter_back(self, x: Tensor) -> Tensor:
        """Scatter values to the full sequence, shape (batch, length, channels). Dropped tokens are zero."""
        if self.valid is not None:
            x = x.masked_fill(self.empty.unsqueeze(-1), 0)
        return x.new_zeros(x.shape[0], self.length, x.shape[2]).scatter(1, self.index.unsqueeze(-1).expand_as(x), x)

    def positions(self) -> Tensor:
        """Return `index` with -1 for filler slots."""
        return self.index if self.valid is None else self.index.masked_fill(self.empty, -1)


class StageMemory(dict[str, Any]):
    """Values that the stages of one method pass to its later stages, by name. See `VisualTokens.remember`.

    Attributes:
        uncut: Names of values that do not follow cuts, regardless of their shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uncut: set[str] = set()

    def remember(self, name: str, value: Any, per_token: bool | None) -> None:
        """Store `value`. See `VisualTokens.remember`."""
        self[name] = value
        self.uncut.discard(name)
        if per_token is False:
            self.uncut.add(name)

    def drop(self, kept: KeptTokens) -> None:
        """Drop the values of dropped tokens and of segments without kept tokens.

        Values in `uncut` lose only these segments.
        """
        for name, value in self.items():
            if name not in self.uncut and isinstance(value, Tensor) and value.shape[:2] == kept.keep.shape:
                self[name] = kept.gather(value)
            elif kept.drops_segments and isinstance(value, (Tensor, list)) and len(value) == len(kept.counts):
                self[name] = kept.select_segments(value)


@dataclass(frozen=True)
class TokenState:
    """Tokens of a batch at the current decoder layer. Immutable: each cut returns a new state.

    Attributes:
        before_cut: Visual tokens before the most recent cut.
        layout: Position of every token (text, visual, padding) in the compacted batch.
        extras: Additional per-token inputs of the model family, cut together with the tokens.
        memories: Memory of each method between its stages, keyed by `Step.owner`.
        kept: Result of the most recent cut, or None before the first cut.
    """

    before_cut: Segments
    layout: Layout
    extras: Any = None
    memories: dict[int, StageMemory] = field(default_factory=dict)
    kept: KeptTokens | None = None

    def __post_init__(self) -> None:
        if self.kept is None:
            self.__dict__["segments"] = self.before_cut  # saves the call of `segments`

    @cached_property
    def segments(self) -> Segments:
        """Visual tokens after the most recent cut. Computed on first access: the last cut does not need them."""
        return self.before_cut if self.kept is None else drop_tokens(self.before_cut, self.kept)

    def to(self, device: torch.device) -> TokenState:
        """Return the state on `device`. Layers of one model may be on different devices."""
        if self.layout.index.device == device:
            return self
        return TokenState(self.segments.to(device), self.layout.to(device), self.extras, self.memories)

    @cached_property
    def visual_slots(self) -> Tensor:
        """Slot of each visual token, shape (segments, tokens), int64."""
        segments, layout = self.segments, self.layout
        if layout.is_uncut:
            return segments.position
        return layout.inverse[segments.row_index, segments.position].clamp(min=0)

    def flat_indices(self) -> Tensor:
        """Return the index of each visual token in the flattened batch, shape (segments, tokens), int64."""
        segments, layout = self.segments, self.layout
        if layout.is_uncut:
            return segments.flat_indices(layout.width)
        return self.visual_slots + segments.row_starts(layout.width)

    def cut(
        self, keep: Tensor, num_kept: list[int], flat_indices: Tensor, padding: Tensor | None, cut_extras: CutExtras
    ) -> tuple[TokenState, Tensor]:
        """Drop visual tokens, and padding with the first cut.

        Args:
            keep: Visual tokens to keep, shape (segments, tokens), bool. False for padding.
            num_kept: Number of kept tokens per segment, as Python ints (avoids a device sync).
            flat_indices: Result of `flat_indices()`.
            padding: Padding mask, shape (batch, length), bool, on the host, or None without padding.
            cut_extras: Function of the adapter that cuts `extras`.

        Returns:
            The new state, and the slots of the current layout that it was gathered from, shape (batch, width).
        """
        segments, layout = self.segments, self.layout
        if layout.is_uncut:
            shape = layout.index.shape
            token_index, kind = segments.cache.get(
                ("slots", shape), lambda: _classify_slots(segments, flat_indices, shape, padding)
            )
            # PADDING > True, VISUAL > False, and TEXT is never greater: one comparison drops both kinds.
            dropped = kind > keep.take(token_index)
        else:
            dropped = _scatter(segments, flat_indices, layout.index.shape, segments.mask ^ keep)
            if layout.valid is not None:
                dropped |= ~layout.valid

        tokens_per_row = list(layout.tokens_per_row)
        for row, before, after in zip(segments.row, segments.counts, num_kept, strict=True):
            tokens_per_row[row] -= before - after
        new_layout, slots = layout.cut(dropped, tokens_per_row)

        extras, kept = cut_extras(self.extras, slots, new_layout), KeptTokens(keep, num_kept)
        for memory in self.memories.values():
            memory.drop(kept)
        return TokenState(segments, new_layout, extras, self.memories, kept), slots


def _classify_slots(
    segments: Segments, flat_indices: Tensor, shape: torch.Size, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the visual token index and the kind (TEXT, VISUAL or PADDING) of each slot, both (batch, width)."""
    indices = torch.arange(flat_indices.numel(), device=flat_indices.device)
    token_index = _scatter(segments, flat_indices, shape, indices)
    kind = _scatter(segments, flat_indices, shape, torch.full_like(flat_indices, VISUAL, dtype=torch.uint8))
    return token_index, kind if padding is None else kind.masked_fill(to_device(padding, kind.device), PADDING)


def _scatter(segments: Segments, flat_indices: Tensor, shape: torch.Size, values: Tensor) -> Tensor:
    """Scatter the values of visual tokens into a zero tensor of `shape`."""
    if not segments.has_padding:
        return values.new_zeros(shape.numel()).scatter_(0, flat_indices.flatten(), values.flatten()).view(shape)
    # Values of padding go to one extra element at the end. Boolean indexing would synchronise with the device.
    target = torch.where(segments.mask, flat_indices, shape.numel()).flatten()
    return values.new_zeros(shape.numel() + 1).scatter_(0, target, values.flatten())[:-1].view(shape)


def _build_right_mask(counts: list[int], device: torch.device) -> Tensor:
    """Return a mask that is True for the last `counts[row]` slots of each row, shape (batch, largest count or 1)."""
    first = torch.tensor([max(1, *counts) - count for count in counts], device="cpu")
    return to_device(torch.arange(max(1, *counts), device="cpu") >= first[:, None], device)


def gather_tokens(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather tokens along `dim` in each row. See `kernels.compact.gather_tokens`."""
    return compact.gather_tokens(x, index.to(x.device), dim)  # a model may be spread over devices


def gather_token_mask(mask: Tensor | None, rows: Tensor, valid: Tensor | None) -> Tensor | None:
    """Gather a 2-D token mask.

    Args:
        mask: Mask, shape (batch, length), bool or int, or None for all tokens.
        rows: Indices of the kept tokens, shape (batch, width), int64.
        valid: False for empty slots, shape (batch, width), bool, or None without empty slots.

    Returns:
        The mask of the kept tokens, shape (batch, width), or None for all tokens.
    """
    if mask is None:
        return valid
    mask = mask.gather(1, rows.to(mask.device))
    return mask if valid is None else mask.masked_fill(~valid.to(mask.device), 0)
