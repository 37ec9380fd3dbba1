# SPDX-License-Identifier: Apache-2.0
"""Drop units of patches at the input of a block, in towers that pack the patches of all images into one sequence: how
the tower runs on the others, see packed.py. Their tokens are taken out at the decoder's entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.sequence.alignment import placeholder_to_feature
from tokenprune.integrations.hf.towers.base import GroupedTokens
from tokenprune.integrations.hf.towers.packed import Order, PackedTower
from tokenprune.integrations.shared.towers.reducer import Block, TowerReducer, TowerRun, packed_blocks
from tokenprune.integrations.shared.towers.unit_dropping import (
    Grids,
    choose_units,
    choosing_packed,
    come_back,
    dropping,
)
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.transfer import to_device
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.method import Selection
from tokenprune.selection.sites.units import UnitDropper


class KeptUnits(TowerReducer, GroupedTokens):
    """Takes the tokens of units that were dropped out of the prompt.

    Raises BudgetError for a budget that is not one of an image by itself, OptionError for a block that there is not.
    """

    leaves = "kept"

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.belong(adapter, method, budget)
        self.blocks, self.block = blocks, method.checked_block(len(blocks))
        self.shape = DecoderShape.from_config(adapter.text_config)
        if budget.per != "image" or budget.flops_share is not None:
            raise BudgetError(
                f"{method.name} acts before the prompt is known and does not support {budget}. Use keep, "
                'average_tokens, average_share or kv_share, with per="image".'
            )

    def select(self, call: Call, device: torch.device, left: dict[str, list[Tensor]]) -> Selection | None:
        if not self.method.removes or all(bool(image.all()) for of_images in left.values() for image in of_images):
            return None
        stays = torch.ones_like(call.host.visual)
        for modality, of_images in left.items():
            kept, mask = torch.cat(of_images), call.host.masks[modality]
            numbers = placeholder_to_feature(modality, mask, len(kept))
            stays[mask] = kept[numbers[mask]]
        segments = call.held.segments.to(device)
        found = to_device(stays, device)[segments.row_index, segments.position] & segments.mask
        return Selection(found, counts=found.sum(1).tolist())


class UnitDrop(KeptUnits, PackedTower):
    """Has `method` drop units in the packed tower of `adapter`'s model.

    Raises what `KeptUnits` does, UnsupportedSetupError for towers without packed patches, and OptionError where colours
    are needed and no processor tells them.
    """

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget, processor: Any) -> None:
        self.find_tower(adapter)
        super().__init__(adapter, method, budget, packed_blocks(self.tower))
        self.inside = method.sees != "pixels"
        self.middle = self.fills = not method.removes
        self.colours = None if self.inside else colours_of(processor)
        if self.colours is None and (why := method.reads_colours):
            raise OptionError(
                f"{method.name}: {why}, and the model gets normalised pixels. Pass processor=, or leave the option out."
            )

    # -- inside the tower

    def start(self, pixels: Tensor, grids: Grids, order: Order, device: torch.device) -> TowerRun:
        if not self.method.removes:
            grids = [(1, h, w) for t, h, w in grids for _ in range(t)]
        sizes = [math.prod(grid) for grid in grids]
        most = [self.budget.resolve([size], layer=0, shape=self.shape, text_tokens=0)[0] for size in sizes]
        run = TowerRun(Units.packed(sum(sizes), self.patches, device), [None] * len(self.blocks), sizes=sizes)
        if self.inside:
            run.order = order()
            run.drops = choosing_packed(run, self.method, grids, most, self.patches)
        else:
            with torch.no_grad():
                stays = choose_units(self.method, coloured(pixels.float(), self.colours), grids, most, self.patches)
            run.kept, run.acts = list(stays.split(sizes)), not bool(stays.all())
            if run.acts:
                run.order = order()
                run.drops = {self.block: lambda hidden: dropping(stays, run.order, hidden.device)}
        if run.acts and not self.method.removes:
            come_back(run, self.method, self.block, len(self.blocks), [size * self.patches for size in sizes])
        return run


Colours = tuple[Tensor, Tensor]  # mean and standard deviation of each channel


def coloured(pixels: Tensor, colours: Colours | None) -> Tensor:
    """Return `pixels`, `[patches, channels * P]`, with colours from 0 to 1; as they are, where nothing tells these."""
    if colours is None:
        return pixels
    mean, std = (to_device(of, pixels.device) for of in colours)
    return torch.addcmul(mean[:, None], pixels.view(len(pixels), len(std), -1), std[:, None]).flatten(1)


def colours_of(processor: Any) -> Colours | None:
    """Return mean and standard deviation of each channel by which a processor normalises colours from 0 to 1; None
    where nothing tells."""
    for one in (processor, *(getattr(processor, name, None) for name in ("image_processor", "video_processor"))):
        mean, std = getattr(one, "image_mean", None), getattr(one, "image_std", None)
        if mean is not None and std is not None:
            colours = [mean, std] if getattr(one, "do_normalize", True) else [[0.0] * 3, [1.0] * 3]
            return tuple(torch.tensor(colours, dtype=torch.float32, device="cpu"))
    return None
