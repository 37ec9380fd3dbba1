# SPDX-License-Identifier: Apache-2.0
"""Drop units at the input of a tower's block. A method chooses the units of each image, video or tile separately."""

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


def choose_units(method: UnitDropper, x: Tensor, grids: Grids, max_units: Sequence[int], patches: int) -> Tensor:
    """Return the mask of the kept units of images or videos, shape (units,), bool, on the host.

    Args:
        x: Values that the method sees, shape (all patches, channels), unit by unit in raster order.
        grids: (frames, height, width) of each image or video, in units.
        max_units: Maximum number of kept units of each image or video.
        patches: Number of patches of a unit.

    Raises:
        TokenPruneError: If the method returns anything but a boolean mask of the grid.
    """
    kept = []
    sizes = [math.prod(grid) * patches for grid in grids]
    for values, grid, count in zip(x.float().split(sizes), grids, max_units, strict=True):
        mask = method.keep_units(values.reshape(*grid, -1), count)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != grid:
            raise TokenPruneError(f"{method.name}.keep_units() must return a bool tensor of shape {list(grid)}.")
        kept.append(mask.flatten())
    return torch.cat(kept).cpu()


def plan_drops(
    method: UnitDropper,
    block: int,
    fold: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor, int], Merge],
) -> dict[int, Callable[[Tensor], Merge | None]]:
    """Return the drops of a forward for a method that sees hidden states; see `TowerRun.drops`.

    Args:
        block: Index of the block at whose input units are dropped.
        fold: Groups hidden states by unit: shape (units, patches, channels), in raster order.
        choose: Returns the drop, given the values that the method sees, shape (units * k, channels), and k.
    """
    before: list[Tensor] = []

    def drop(hidden: Tensor) -> Merge:
        rows = fold(hidden.float() - before.pop() if before else hidden)
        if method.sees == "mean":
            rows = rows.float().mean(1, keepdim=True)
        elif method.sees == "change":
            rows = rows.norm(dim=2, keepdim=True)
        return choose(rows.flatten(0, 1), rows.shape[1])

    def record(hidden: Tensor) -> None:
        before.append(hidden.clone())  # norms of vLLM may write into their input

    return {block - 1: record, block: drop} if method.sees == "change" else {block: drop}


def plan_packed_drops(
    run: TowerRun, method: UnitDropper, grids: Grids, max_units: Sequence[int], patches: int
) -> dict[int, Callable[[Tensor], Merge | None]]:
    """Return the drops of a forward of a packed tower. They set `run.kept`."""

    def fold(hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, patches, hidden.shape[-1])
        return rows if run.order is None else rows[to_device(run.order, rows.device).argsort()]

    def choose(x: Tensor, size: int) -> Merge:
        kept = choose_units(method, x, grids, max_units, size)
        run.kept = list(kept.split(run.sizes))
        return build_drop(kept, run.order, x.device)

    return plan_drops(method, method.block(len(run.plan)), fold, choose)


def add_restoration(run: TowerRun, method: UnitDropper, block: int, read: int, rows: Sequence[int]) -> None:
    """Wrap the drops of a forward so that the units dropped at `block` are restored later.

    Args:
        block: Index of the block at whose input units are dropped.
        read: Number of blocks whose output the model reads.
        rows: Number of patches of each image or tile, in the order of the tower.
    """
    choose = run.drops[block]
    attending = range(block, min(block + method.stabilise, read))

    def leave(hidden: Tensor) -> Merge | None:
        drop = choose(hidden)
        if drop is None:
            return None
        indices = torch.arange(sum(rows), device=hidden.device)
        _, remaining = run.units.apply(drop, indices.view(*hidden.shape[:-1], 1))
        kept = remaining.flatten()
        dropped = indices[torch.ones_like(indices, dtype=torch.bool).index_fill_(0, kept, False)]
        guides, widths = _find_guides(method, hidden.flatten(0, -2), kept, dropped, rows)
        run.restoration = Restoration(
            drop, attending, read - 1, hidden, kept, dropped, guides, widths.cumsum(0) - widths
        )
        run.units = replace(run.units, restoration=run.restoration)
        return None if attending else drop

    run.drops = {**run.drops, block: leave}


def _find_guides(
    method: UnitDropper, hidden: Tensor, kept: Tensor, dropped: Tensor, rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `Restoration.guides`, and the number of guides of each dropped row, image by image."""
    ends = to_device(list(accumulate(rows)), hidden.device)
    counts = [torch.bucketize(x, ends, right=True).bincount(minlength=len(rows)).tolist() for x in (kept, dropped)]
    indices, widths, num_before = [], [], 0
    for kept_rows, dropped_rows in zip(kept.split(counts[0]), dropped.split(counts[1]), strict=True):
        guides = method.choose_guides(hidden[dropped_rows].float(), hidden[kept_rows].float())
        indices.append((guides + num_before).flatten())
        widths.append(torch.full_like(dropped_rows, guides.shape[1]))
        num_before += len(kept_rows)
    return torch.cat(indices), torch.cat(widths)


def build_drop(kept: Tensor, order: Tensor | None, device: torch.device) -> Merge:
    """Return a merge that drops units.

    Args:
        kept: Mask of the kept units, shape (units,), bool, on the host, in raster order.
        order: See `TowerRun.order`.
    """
    kept = kept if order is None else kept[order.cpu()]
    return Merge.from_kept(to_device(kept[None], device), [int(kept.sum())])
