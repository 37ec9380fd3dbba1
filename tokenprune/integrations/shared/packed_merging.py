# SPDX-License-Identifier: Apache-2.0
"""Merging of units in towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5), whichever
library runs the tower.

Behind these towers 2 x 2 patches, which stand side by side in the sequence, become one visual token. What merges is
therefore such a unit with another of the same image (or frame), patch by patch at the same place of the unit: the
2 x 2 stay together, and the unit keeps the rotary places of the one that others merged into. A unit that stays, stays
in its attention window; units of other windows may have merged into it. At the tower's end each patch gets the feature
of its merged one back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenprune.kernels.compact import partition
from tokenprune.kernels.join import join
from tokenprune.ops.transfer import to_device
from tokenprune.sites.encoder import Matcher


@dataclass
class PackedUnits:
    """One forward of a packed tower. N units entered, n are left so far.

    unit: patches in one. grids: (frames, height, width) in patches of each image. frame: long `[N]`, the image or frame
    of each unit that entered. plans: for each kind of frame (its units and its budget) its frames, and what finds the
    merge of each block. left: units of each frame so far. kept: long `[n]`, which units are left, ascending. owner:
    long `[N]`, for each unit that entered the place among those left of the one that it is part of. size: float32
    `[n]`, units that each is made of; None before a merge. start: the patch at which the next piece of a block's
    attention starts.
    """

    unit: int
    grids: list[list[int]]
    frame: Tensor
    plans: list[tuple[list[int], list[Matcher | None]]]
    left: list[int]
    kept: Tensor
    owner: Tensor
    size: Tensor | None = None
    keys: Tensor | None = None
    merged: Tensor | None = None
    output: Tensor | None = None
    start: int = 0
    counts: list[int] = field(default_factory=list)
    owners: list[Tensor] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        grids: Sequence[Sequence[int]],
        unit: int,
        keep: float | int,
        plan: Callable[[int, float | int], list[Matcher | None]],
        device: torch.device,
    ) -> PackedUnits:
        """Return the state before the first block. plan: what finds the merge of each block, for a frame of so many
        units that keeps so much."""
        left: list[int] = []
        kinds: dict[tuple, list[int]] = defaultdict(list)
        for t, h, w in grids:
            count = h * w // unit
            for share in keeps(keep, t):
                kinds[count, share].append(len(left))
                left.append(count)
        plans = [(frames, plan(count, share)) for (count, share), frames in kinds.items()]
        units = torch.arange(sum(left), device=device)
        frame = torch.repeat_interleave(to_device(left, device), output_size=len(units))
        return cls(unit, [list(grid) for grid in grids], frame, plans, left, units, units)

    def enter(self) -> None:
        """Note what enters a block."""
        self.keys = self.merged = self.output = None
        self.start = 0
        self.counts.append(len(self.kept))
        self.owners.append(self.owner)

    def merges_in(self, index: int) -> bool:
        """Return True if units may merge in the block at `index`."""
        return any(plan[index] for _, plan in self.plans)

    def lengths(self, ends: Tensor) -> Tensor:
        """Return the borders of the pieces that attend to themselves, in patches, for the units that are left. ends:
        those for all units."""
        unit = self.kept * self.unit
        piece = torch.bucketize(unit, ends[1:].to(unit), right=True)
        counts = piece.unique_consecutive(return_counts=True)[1]  # pieces from which all units went disappear
        return torch.cat([counts.new_zeros(1), counts.cumsum(0) * self.unit]).to(ends.dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """`[N * unit, D]` -> `[n * unit, D]`: what is known of the patches that entered, of those that are left."""
        return x.view(-1, self.unit, x.shape[-1])[self.kept].flatten(0, 1)

    def restore(self, x: Tensor, owner: Tensor) -> Tensor:
        """`[n * unit, D]` -> `[N * unit, D]`"""
        if len(x) == len(owner) * self.unit:
            return x
        return x.view(-1, self.unit, x.shape[-1])[owner].flatten(0, 1)

    def owners_by_rows(self, order: Tensor | None) -> list[Tensor]:
        """Return `owner` image by image. order: long `[N]`, the units in the order in which the tower lines them up;
        None where that is the order of rows."""
        owner = self.owner if order is None else self.owner[to_device(order, self.owner.device).argsort()]
        return list(owner.split([t * h * w // self.unit for t, h, w in self.grids]))

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the logarithm of the size of each patch's unit, `[n * unit]`; None before a merge."""
        return None if self.size is None else self.size.log().repeat_interleave(self.unit).to(dtype)

    def merge(self, index: int, hidden: Tensor) -> Tensor | None:
        """Merge `hidden` `[n * unit, D]` in the block at `index`, by the keys that were noted there; None if nothing
        merges."""
        with torch.no_grad():
            into = self._match(index)
        self.keys = None
        if into is None:
            return None
        # into: for each unit left the place of the one that it joins (itself: it stays).
        places = torch.arange(len(into), device=into.device)
        stays = into == places
        target = (stays.cumsum(0) - 1)[into]
        size = torch.ones(len(into), dtype=torch.float32, device=into.device) if self.size is None else self.size
        count = sum(self.left)
        order = partition(stays[None])[0]
        kept, gone = order[:count], order[count:]
        merged = join(hidden.view(len(into), -1), kept, size[kept], gone, target[gone], size[gone])
        total = size.new_zeros(count).index_add(0, target, size)
        self.size, self.kept, self.owner = total, self.kept[kept], target[self.owner]
        return merged.view(-1, hidden.shape[-1])

    def _match(self, index: int) -> Tensor | None:
        """Return for each unit left the place of the one that it joins; None if none does."""
        assert self.keys is not None  # see `merge`
        metric = self.keys.view(len(self.kept), -1)
        starts = [sum(self.left[:frame]) for frame in range(len(self.left))]
        into = torch.arange(len(metric) + 1, device=metric.device)
        merges = False
        for frames, plan in self.plans:
            matcher = plan[index]
            if matcher is None:
                continue
            counts = [self.left[frame] for frame in frames]
            ragged = min(counts) < max(counts)
            places = torch.arange(max(counts), device=metric.device)
            rows = to_device([starts[frame] for frame in frames], metric.device)[:, None] + places
            # What lies behind a shorter frame is padding to the matcher, whatever it holds.
            merge = matcher(metric[rows.clamp(max=len(metric) - 1)], counts if ragged else None)
            if merge is None:
                continue
            merges = True
            target = rows.gather(1, merge.keep.gather(1, merge.assign))
            if ragged:
                # Padding is written to a scratch entry at the end.
                rows = torch.where(places < to_device(counts, metric.device)[:, None], rows, len(metric))
            into[rows] = target
            for frame, left in zip(frames, merge.left or [merge.keep.shape[1]] * len(frames), strict=True):
                self.left[frame] = left
        return into[:-1] if merges else None


def mean_of_groups(x: Tensor, owner: Tensor) -> Tensor:
    """`[N, D]`: each row becomes the mean of the rows with its owner."""
    total = torch.zeros(len(owner), x.shape[1], dtype=torch.float32, device=x.device).index_add(0, owner, x.float())
    count = total.new_zeros(len(owner)).index_add(0, owner, total.new_ones(len(owner)))
    return (total / count.clamp(min=1)[:, None])[owner].to(x.dtype)


def keeps(keep: float | int, frames: int) -> list[float | int]:
    """Return the keep of each of the frames of a video: a number of tokens is for all of them."""
    if isinstance(keep, int):
        share, over = divmod(max(keep, frames), frames)
        return [share + (frame < over) for frame in range(frames)]
    return [keep] * frames
