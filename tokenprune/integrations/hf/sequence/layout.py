# SPDX-License-Identifier: Apache-2.0
"""Tokens of a call that are still in the sequence, and their slots: gather, scatter back, compose cuts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tokenprune.kernels import compact
from tokenprune.kernels.transfer import FIFOCache, to_device

_RIGHT_ENDS = FIFOCache()


def gather_tokens(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather tokens along `dim`, row by row; see `kernels.compact.gather_tokens`."""
    return compact.gather_tokens(x, index.to(x.device), dim)  # a model may be spread over devices


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
    counts: list[int]
    width: int = field(init=False)
    whole: bool = field(init=False)

    def __post_init__(self) -> None:
        known, width = self.__dict__, self.index.shape[1]  # every layer asks: a property would be a call each time
        known["width"], known["whole"] = width, width == self.length and self.valid is None

    @staticmethod
    def full(batch: int, length: int, device: torch.device, counts: list[int] | None = None) -> Layout:
        """Return the layout of a call from which nothing left. counts: see the class; None: all tokens."""
        index = torch.arange(length, device=device).expand(batch, length)
        return Layout(index, None, length, [length] * batch if counts is None else counts)

    def to(self, device: torch.device) -> Layout:
        if self.index.device == device:
            return self
        valid = None if self.valid is None else self.valid.to(device)
        return Layout(self.index.to(device), valid, self.length, self.counts)

    @cached_property
    def slot_of(self) -> Tensor:
        """long `[B, length]`: the slot that holds each position, filler included; -1 if there is none."""
        if self.whole:
            return self.index
        slots = torch.arange(self.width, device=self.index.device).expand_as(self.index)
        return torch.full((self.index.shape[0], self.length), -1, device=self.index.device).scatter_(
            1, self.index, slots
        )

    @cached_property
    def inverse(self) -> Tensor:
        """long `[B, length]`: the slot of each position, -1 if it is gone."""
        if self.valid is None:
            return self.slot_of
        slots = self.slot_of
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
        return Layout(slots if self.whole else self.index.gather(1, slots), valid, self.length, kept_per_row), slots

    def scatter_back(self, x: Tensor) -> Tensor:
        """`[B, W, D]` -> `[B, length, D]`, zeros where tokens are gone."""
        if self.valid is not None:
            x = x.masked_fill(self.empty.unsqueeze(-1), 0)
        return x.new_zeros(x.shape[0], self.length, x.shape[2]).scatter(1, self.index.unsqueeze(-1).expand_as(x), x)

    def positions(self) -> Tensor:
        """long `[B, W]`: like `index`, but -1 for slots that are not valid."""
        return self.index if self.valid is None else self.index.masked_fill(self.empty, -1)


def _right_ends(counts: list[int], device: torch.device) -> Tensor:
    """Return bool `[B, W]`, True at as many slots as `counts` says, the last of each row; W is the most, at least 1."""
    first = torch.tensor([max(1, *counts) - count for count in counts], device="cpu")
    return to_device(torch.arange(max(1, *counts), device="cpu") >= first[:, None], device)
