# SPDX-License-Identifier: Apache-2.0
"""The tokens that a call holds at the current layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.forward.carry import Carry
from tokenprune.integrations.hf.sequence.layout import Layout
from tokenprune.integrations.hf.sequence.segments import Kept, keep_segments
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.segments import Segments

# (extras, slots, layout after the cut) -> extras after the cut: see `Adapter.cut_extras`.
CutExtras = Callable[[Any, Tensor, Layout], Any]


@dataclass(frozen=True)
class HeldTokens:
    """All that follows a cut, as one value: a cut is one assignment.

    before: the visual tokens ahead of the last cut. layout: all tokens. extras: what the adapter takes along with them.
    carries: what stages remember, by `Step.owner`. kept: what the last cut left of `before`, None = all.
    """

    before: Segments
    layout: Layout
    extras: Any = None
    carries: dict[int, Carry] = field(default_factory=dict)
    kept: Kept | None = None

    def __post_init__(self) -> None:
        if self.kept is None:
            self.__dict__["segments"] = self.before  # as `segments` would say, without a call

    @cached_property
    def segments(self) -> Segments:
        """The visual tokens that are left; after a last cut nobody asks."""
        return self.before if self.kept is None else keep_segments(self.before, self.kept)

    def to(self, device: torch.device) -> HeldTokens:
        """Return it with segments and layout on `device`: a model may be spread over several."""
        if self.layout.index.device == device:
            return self
        return HeldTokens(self.segments.to(device), self.layout.to(device), self.extras, self.carries)

    def places(self) -> Tensor:
        """long `[S, N]`: places of the visual tokens in the flattened `[B * W]`."""
        segments, layout, row = self.segments, self.layout, self.segments.row_index
        if layout.whole:
            return segments.places(layout.width)
        return layout.inverse[row, segments.position] + row * layout.width

    def cut(
        self, keep: Tensor, counts: list[int], places: Tensor, padding: Tensor | None, cut_extras: CutExtras
    ) -> tuple[HeldTokens, Tensor]:
        """Return what is held after a cut, and the slots (long `[B, W']`) of this layout that make it up.

        keep: bool `[S, N]`, the visual tokens that stay; counts: its row sums, known on the host. places: see `places`.
        padding: bool `[B, L]` on the host, which leaves with the first cut, or None.
        """
        segments, layout = self.segments, self.layout
        if layout.whole:
            size = layout.index.shape
            token, level = segments.recent.get(("slots", size), lambda: _slots(segments, places, size, padding))
            gone = level > keep.take(token)
        else:
            gone = _written(segments.mask ^ keep, places, layout.index.shape, segments.mask)
            if layout.valid is not None:
                gone |= ~layout.valid
        kept_per_row = list(layout.counts)
        for row, count, left in zip(segments.row, segments.counts, counts, strict=True):
            kept_per_row[row] -= count - left
        after, taken = layout.cut(gone, kept_per_row)
        extras, kept = cut_extras(self.extras, taken, after), Kept(keep, counts)
        for carry in self.carries.values():
            carry.follow(kept)
        return HeldTokens(segments, after, extras, self.carries, kept), taken


def _slots(segments: Segments, places: Tensor, size: torch.Size, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `[B, W]` twice: the visual token in each slot of a row; and 0 for text, 1 for these, 2 for padding."""
    token = _written(segments.mask, places, size, torch.arange(places.numel(), device=places.device))
    level = _written(segments.mask, places, size, torch.ones_like(places, dtype=torch.uint8))
    return token, level if padding is None else level.masked_fill(to_device(padding, level.device), 2)


def _written(where: Tensor, places: Tensor, size: torch.Size, values: Tensor) -> Tensor:
    """Return `[B, W]` with `values` at those `places` (both `[S, N]`) for which `where` is True, and 0 elsewhere."""
    target = torch.where(where, places, size.numel()).flatten()  # a scratch entry, so that the host waits for nothing
    return values.new_zeros(size.numel() + 1).scatter_(0, target, values.flatten())[:-1].view(size)
