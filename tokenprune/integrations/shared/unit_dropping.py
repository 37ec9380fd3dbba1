# SPDX-License-Identifier: Apache-2.0
"""Units that leave a packed tower at the input of a block, as a method says of each image or video by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.reducer import TowerRun
from tokenprune.ops.merging import Merge
from tokenprune.ops.transfer import to_device
from tokenprune.sites.units import UnitDropper

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


def choosing(
    run: TowerRun, method: UnitDropper, grids: Grids, most: Sequence[int], patches: int
) -> dict[int, Callable[[Tensor], Merge | None]]:
    """Return the drops of a run, see `TowerRun`, by the states that reach the method's block. They note in `run.kept`
    which units stay."""
    block, before = method.block(len(run.plan)), list[Tensor]()

    def choose(hidden: Tensor) -> Merge:
        x = hidden.float() - before.pop() if before else hidden
        rows = x.reshape(-1, patches, x.shape[-1])
        if method.sees == "mean":
            rows = rows.float().mean(1, keepdim=True)
        if run.order is not None:
            rows = rows[to_device(run.order, rows.device).argsort()]
        stays = choose_units(method, rows.flatten(0, 1), grids, most, rows.shape[1])
        run.kept = list(stays.split(run.sizes))
        return dropping(stays, run.order, hidden.device)

    def note(hidden: Tensor) -> None:
        before.append(hidden.clone())  # norms of vLLM may write into what they read

    return {block - 1: note, block: choose} if method.sees == "change" else {block: choose}


def dropping(stays: Tensor, order: Tensor | None, device: torch.device) -> Merge:
    """Return what drops all units but some. stays: bool `[N]` on the host, in the order of rows; order: see
    `TowerRun`."""
    stays = stays if order is None else stays[order.cpu()]
    return Merge.dropping(to_device(stays[None], device), [int(stays.sum())])
