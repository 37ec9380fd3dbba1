# SPDX-License-Identifier: Apache-2.0
"""Drop units of patches at the input of a block, in towers that pack the patches of all images into one sequence: how
the tower runs on the others, see packed.py. Their tokens are taken out at the decoder's entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.base import Selection
from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.integrations.hf.encoded.alignment import placeholder_to_feature
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.tower.base import ThreadKey
from tokenprune.integrations.hf.tower.packed import Order, PackedTower
from tokenprune.integrations.shared.attachable import states
from tokenprune.integrations.shared.packed import PackedRun, PackedUnits
from tokenprune.ops.transfer import to_device
from tokenprune.shapes.decoder import DecoderShape
from tokenprune.sites.units import UnitDropper

Grids = Sequence[tuple[int, int, int]]  # (frames, height, width) in units of each image or video


class UnitDrop(PackedTower):
    """Has `method` drop units in the tower of `adapter`'s model, and takes their tokens out of the prompt.

    Raises UnsupportedSetupError for towers without packed patches, BudgetError for a budget that is not one of an image
    by itself, OptionError where colours are needed and no processor tells them, and for a block that there is not.
    """

    leaves = "kept"

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget, processor: Any) -> None:
        super().__init__()
        self.adapter, self.method, self.budget = adapter, method, budget
        self.step = Step(method, budget)
        self.tower, self.key = _tower_of(adapter), ThreadKey()  # of grids
        self.unit = self.tower.spatial_merge_size**2
        depth = len(self.tower.blocks)
        self.block = method.block(depth)
        if not 0 <= self.block < depth:
            raise OptionError(f"{method.name}: the vision tower has {depth} blocks, and no block {self.block}")
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.colours = _colours(processor) if method.sees == "pixels" else None
        if self.colours is None and (why := method.reads_colours):
            raise OptionError(
                f"{method.name}: {why}, and the model gets normalised ones: pass processor=, or leave it out"
            )
        if budget.per != "image" or budget.flops_share is not None:
            raise BudgetError(
                f"{method.name} decides before the prompt is known, for each image or video by itself: of {budget}, "
                'say keep, average_tokens, average_share or kv_share, with per="image"'
            )

    # -- inside the tower

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        # GLM's towers are handed each frame of a video as an image of its own.
        states()[self.key] = self.adapter.grids(encoding.modality, encoding.on_host)
        return encode(encoding)

    def start(self, pixels: Tensor, grids: list[list[int]], order: Order, device: torch.device) -> PackedRun:
        known = states().pop(self.key, None)
        if known is None or sum(map(math.prod, known)) * self.unit != len(pixels):
            side = self.tower.spatial_merge_size
            known = [(t, h // side, w // side) for t, h, w in grids]
        sizes = [math.prod(grid) for grid in known]
        run = PackedRun(PackedUnits.of(sum(sizes), self.unit, device), sizes)
        if self.method.sees == "hidden":
            run.order = order()
            run.drops = {self.block: partial(self._by_hidden, run, known)}
            return run
        with torch.no_grad():
            kept = self._choose(run, known, pixels)
        if not bool(kept.all()):
            run.order = order()
            stays = kept if run.order is None else kept[run.order.cpu()]
            run.drops = {self.block: lambda hidden: stays}
        return run

    def _by_hidden(self, run: PackedRun, grids: Grids, hidden: Tensor) -> Tensor:
        """Return which units stay, bool `[units]`, in the tower's order. hidden: `[patches, D]`, alike."""
        if run.order is None:
            return self._choose(run, grids, hidden)
        order = to_device(run.order, hidden.device)
        rows = hidden.unflatten(0, (-1, self.unit))[order.argsort()]
        return self._choose(run, grids, rows.flatten(0, 1))[run.order.cpu()]

    def _choose(self, run: PackedRun, grids: Grids, x: Tensor) -> Tensor:
        """Note which units of each image or video stay; return them all, bool `[units]` on the host. x: `[patches, P]`,
        unit by unit in the order of rows."""
        found = []
        for one, grid in zip(x.float().split([units * self.unit for units in run.sizes]), grids, strict=True):
            (most,) = self.budget.resolve([math.prod(grid)], layer=0, shape=self.shape, text_tokens=0)
            if self.colours is not None:
                mean, std = (to_device(of, one.device) for of in self.colours)
                one = torch.addcmul(mean[:, None], one.view(len(one), len(std), -1), std[:, None])
            keep = self.method.keep_units(one.reshape(*grid, -1), most)
            if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != grid:
                raise TokenPruneError(f"{self.method.name}.keep_units() must return a bool tensor {list(grid)}")
            found.append(keep.flatten())
        kept = torch.cat(found).cpu()
        run.kept = list(kept.split(run.sizes))
        return kept

    # -- after the tower

    def select(self, call: Call, device: torch.device, left: dict[str, list[Tensor]]) -> Selection | None:
        if all(bool(image.all()) for of_images in left.values() for image in of_images):
            return None
        stays = torch.ones_like(call.host.visual)
        for modality, of_images in left.items():
            kept, mask = torch.cat(of_images), call.host.masks[modality]
            numbers = placeholder_to_feature(modality, mask, len(kept))
            stays[mask] = kept[numbers[mask]]
        segments = call.held.segments.to(device)
        found = to_device(stays, device)[segments.row_index, segments.position] & segments.mask
        return Selection(found, counts=found.sum(1).tolist())


def _tower_of(adapter: Adapter) -> Any:
    """Return the tower of packed patches, which families with `units` have."""
    towers = (getattr(adapter.base, name, None) for name in ("visual", "vision_model"))
    return next(tower for tower in towers if hasattr(tower, "merger"))


def _colours(processor: Any) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of each channel by which a processor normalises colours from 0 to 1; None
    where nothing tells."""
    for one in (processor, *(getattr(processor, name, None) for name in ("image_processor", "video_processor"))):
        mean, std = getattr(one, "image_mean", None), getattr(one, "image_std", None)
        if mean is not None and std is not None:
            colours = [mean, std] if getattr(one, "do_normalize", True) else [[0.0] * 3, [1.0] * 3]
            return tuple(torch.tensor(colours, dtype=torch.float32, device="cpu"))
    return None
