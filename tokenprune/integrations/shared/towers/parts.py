# SPDX-License-Identifier: Apache-2.0
"""Merge units within parts. A unit merges only with units of its own part, and each part has its own goal.

In a packed tower a part is an image, or a frame of a video. If a model crops tiles after its tower, a part is the
cropped patches of a tile, or the shown patches. A method sees each part as an image.
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
    """Finds the merges of all parts during one forward of a tower.

    Attributes:
        num_units: Number of units of each part so far.
        row_index: Row of each part.
        kinds: For each pair of size and goal, its parts and the matchers of the tower's blocks.
        part_index: Part of each unit, shape (rows, units), int64, -1 for units without a part. None if the parts follow
            each other.
        protected: Number of class tokens of a row. A method sees them before each part.

    Args:
        counts: Number of units of each part.
        goals: Goal of each part, such as the number of kept units.
        build_plan: Returns the matchers of all blocks for a part, given its number of units and its goal.
    """

    def __init__(
        self, counts: Sequence[int], goals: Sequence[Goal], build_plan: Callable[[int, Goal], Plan],
        row_index: Sequence[int] | None = None, part_index: Tensor | None = None, protected: int = 0,
    ) -> None:  # fmt: skip
        self.num_units, self.row_index = list(counts), row_index or [0] * len(counts)
        self.part_index, self.protected = part_index, protected
        kinds: dict[tuple[int, Goal], list[int]] = defaultdict(list)
        for part, kind in enumerate(zip(counts, goals, strict=True)):
            kinds[kind].append(part)
        self.kinds = [(parts, build_plan(*kind)) for kind, parts in kinds.items()]

    def plan(self, blocks: int) -> Plan:
        """Return the matcher of each block of the tower."""
        merging = [any(plan[index] for _, plan in self.kinds) for index in range(blocks)]
        return [partial(self.match, index) if merges else None for index, merges in enumerate(merging)]

    def match(self, index: int, keys: Tensor, counts: list[int] | None) -> Merge | None:
        """Return the merge of a block; see `Matcher`. The kept units keep their order."""
        rows, width = keys.shape[:2]
        keys, device, before = keys.flatten(0, 1), keys.device, list(self.num_units)
        starts, order = list(accumulate(before, initial=0)), self._find_order(device)
        # Index of the unit that each unit joins: its own index if it is kept, -1 if it is dropped. The last entry takes
        # the values of padding.
        targets, drops = torch.arange(len(keys) + 1, device=device), False
        for parts, plan in self.kinds:
            if (matcher := plan[index]) is None:
                continue
            sizes = [self.protected + before[part] for part in parts]
            ragged = min(sizes) < max(sizes)
            steps = torch.arange(max(sizes) - self.protected, device=device)
            indices = to_device([starts[part] for part in parts], device)[:, None] + steps
            if order is not None:
                ahead = torch.arange(self.protected, device=device)
                first = to_device([self.row_index[part] * width for part in parts], device)[:, None]
                indices = torch.cat([first + ahead, order[indices.clamp(max=len(order) - 1)]], dim=1)
            # Units after the end of a shorter part are padding, which the matcher ignores.
            merge = matcher(keys[indices.clamp(max=len(keys) - 1)], sizes if ragged else None)
            if merge is None:
                continue
            drops = merge.is_drop
            target = indices.gather(1, merge.keep.gather(1, merge.assign.clamp(min=0) if drops else merge.assign))
            target = target.masked_fill(merge.assign < 0, -1) if drops else target
            if ragged:
                is_unit = torch.arange(max(sizes), device=device) < to_device(sizes, device)[:, None]
                indices = torch.where(is_unit, indices, len(keys))
            targets[indices] = target
            for part, count in zip(parts, merge.num_kept or [merge.keep.shape[1]] * len(parts), strict=True):
                self.num_units[part] = count - self.protected
        if self.num_units == before:
            return None
        targets, num_kept = targets[:-1].view(rows, width), self._count_per_row(self.num_units, rows)
        merge = (
            Merge.from_kept(targets >= 0, num_kept)
            if drops
            else build_merge(targets % width, self._count_per_row(before, rows), num_kept)
        )
        if self.part_index is not None:
            self.part_index = self.part_index.gather(1, merge.keep)
            if merge.num_kept and min(merge.num_kept) < self.part_index.shape[1]:
                padding = (
                    torch.arange(self.part_index.shape[1], device=device) >= to_device(merge.num_kept, device)[:, None]
                )
                self.part_index = self.part_index.masked_fill(padding, -1)
        return merge

    def _find_order(self, device: torch.device) -> Tensor | None:
        """Return the indices of all units sorted by part, or None if the parts already follow each other."""
        if self.part_index is None:
            return None
        self.part_index = self.part_index.to(device)
        return torch.where(self.part_index < 0, len(self.num_units), self.part_index).flatten().argsort(stable=True)

    def _count_per_row(self, counts: Sequence[int], rows: int) -> list[int]:
        """Return the number of units of each row, given the number of units of each part."""
        total = [self.protected] * rows
        for row, count in zip(self.row_index, counts, strict=True):
            total[row] += count
        return total


def build_merge(targets: Tensor, before: list[int], num_kept: list[int]) -> Merge:
    """Return a merge in which each unit joins a unit of its row. The kept units keep their order.

    Args:
        targets: Index of the unit that each unit joins, shape (rows, units), int64. A kept unit has its own index.
        before: Number of units of each row before the merge.
        num_kept: Number of units of each row after the merge.
    """
    width = targets.shape[1]
    kept = targets == torch.arange(width, device=targets.device)
    has_padding, num_joined = (
        min(before) < width,
        [count - after for count, after in zip(before, num_kept, strict=True)],
    )
    joins = ~kept
    if has_padding:
        kept &= torch.arange(width, device=targets.device) < to_device(before, targets.device)[:, None]
    keep, source = partition(kept)[:, : max(num_kept)], partition(joins)[:, : max(num_joined)]
    target = (kept.cumsum(1) - 1).gather(1, targets)
    is_ragged = min(num_joined) < max(num_joined)
    merge = Merge(
        keep,
        source,
        target.gather(1, source),
        width,
        num_kept,
        to_device(num_joined, targets.device) if is_ragged else None,
    )
    merge.__dict__["assign"] = target  # fills the cached property
    return merge


def build_frame_matcher(
    grids: Sequence[Sequence[int]], keep: float | int, build_plan: Callable[[int, float | int], Plan]
) -> PartMatcher:
    """Return a matcher that merges each frame of images and videos separately.

    Args:
        grids: (frames, height, width) of each image or video, in units.
        keep: Share of the units to keep, or number of units of all frames of a video.
        build_plan: Returns the matchers of all blocks for a frame, given its number of units and its goal.
    """
    counts: list[int] = []
    goals: list[float | int] = []
    for frames, height, width in grids:
        counts += [height * width] * frames
        if isinstance(keep, int):  # split over the frames
            share, over = divmod(max(keep, frames), frames)
            goals += [share + (frame < over) for frame in range(frames)]
        else:
            goals += [keep] * frames
    return PartMatcher(counts, goals, build_plan)
