# SPDX-License-Identifier: Apache-2.0
"""Merge or drop units inside towers with one image or tile per row.

All rows of a tower have the same size. A visual token is a patch (LLaVA-1.5) or a square of patches (pixel shuffle and
pooling: Idefics3, SmolVLM, InternVL, Gemma 3); squares merge patch by patch. So the number of kept tokens is known
before the tower runs. If tiles are cropped after the tower (LLaVA-NeXT, LLaVA-OneVision), each tile has a goal.

Fused attention does not take a bias, so attention runs in PyTorch while merged tokens are weighed or rows are padded.
The hooks are removed after each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures, find_first_of_group
from tokenprune.integrations.shared.towers.parts import PartMatcher
from tokenprune.integrations.shared.towers.reducer import TowerReducer
from tokenprune.integrations.shared.towers.rows import RowLayout, TileLayout
from tokenprune.integrations.shared.towers.run import Block
from tokenprune.integrations.shared.towers.tile_goals import Goal
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.settings.tower_items import crops, goals_of_image, pack
from tokenprune.integrations.vllm.settings.towers import depth_of, heads_of, merges_in_tower, served_tower, units_of
from tokenprune.integrations.vllm.worker.tower import (
    attend,
    find_attentions,
    find_tower_blocks,
    gather_heads,
    move_heads_first,
)
from tokenprune.integrations.vllm.worker.tower_packed import ForwardHost, is_dropping
from tokenprune.models.families import get_tower_type
from tokenprune.selection.sites.encoder import Tower, TowerMethod
from tokenprune.selection.sites.units import UnitDropper

# Names of the second norm and of the scale of the MLP's output, in blocks other than those of CLIP and SigLIP.
_NAMES = {"internvl_vision": ("layernorm_after", "lambda_2"), "intern_vit_6b": ("norm2", "ls2")}


def split_plans(config: Any, plans: Sequence[Plan]) -> list[tuple[int, int]]:
    """Split the plans of a call into runs that the tower treats in the same way. Return (start, end) of each run."""
    runs, start = [], 0
    if len(plans) < 2:
        return [(0, len(plans))]
    for _, group in groupby(plans, key=partial(_get_treatment, config)):
        runs.append((start, start := start + len(list(group))))
    return runs


def _get_treatment(config: Any, plan: Plan) -> Any:
    """Return a key that is equal for items that one forward of the tower may reduce together."""
    drops, method = is_dropping(plan), plan.setting.method
    if is_merging(plan) or (drops and plan.kept is None):
        return plan.setting.to_json()
    if drops and isinstance(method, UnitDropper) and method.block(depth_of(config.vision_config)):
        return get_method(plan.setting)
    return drops  # at the first block, units of different methods can be dropped together


def is_merging(plan: Plan) -> bool:
    """Return True if the tower merges units of an item."""
    return plan.reduces and merges_in_tower(plan.setting.method)


class ServedRowTower(Attachable):
    """Merges or drops units in the tower of a vLLM model while it is attached.

    Attributes:
        plans: Plans of the items of one call, in the order of the tower's rows. One forward treats them alike.
        kept: After a forward, mask of the kept units of all items; True for the first unit of each merged group.
        num_kept: Number of kept units.
    """

    def __init__(self, model: Any, method: TowerMethod, plans: Sequence[Plan], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.plans, layers = plans, find_tower_blocks(model)
        self.heads, self.attentions = heads_of(model.config.vision_config), find_attentions(model)
        self.encoder = next(module for module in model.modules() if any(part is layers for part in module.children()))
        norm, scale = _NAMES.get(get_tower_type(model.config) or "", ("layer_norm2", ""))
        blocks = [Block(layer, getattr(layer, norm), layer.mlp, scale=scale) for layer in layers]
        budget, shape = plans[0].setting.budget, served_tower(method, model.config)
        squares = units_of(model.config)
        self.packed: list[tuple[int, PackedFeatures]] = []  # number of tiles and ids of each image
        if crops(model.config) and not isinstance(method, UnitDropper):
            self.layout: RowLayout = TileLayout(method, budget, blocks, shape, squares, self._take_goals)
            self.goals = self._find_goals(model, kwargs)
        else:
            self.layout = RowLayout(method, budget, blocks, shape, squares, num_kept=self._num_kept)
        self.reducer = TowerReducer(self.layout, ForwardHost(adds_in_place=True))  # SigLIP does
        self.kept: Tensor | None = None
        self.num_kept = 0

    def _attach(self) -> None:
        self.attach_part(self.reducer)
        for index, attention in enumerate(self.attentions):
            self.wrap(attention, "forward", partial(partial, self._attend, index, attention))
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)

    # -- kept units per row

    def _num_kept(self, rows: int, shape: Tower) -> Sequence[int]:
        if [count for plan in self.plans for count in plan.counts] != [shape.patches] * rows:
            raise PlaceholderMismatchError(
                f"The tower got {rows} rows of {shape.patches} units, which the plans do not match."
            )
        return [keep for plan in self.plans for keep in plan.keep]

    def _find_goals(self, model: Any, kwargs: Mapping[str, Any]) -> list[Goal]:
        """Return the goals of all tiles, from the plans of their images. `kwargs` are those of `embed_multimodal`."""
        goals: list[Goal] = []
        for plan, tiles, size in zip(self.plans, kwargs["pixel_values"], kwargs["image_sizes"], strict=True):
            count, shape = len(tiles), torch.as_tensor(size, device="cpu")
            packed = pack(type(model), model.config, shape, count, self.layout.shape.patches)
            self.packed.append((count, packed))
            goals += goals_of_image(packed, count, sum(plan.keep), plan.setting, model.config)
        return goals

    def _take_goals(self, rows: int) -> Sequence[Goal]:
        if rows != len(self.goals):
            raise PlaceholderMismatchError(f"The tower got {rows} tiles, but the images have {len(self.goals)}.")
        return self.goals

    # -- hooks

    def _attend(self, index: int, attention: Any, fused: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        run = self.reducer.get_run()
        assert run is not None  # the first block made it
        if run.plan[index] is not None:
            run.keys = gather_heads(move_heads_first(key, attention.num_heads), self.heads)
        if run.bias is None:
            return fused(query, key, value)
        return attend(attention, run.bias, query, key, value)

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        run = self.reducer.pop_run()
        assert run is not None  # the blocks ran
        owners, squares, protected = run.units.owner, self.layout.squares, self.layout.shape.protected
        if squares is None:
            first = find_first_of_group(owners[:, protected:], owners.shape[1])
            num_units = [count - protected for count in run.units.num_units]
        else:
            first = squares.find_unit_owners(owners)
            num_units = squares.to_unit_counts(run.units.num_units) or []
        if run.parts is not None:
            self._record_tiles(run.parts, first)
        else:
            self.num_kept += sum(num_units)
            self.kept = (first == torch.arange(first.shape[1], device=first.device)).flatten()
        return run.units.expand(output)

    def _record_tiles(self, parts: PartMatcher, first: Tensor) -> None:
        """Set `kept` and `left` of images that are split into tiles.

        Args:
            parts: State of the matcher at the end of the tower.
            first: Index of the first patch in the group of each patch, long `[tiles, patches]`.
        """
        self.num_kept = sum(parts.num_units[::2])  # parts alternate: shown patches of a tile, cropped patches
        kept, sizes = [], [count for count, _ in self.packed]
        for tiles, (_, packed) in zip(first.split(sizes), self.packed, strict=True):
            (image,) = packed.images
            first_of_group = packed.map_groups(tiles, image)
            kept.append(first_of_group == torch.arange(len(first_of_group), device=first_of_group.device))
            self.num_kept += len(image) - int((packed.get_feature_ids(image) >= 0).sum())  # newlines stay
        self.kept = torch.cat(kept)
