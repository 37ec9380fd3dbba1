# SPDX-License-Identifier: Apache-2.0
"""Find which units merge in towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5): a unit
merges with another of its image, or of its frame of a video. For the rest see packed.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenprune.ops.transfer import to_device
from tokenprune.sites.encoder import Matcher


@dataclass
class PackedMatch:
    """The merges of one forward.

    sizes: of each image how many units enter. plans: for each kind of frame (its units and its budget) its frames, and
    what finds the merge of each block. left: units of each frame so far.
    """

    sizes: list[int]
    plans: list[tuple[list[int], list[Matcher | None]]]
    left: list[int]

    @classmethod
    def of(
        cls,
        grids: Sequence[Sequence[int]],
        unit: int,
        keep: float | int,
        plan: Callable[[int, float | int], list[Matcher | None]],
    ) -> PackedMatch:
        """Return the merges of images of which (frames, height, width) in patches are known, `unit` patches in a unit.
        plan: what finds the merge of each block, for a frame of so many units that keeps so much."""
        left: list[int] = []
        kinds: dict[tuple, list[int]] = defaultdict(list)
        for t, h, w in grids:
            count = h * w // unit
            for share in keeps(keep, t):
                kinds[count, share].append(len(left))
                left.append(count)
        plans = [(numbers, plan(count, share)) for (count, share), numbers in kinds.items()]
        return cls([t * h * w // unit for t, h, w in grids], plans, left)

    def merges_in(self, index: int) -> bool:
        """Return True if units may merge in the block at `index`."""
        return any(plan[index] for _, plan in self.plans)

    def find(self, index: int, metric: Tensor) -> Tensor | None:
        """Return for each unit that is left the place of the one that it joins in the block at `index` (itself: it
        stays), long `[n]`; None if none joins another. metric: `[n, D]`, by which they are compared."""
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
