# SPDX-License-Identifier: Apache-2.0
"""Merging in which each row falls into parts: a token merges with one of its own part, and each part has its own goal.

All parts of a row attend to each other. To a method a part is an image.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenprune.ops.merging import Merge
from tokenprune.ops.transfer import to_device
from tokenprune.sites.encoder import Matcher

Plan = list[Matcher | None]


@dataclass
class _Kind:
    """Parts of one size and goal. frames: (row, part) of each. plan: what finds the merge of each block."""

    frames: list[tuple[int, int]]
    plan: Plan


class Apart:
    """Matches the parts of rows apart, in one forward of a tower.

    part: long `[B, patches]`, the part of each patch. protected: class tokens before the patches; a method sees them
    before each part. wanted: how many patches of each part of each row are to be left. plan_of: returns the plan for
    parts of so many patches, of which so many are to be left.
    """

    def __init__(
        self,
        part: Tensor,
        protected: int,
        wanted: Sequence[Sequence[int]],
        plan_of: Callable[[int, int], Plan],
    ) -> None:
        self.part, self.protected = torch.nn.functional.pad(part, (protected, 0), value=-1), protected
        kinds: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.left: dict[tuple[int, int], int] = {}
        for row, goals in enumerate(wanted):
            counts = torch.bincount(part[row], minlength=len(goals)).tolist()
            for number, (count, goal) in enumerate(zip(counts, goals, strict=True)):
                self.left[row, number] = count
                if goal < count:
                    kinds[count, goal].append((row, number))
        self.kinds = [_Kind(frames, plan_of(*kind)) for kind, frames in kinds.items()]

    def plan(self, blocks: int) -> Plan:
        """Return what finds the merge of each of a tower's blocks."""
        merging = [any(kind.plan[index] for kind in self.kinds) for index in range(blocks)]
        return [partial(self.match, index) if merges else None for index, merges in enumerate(merging)]

    def match(self, index: int, keys: Tensor, counts: list[int] | None) -> Merge | None:
        """Return the merge of a block; see `Matcher`. Tokens that stay keep their order."""
        rows, width = keys.shape[:2]
        self.part = self.part.to(keys.device)
        counts = list(counts or [width] * rows)
        # For each token the one that it joins (itself: it stays); what is written for padding goes to the last column.
        into = torch.arange(width + 1, device=keys.device).repeat(rows, 1)
        before = list(counts)
        for kind in self.kinds:
            if (matcher := kind.plan[index]) is not None:
                self._match(kind, matcher, keys, into, counts)
        if counts == before:
            return None
        return self._merge(into[:, :-1], before, counts)

    def _match(self, kind: _Kind, matcher: Matcher, keys: Tensor, into: Tensor, counts: list[int]) -> None:
        """Write to `into` and `counts` what the parts of a kind merge."""
        device, width = keys.device, keys.shape[1]
        row, number = (to_device(of, device)[:, None] for of in map(list, zip(*kind.frames, strict=True)))
        sizes = [self.left[frame] + self.protected for frame in kind.frames]
        inside = self.part[row[:, 0]] == number
        inside[:, : self.protected] = True
        places = (~inside).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(sizes)]
        merge = matcher(keys[row, places], sizes if min(sizes) < max(sizes) else None)
        if merge is None:
            return
        target = places.gather(1, merge.keep.gather(1, merge.assign))
        real = torch.arange(max(sizes), device=device) < to_device(sizes, device)[:, None]
        into[row.expand_as(places), torch.where(real, places, width)] = target
        for frame, size, left in zip(kind.frames, sizes, merge.left or [merge.keep.shape[1]] * len(sizes), strict=True):
            self.left[frame] = left - self.protected
            counts[frame[0]] -= size - left

    def _merge(self, into: Tensor, before: list[int], left: list[int]) -> Merge:
        """Return the merge in which tokens join others as `into` says, and the number of real tokens goes from `before`
        to `left` in each row."""
        width = into.shape[1]
        places = torch.arange(width, device=into.device)
        real = places < to_device(before, into.device)[:, None]
        stays, gone = (into == places) & real, (into != places) & real
        numbers = [one - other for one, other in zip(before, left, strict=True)]
        keep = (~stays).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(left)]
        source = (~gone).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(numbers)]
        target = (stays.cumsum(1) - 1).gather(1, into).gather(1, source)
        padding = torch.arange(max(left), device=into.device) >= to_device(left, into.device)[:, None]
        self.part = self.part.gather(1, keep).masked_fill(padding, -1)
        ragged = min(numbers) < max(numbers)
        return Merge(keep, source, target, width, left, to_device(numbers, into.device) if ragged else None)
