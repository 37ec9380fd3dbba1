# SPDX-License-Identifier: Apache-2.0
"""State of a call's tokens at the current decoder layer."""

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
    """W slots per row, filled with the tokens of this call that remain, at the right end, in their order.

    index: long `[B, W]`, position of each slot's token in the call's full sequence. Rows that keep fewer tokens than
           the widest row are filled on the left with (distinct) removed tokens, which `valid` marks.
    valid: bool `[B, W]`, or None when all slots are valid (known without asking the device).
    length: tokens of the call's full sequence, padding among them. counts: tokens of each row that remain, padding left
           out, on the host. Padding stays until the first cut, and goes with it.
    width: W. whole: True if all of the call's tokens are still there, in their own slots.
    """

    index: Tensor
    valid: Tensor | None
    length: int
    tokens_per_row: list[int]
    width: int = field(init=False)
    is_uncut: bool = field(init=False)

    def __post_init__(self) -> None:
        known, width = self.__dict__, self.index.shape[1]  # every layer asks: a property would be a call each time
        known["width"], known["is_uncut"] = width, width == self.length and self.valid is None

    @staticmethod
    def build_uncut(batch: int, length: int, device: torch.device, counts: list[int] | None = None) -> Layout:
        """Return the layout of a call from which nothing left. counts: see the class; None: all tokens."""
        index = torch.arange(length, device=device).expand(batch, length)
        return Layout(index, None, length, [length] * batch if counts is None else counts)

    def to(self, device: torch.device) -> Layout:
        if self.index.device == device:
            return self
        valid = None if self.valid is None else self.valid.to(device)
        return Layout(self.index.to(device), valid, self.length, self.tokens_per_row)

    @cached_property
    def slot_index(self) -> Tensor:
        """long `[B, length]`: the slot that holds each position, filler included; -1 if there is none."""
        if self.is_uncut:
            return self.index
        slots = torch.arange(self.width, device=self.index.device).expand_as(self.index)
        return torch.full((self.index.shape[0], self.length), -1, device=self.index.device).scatter_(
            1, self.index, slots
        )

    @cached_property
    def inverse(self) -> Tensor:
        """long `[B, length]`: the slot of each position, -1 if it is gone."""
        if self.valid is None:
            return self.slot_index
        slots = self.slot_index
        return slots.masked_fill((slots >= 0) & ~self.valid.gather(1, slots.clamp(min=0)), -1)

    @cached_property
    def empty(self) -> Tensor:
        """bool `[B, W]`: the slots that are not valid."""
        return self.index < 0 if self.valid is None else ~self.valid

    def cut(self, gone: Tensor, kept_per_row: list[int]) -> tuple[Layout, Tensor]:
        """Return the layout after a cut, and the slots (long `[B, W']`) of this layout that make it up.

        gone: bool `[B, W]`; kept_per_row: how many of each row are not, known on the host.
        """
        width = max(1, *kept_per_row)  # at least one slot: no layer takes an empty sequence
        # A stable sort of (kept, position) puts the kept tokens at the right end in their old order.
        slots = compact.partition(gone)[:, -width:]
        valid = None
        if min(kept_per_row) < width:  # they stand at the right end
            device = gone.device
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            valid = _RIGHT_ENDS.get((device, stream, *kept_per_row), lambda: _right_ends(kept_per_row, device))
        return Layout(slots if self.is_uncut else self.index.gather(1, slots), valid, self.length, kept_per_row), slots

    def scatter_back(self, x: Tensor) -> Tensor:
        """`[B, W, D]` -> `[B, length, D]`, zeros where tokens are gone."""
        if self.valid is not None:
            x = x.masked_fill(self.empty.unsqueeze(-1), 0)
        return x.new_zeros(x.shape[0], self.length, x.shape[2]).scatter(1, self.index.unsqueeze(-1).expand_as(x), x)

    def positions(self) -> Tensor:
        """long `[B, W]`: like `index`, but -1 for slots that are not valid."""
        return self.index if self.valid is None else self.index.masked_fill(self.empty, -1)


class StageMemory(dict[str, Any]):
    """Values that the stages of one method pass to its later stages, by name. See `VisualTokens.remember`.

    Attributes:
        uncut: Names of values that do not follow cuts, whatever their shape.
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
        """Drop the values of dropped tokens and of segments without kept tokens."""
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
        kept: Result of the most recent cut, or None if there was no cut.
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

    def flat_indices(self) -> Tensor:
        """Return the index of each visual token in the flattened batch, shape (segments, tokens), int64."""
        segments, layout = self.segments, self.layout
        if layout.is_uncut:
            return segments.flat_indices(layout.width)
        row = segments.row_index
        return layout.inverse[row, segments.position] + row * layout.width

    def cut(
        self, keep: Tensor, num_kept: list[int], flat_indices: Tensor, padding: Tensor | None, cut_extras: CutExtras
    ) -> tuple[TokenState, Tensor]:
        """Drop visual tokens, and padding with the first cut.

        Args:
            keep: Visual tokens to keep, shape (segments, tokens), bool. False for padding.
            num_kept: Number of kept tokens per segment, as Python ints (avoids a device sync).
            flat_indices: Result of `flat_indices()`.
            padding: Padding mask, shape (batch, length), bool, on the host. None if there is no padding to drop.
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
            dropped = _scatter(segments.mask ^ keep, flat_indices, layout.index.shape, segments.mask)
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
    token_index = _scatter(segments.mask, flat_indices, shape, indices)
    kind = _scatter(segments.mask, flat_indices, shape, torch.full_like(flat_indices, VISUAL, dtype=torch.uint8))
    return token_index, kind if padding is None else kind.masked_fill(to_device(padding, kind.device), PADDING)


def _scatter(mask: Tensor, flat_indices: Tensor, shape: torch.Size, values: Tensor) -> Tensor:
    """Scatter `values` where `mask` is true into a zero tensor of `shape`."""
    # Masked-out values go to one extra element at the end. Boolean indexing would synchronise with the device.
    target = torch.where(mask, flat_indices, shape.numel()).flatten()
    return values.new_zeros(shape.numel() + 1).scatter_(0, target, values.flatten())[:-1].view(shape)


def _right_ends(counts: list[int], device: torch.device) -> Tensor:
    """Return bool `[B, W]`, True at as many slots as `counts` says, the last of each row; W is the most, at least 1."""
    first = torch.tensor([max(1, *counts) - count for count in counts], device="cpu")
    return to_device(torch.arange(max(1, *counts), device="cpu") >= first[:, None], device)


def gather_tokens(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather tokens along `dim`, row by row; see `kernels.compact.gather_tokens`."""
    return compact.gather_tokens(x, index.to(x.device), dim)  # a model may be spread over devices


def gather_token_mask(mask: Tensor | None, rows: Tensor, valid: Tensor | None) -> Tensor | None:
    """Return the mask of the tokens that remain, bool or int `[B, Q']`, where it tells of tokens alone (None = all).

    mask: the same before, `[B, Q]`. rows: long `[B, Q']`, which tokens remain. valid: bool `[B, Q']`, which of these
    are no empty slots (None = all).
    """
    if mask is None:
        return valid
    mask = mask.gather(1, rows.to(mask.device))
    return mask if valid is None else mask.masked_fill(~valid.to(mask.device), 0)
