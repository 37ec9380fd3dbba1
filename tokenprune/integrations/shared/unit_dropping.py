# SPDX-License-Identifier: Apache-2.0
"""Units that leave a packed tower at the input of a block, as a method says of each image or video by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def choose_inside(
    run: TowerRun, method: UnitDropper, grids: Grids, most: Sequence[int], patches: int, hidden: Tensor
) -> Merge:
    """Return what drops units by the hidden states that enter a block, `[patches, ...]` of all units, and note which
    stay in `run.kept`."""
    rows = hidden.reshape(-1, patches, hidden.shape[-1])
    if run.order is not None:
        rows = rows[to_device(run.order, hidden.device).argsort()]
    stays = choose_units(method, rows.flatten(0, 1), grids, most, patches)
    run.kept = list(stays.split(run.sizes))
    return dropping(stays, run.order, hidden.device)


def dropping(stays: Tensor, order: Tensor | None, device: torch.device) -> Merge:
    """Return what drops all units but some. stays: bool `[N]` on the host, in the order of rows; order: see
    `TowerRun`."""
    stays = stays if order is None else stays[order.cpu()]
    return Merge.dropping(to_device(stays[None], device), [int(stays.sum())])
