# SPDX-License-Identifier: Apache-2.0
"""State of a call's tokens at the current decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.sequence.layout import Layout
from tokenprune.integrations.hf.sequence.segments import Kept, keep_segments
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.segments import Segments

# (extras, slots, layout after the cut) -> extras after the cut. See `Adapter.cut_extras`.
CutExtras = Callable[[Any, Tensor, Layout], Any]

TEXT, VISUAL, PADDING = 0, 1, 2


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

    def drop(self, kept: Kept) -> None:
        """Drop the values of dropped tokens and of segments without kept tokens."""
        for name, value in self.items():
            if name not in self.uncut and isinstance(value, Tensor) and value.shape[:2] == kept.keep.shape:
                self[name] = kept.follow(value)
            elif kept.withdraws and isinstance(value, (Tensor, list)) and len(value) == len(kept.counts):
                self[name] = kept.segments_of(value)


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
    kept: Kept | None = None

    def __post_init__(self) -> None:
        if self.kept is None:
            self.__dict__["segments"] = self.before_cut  # saves the call of `segments`

    @cached_property
    def segments(self) -> Segments:
        """Visual tokens after the most recent cut. Computed on first access: the last cut does not need them."""
        return self.before_cut if self.kept is None else keep_segments(self.before_cut, self.kept)

    def to(self, device: torch.device) -> TokenState:
        """Return the state on `device`. Layers of one model may be on different devices."""
        if self.layout.index.device == device:
            return self
        return TokenState(self.segments.to(device), self.layout.to(device), self.extras, self.memories)

    def flat_indices(self) -> Tensor:
        """Return the index of each visual token in the flattened batch, shape (segments, tokens), int64."""
        segments, layout = self.segments, self.layout
        if layout.whole:
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
        if layout.whole:
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

        tokens_per_row = list(layout.counts)
        for row, before, after in zip(segments.row, segments.counts, num_kept, strict=True):
            tokens_per_row[row] -= before - after
        new_layout, slots = layout.cut(dropped, tokens_per_row)

        extras, kept = cut_extras(self.extras, slots, new_layout), Kept(keep, num_kept)
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
