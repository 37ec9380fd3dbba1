# SPDX-License-Identifier: Apache-2.0
"""Drop units of patches, by their pixels, ahead of the first block of towers that pack the patches of all images into
one sequence: how the tower runs on the others, see packed.py. Their tokens are taken out at the decoder's entry."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tokenprune import abilities
from tokenprune.base import Selection
from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.hf.encoded.alignment import placeholder_to_feature
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.tower.packed import Order, PackedTower
from tokenprune.integrations.shared.attachable import states
from tokenprune.integrations.shared.packed import PackedRun, PackedUnits
from tokenprune.ops.transfer import to_device
from tokenprune.shapes.decoder import DecoderShape
from tokenprune.sites.units import UnitDropper


class _Key:
    """Under which a thread keeps the grids of the images that it encodes."""


class UnitDrop(PackedTower):
    """Has `method` drop units ahead of the tower of `adapter`'s model, and takes their tokens out of the prompt.

    Raises UnsupportedSetupError for towers without packed patches, BudgetError for a budget that is not one of an image
    by itself, OptionError where colours are needed and no processor tells them.
    """

    leaves = "kept"

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget, processor: Any) -> None:
        super().__init__()
        self.adapter, self.method, self.budget = adapter, method, budget
        self.step = Step(method, budget)
        self.tower, self.key = _tower_of(adapter, method.name), _Key()
        self.unit = self.tower.spatial_merge_size**2
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.colours = _colours(processor)
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

    def before_encode(self, modality: str, arguments: dict[str, Any]) -> None:
        # GLM's towers are handed each frame of a video as an image of its own.
        states()[self.key] = self.adapter.grids(modality, arguments)

    def start(self, pixels: Tensor, grids: list[list[int]], order: Order, device: torch.device) -> PackedRun:
        known = states().pop(self.key, None)  # (frames, height, width) in units of each image or video
        if known is None or sum(map(math.prod, known)) * self.unit != len(pixels):
            side = self.tower.spatial_merge_size
            known = [(t, h // side, w // side) for t, h, w in grids]
        sizes = [math.prod(grid) for grid in known]
        with torch.no_grad():
            images = pixels.split([units * self.unit for units in sizes])
            kept = torch.cat([self._keep(x, grid) for x, grid in zip(images, known, strict=True)]).cpu()
        run = PackedRun(PackedUnits.of(len(kept), self.unit, device), sizes, kept=list(kept.split(sizes)))
        if not bool(kept.all()):
            run.order = order()
            stays = kept if run.order is None else kept[run.order.cpu()]
            run.drops = {0: lambda hidden: stays}
        return run

    def _keep(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Return which units of an image or video stay, bool `[units]`. pixels: `[patches, P]`, unit by unit."""
        (most,) = self.budget.resolve([math.prod(grid)], layer=0, shape=self.shape, text_tokens=0)
        pixels = pixels.float()
        if self.colours is not None:
            mean, std = (to_device(one, pixels.device) for one in self.colours)
            channels = pixels.view(len(pixels), len(std), -1)
            pixels = torch.addcmul(mean[:, None], channels, std[:, None])
        keep = self.method.keep_units(pixels.reshape(*grid, -1), most)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != grid:
            raise TokenPruneError(f"{self.method.name}.keep_units() must return a bool tensor {list(grid)}")
        return keep.flatten()

    # -- after the tower

    def select(self, call: Call, device: torch.device, left: dict[str, list[Tensor]]) -> Selection | None:
        if all(bool(image.all()) for of_images in left.values() for image in of_images):
            return None
        stays = torch.ones_like(call.host.visual)
        for modality, of_images in left.items():
            kept, mask = torch.cat(of_images), call.host.masks[modality]
            numbers = placeholder_to_feature(modality, mask, len(kept))
            stays[mask] = kept[numbers[mask]]
        segments = call.segments.to(device)
        found = to_device(stays, device)[segments.row_index, segments.position] & segments.mask
        return Selection(found, counts=found.sum(1).tolist())


def _tower_of(adapter: Adapter, name: str) -> Any:
    """Return the tower of packed patches; raises UnsupportedSetupError where there is none."""
    family = adapter.config.model_type
    for attribute in ("visual", "vision_model"):
        tower = getattr(adapter.base, attribute, None)
        fits = all(hasattr(tower, part) for part in ("blocks", "merger", "spatial_merge_size"))
        if fits:
            return tower
    raise UnsupportedSetupError(
        f"{name} cannot act in the tower of this {family!r}: it has no blocks, merger and spatial_merge_size; "
        f"{abilities.AFTER_THE_TOWER}"
    )


def _colours(processor: Any) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of each channel by which a processor normalises colours from 0 to 1; None
    where nothing tells."""
    for one in (processor, *(getattr(processor, name, None) for name in ("image_processor", "video_processor"))):
        mean, std = getattr(one, "image_mean", None), getattr(one, "image_std", None)
        if mean is not None and std is not None:
            normalises = getattr(one, "do_normalize", True)
            return (torch.tensor(mean), torch.tensor(std)) if normalises else (torch.zeros(3), torch.ones(3))
    return None
