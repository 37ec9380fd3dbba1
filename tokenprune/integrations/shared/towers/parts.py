# SPDX-License-Identifier: Apache-2.0
"""Merging within parts: a unit merges with one of its own part, and each part has its own goal.

In a tower that lays all images end to end a part is an image, or a frame of a video; where a model crops tiles after
its tower, it is the patches of a tile that are cropped, or the others. To a method a part is an image.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from tokenprune.kernels.compact import partition
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.encoder import Matcher

Plan = list[Matcher | None]
Goal = TypeVar("Goal", bound=Hashable)


class PartMatcher:
    """Matches the parts of rows apart, in one forward of a tower.

    left: units in each part so far. row: the row of each. kinds: for each kind of part, of one size and one goal, its
    parts, and what finds the merge of each block. place: long `[B, N]`, the part of each unit, -1 for what is in none;
    None where the parts stand one after the other. protected: class tokens of a row, which a method sees before each
    part.
    """

    def __init__(
        self, counts: Sequence[int], goals: Sequence[Goal], build_plan: Callable[[int, Goal], Plan],
        row_index: Sequence[int] | None = None, part_index: Tensor | None = None, protected: int = 0,
    ) -> None:  # fmt: skip
        """goals: of each part; `build_plan` gets it with the number of units, and returns what finds the merge of
        each block."""
        self.num_units, self.row_index = list(counts), row_index or [0] * len(counts)
        self.part_index, self.protected = part_index, protected
        kinds: dict[tuple[int, Goal], list[int]] = defaultdict(list)
        for part, kind in enumerate(zip(counts, goals, strict=True)):
            kinds[kind].append(part)
        self.kinds = [(parts, build_plan(*kind)) for kind, parts in kinds.items()]

    def plan(self, blocks: int) -> Plan:
        """Return what finds the merge of each of a tower's blocks."""
        merging = [any(plan[index] for _, plan in self.kinds) for index in range(blocks)]
        return [partial(self.match, index) if merges else None for index, merges in enumerate(merging)]

    def match(self, index: int, keys: Tensor, counts: list[int] | None) -> Merge | None:
        """Return the merge of a block; see `Matcher`. Units that stay keep their order."""
        rows, width = keys.shape[:2]
        keys, device, before = keys.flatten(0, 1), keys.device, list(self.num_units)
        starts, order = list(accumulate(before, initial=0)), self._order(device)
        # For each unit the one that it joins (itself: it stays), or -1; what is for padding goes to the last entry.
        into, drops = torch.arange(len(keys) + 1, device=device), False
        for parts, plan in self.kinds:
            if (matcher := plan[index]) is None:
                continue
            sizes = [self.protected + before[part] for part in parts]
            ragged = min(sizes) < max(sizes)
            steps = torch.arange(max(sizes) - self.protected, device=device)
            places = to_device([starts[part] for part in parts], device)[:, None] + steps
            if order is not None:
                ahead = torch.arange(self.protected, device=device)
                first = to_device([self.row_index[part] * width for part in parts], device)[:, None]
                places = torch.cat([first + ahead, order[places.clamp(max=len(order) - 1)]], dim=1)
            # What lies behind a shorter part is padding to the matcher, whatever it holds.
            merge = matcher(keys[places.clamp(max=len(keys) - 1)], sizes if ragged else None)
            if merge is None:
                continue
            drops = merge.is_drop
            target = places.gather(1, merge.keep.gather(1, merge.assign.clamp(min=0) if drops else merge.assign))
            target = target.masked_fill(merge.assign < 0, -1) if drops else target
            if ragged:
                real = torch.arange(max(sizes), device=device) < to_device(sizes, device)[:, None]
                places = torch.where(real, places, len(keys))
            into[places] = target
            for part, left in zip(parts, merge.num_kept or [merge.keep.shape[1]] * len(parts), strict=True):
                self.num_units[part] = left - self.protected
        if self.num_units == before:
            return None
        into, rest = into[:-1].view(rows, width), self._of_rows(self.num_units, rows)
        merge = (
            Merge.from_kept(into >= 0, rest) if drops else build_merge(into % width, self._of_rows(before, rows), rest)
        )
        if self.part_index is not None:
            self.part_index = self.part_index.gather(1, merge.keep)
            if merge.num_kept and min(merge.num_kept) < self.part_index.shape[1]:
                padding = (
                    torch.arange(self.part_index.shape[1], device=device) >= to_device(merge.num_kept, device)[:, None]
                )
                self.part_index = self.part_index.masked_fill(padding, -1)
        return merge

    def _order(self, device: torch.device) -> Tensor | None:
        """Return the units of all rows, laid end to end, part by part; None where they stand so."""
        if self.part_index is None:
            return None
        self.part_index = self.part_index.to(device)
        return torch.where(self.part_index < 0, len(self.num_units), self.part_index).flatten().argsort(stable=True)

    def _of_rows(self, left: Sequence[int], rows: int) -> list[int]:
        """Return how many units of each row there are, where `left` are those of parts."""
        total = [self.protected] * rows
        for row, count in zip(self.row_index, left, strict=True):
            total[row] += count
        return total


def build_merge(into: Tensor, before: list[int], left: list[int]) -> Merge:
    """Return the merge in which each unit joins another one of its row: long `[B, n]`, itself: it stays. before, left:
    units in each row, before it and after it. Those that stay keep their order."""
    width = into.shape[1]
    stays = into == torch.arange(width, device=into.device)
    padded, gone = min(before) < width, [one - other for one, other in zip(before, left, strict=True)]
    joins = ~stays
    if padded:
        stays &= torch.arange(width, device=into.device) < to_device(before, into.device)[:, None]
    keep, source = partition(stays)[:, : max(left)], partition(joins)[:, : max(gone)]
    target = (stays.cumsum(1) - 1).gather(1, into)
    ragged = min(gone) < max(gone)
    merge = Merge(keep, source, target.gather(1, source), width, left, to_device(gone, into.device) if ragged else None)
    merge.__dict__["assign"] = target  # which it would have to find
    return merge


def build_frame_matcher(
    grids: Sequence[Sequence[int]], keep: float | int, build_plan: Callable[[int, float | int], Plan]
) -> PartMatcher:
    """Return what merges the frames of images and videos apart, of which (frames, height, width) in units are known.
    build_plan: what finds the merges in a frame of so many units that keeps so much."""
    counts: list[int] = []
    goals: list[float | int] = []
    for frames, height, width in grids:
        counts += [height * width] * frames
        if isinstance(keep, int):  # for all frames of a video together
            share, over = divmod(max(keep, frames), frames)
            goals += [share + (frame < over) for frame in range(frames)]
        else:
            goals += [keep] * frames
    return PartMatcher(counts, goals, build_plan)
