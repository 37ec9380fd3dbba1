# SPDX-License-Identifier: Apache-2.0
"""Units that leave a tower at the input of a block, as a method says of each image, video or tile by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.towers.run import TowerRun
from tokenprune.integrations.shared.towers.units import Restoration
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.units import UnitDropper

Grids = Sequence[tuple[int, int, int]]  # (frames, height, width) in units of each image or video


def choose_units(method: UnitDropper, x: Tensor, grids: Grids, most: Sequence[int], patches: int) -> Tensor:
    """Return which units stay of images or videos, end to end, bool `[units]` on the host.

    x: `[all patches, P]` of what `method` sees, unit by unit in the order of rows, `patches` in each. most: how many
    units of each may stay.
    """
    kept = []
    sizes = [math.prod(grid) * patches for grid in grids]
    for one, grid, number in zip(x.float().split(sizes), grids, most, strict=True):
        keep = method.keep_units(one.reshape(*grid, -1), number)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != grid:
            raise TokenPruneError(f"{method.name}.keep_units() must return a bool tensor {list(grid)}")
        kept.append(keep.flatten())
    return torch.cat(kept).cpu()


def plan_drops(
    method: UnitDropper,
    block: int,
    fold: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor, int], Merge],
) -> dict[int, Callable[[Tensor], Merge | None]]:
    """Return the drops of a run, see `TowerRun`, of a method that sees states.

    block: the method's. fold: returns of hidden states those of each unit, `[N, patches, D]`, in the order of rows.
    choose: gets what the method sees of them, `[N * k, D]`, and k.
    """
    before: list[Tensor] = []

    def drop(hidden: Tensor) -> Merge:
        rows = fold(hidden.float() - before.pop() if before else hidden)
        if method.sees == "mean":
            rows = rows.float().mean(1, keepdim=True)
        elif method.sees == "change":
            rows = rows.norm(dim=2, keepdim=True)
        return choose(rows.flatten(0, 1), rows.shape[1])

    def note(hidden: Tensor) -> None:
        before.append(hidden.clone())  # norms of vLLM may write into what they read

    return {block - 1: note, block: drop} if method.sees == "change" else {block: drop}


def plan_packed_drops(
    run: TowerRun, method: UnitDropper, grids: Grids, most: Sequence[int], patches: int
) -> dict[int, Callable[[Tensor], Merge | None]]:
    """Return the drops of a run of a packed tower, which note in `run.kept` which units stay."""

    def fold(hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, patches, hidden.shape[-1])
        return rows if run.order is None else rows[to_device(run.order, rows.device).argsort()]

    def choose(x: Tensor, size: int) -> Merge:
        stays = choose_units(method, x, grids, most, size)
        run.kept = list(stays.split(run.sizes))
        return build_drop(stays, run.order, x.device)

    return plan_drops(method, method.block(len(run.plan)), fold, choose)


def add_restoration(run: TowerRun, method: UnitDropper, block: int, read: int, rows: Sequence[int]) -> None:
    """Have the units that leave at `block` by the drops of a run come back.

    read: how many blocks there are whose output is read. rows: of each image or tile, in the order of the tower.
    """
    choose = run.drops[block]
    attending = range(block, min(block + method.stabilise, read))

    def leave(hidden: Tensor) -> Merge | None:
        drop = choose(hidden)
        if drop is None:
            return None
        numbers = torch.arange(sum(rows), device=hidden.device)
        _, left = run.units.apply(drop, numbers.view(*hidden.shape[:-1], 1))
        stayed = left.flatten()
        gone = numbers[torch.ones_like(numbers, dtype=torch.bool).index_fill_(0, stayed, False)]
        guides, widths = _guides(method, hidden.flatten(0, -2), stayed, gone, rows)
        run.restoration = Restoration(
            drop, attending, read - 1, hidden, stayed, gone, guides, widths.cumsum(0) - widths
        )
        run.units = replace(run.units, restoration=run.restoration)
        return None if attending else drop

    run.drops = {**run.drops, block: leave}


def _guides(
    method: UnitDropper, hidden: Tensor, stayed: Tensor, gone: Tensor, rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `WayBack.guides`, and how many each row has that is gone; image by image."""
    ends = to_device(list(accumulate(rows)), hidden.device)
    counts = [torch.bucketize(x, ends, right=True).bincount(minlength=len(rows)).tolist() for x in (stayed, gone)]
    found, widths, start = [], [], 0
    for left, lost in zip(stayed.split(counts[0]), gone.split(counts[1]), strict=True):
        guides = method.choose_guides(hidden[lost].float(), hidden[left].float())
        found.append((guides + start).flatten())
        widths.append(torch.full_like(lost, guides.shape[1]))
        start += len(left)
    return torch.cat(found), torch.cat(widths)


def build_drop(stays: Tensor, order: Tensor | None, device: torch.device) -> Merge:
    """Return what drops all units but some. stays: bool `[N]` on the host, in the order of rows; order: see
    `TowerRun`."""
    stays = stays if order is None else stays[order.cpu()]
    return Merge.from_kept(to_device(stays[None], device), [int(stays.sum())])
