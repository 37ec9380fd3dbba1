# SPDX-License-Identifier: Apache-2.0
"""Merging inside the vision tower: methods of the site IN_ENCODER that leave exactly what `keep` asks for of an image.

The blocks' own forward runs, with `integrations.shared.reducer` around it, so merged tokens cost neither MLP nor
attention in what is left of the tower. Fused attention takes no bias, so while tokens are merged proportionally, or
rows are padded, the blocks attend by PyTorch's. Everything is attached for one call only.

An image or tile is one row of its tower, all of one size, and its visual tokens are the row's patches (LLaVA-1.5) or
squares of them (pixel shuffle and pooling: Idefics3, SmolVLM, InternVL, Gemma 3), which then merge as wholes; so their
number is known beforehand. Where tiles are cropped after the tower (LLaVA-NeXT, LLaVA-OneVision), each has its goal.
Units leave such rows, at the input of a block, alike. Towers of Qwen: see packed.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.shared.towers.merging import RowMerger
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures, first_of_group
from tokenprune.integrations.shared.towers.parts import PartMatcher
from tokenprune.integrations.shared.towers.parts import Plan as BlockPlan
from tokenprune.integrations.shared.towers.reducer import Block, TowerRun
from tokenprune.integrations.shared.towers.tile_goals import Goal, parts_of_tiles
from tokenprune.integrations.shared.towers.unit_dropping import RowDropper
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.settings.tower_items import goals_of_image, pack
from tokenprune.integrations.vllm.settings.towers import heads_of, merges_in_tower, served_tower, units_of
from tokenprune.integrations.vllm.worker.packed import Wrapping, dropping_plan
from tokenprune.integrations.vllm.worker.tower import all_heads, attend, attentions_of, blocks_of, heads_first
from tokenprune.models.families import tower_kind
from tokenprune.selection.sites.encoder import EncoderMethod, Tower, TowerMethod
from tokenprune.selection.sites.units import UnitDropper

# Names in a block, where they are not those of CLIP and SigLIP: the second norm, and what scales the MLP's output.
_NAMES = {"internvl_vision": ("layernorm_after", "lambda_2"), "intern_vit_6b": ("norm2", "ls2")}


def stretches(plans: Sequence[Plan]) -> list[tuple[int, int]]:
    """Split a call's plans into pieces that the tower treats alike; return (start, end) of each, at least one."""
    pieces, start = [], 0
    if len(plans) < 2:
        return [(0, len(plans))]
    for _, group in groupby(plans, key=_treatment):
        pieces.append((start, start := start + len(list(group))))
    return pieces


def _treatment(plan: Plan) -> Any:
    """Return what is equal for items that one forward of the tower may reduce together."""
    drops, method = dropping_plan(plan), plan.setting.method
    if merging(plan) or (drops and plan.kept is None):
        return plan.setting.to_json()
    late = drops and isinstance(method, UnitDropper) and type(method).block is not UnitDropper.block
    return plan.setting.acting if late else drops  # else at the first block, whatever chose


def merging(plan: Plan) -> bool:
    return plan.reduces and merges_in_tower(plan.setting.method)


class TowerMerger(RowMerger, Wrapping):
    """Merges in the tower of vLLM's `model` between `attach` and `detach`. Afterwards `kept` tells what is left.

    kept: bool, of the patches or units of all images end to end; True for the first of each merged token. left: how
    many these are.
    """

    def __init__(self, model: Any, method: TowerMethod, keep: float | int) -> None:
        layers = blocks_of(model)
        self.heads, self.attentions = heads_of(model.config.vision_config), attentions_of(model)
        self.encoder = next(module for module in model.modules() if any(part is layers for part in module.children()))
        norm, scale = _NAMES.get(tower_kind(model.config) or "", ("layer_norm2", ""))
        blocks = [Block(layer, getattr(layer, norm), layer.mlp, scale=scale) for layer in layers]
        budget, tower = Budget.from_number(keep), served_tower(method, model.config)
        super().__init__(method, budget, blocks, tower, units_of(model.config))
        self.kept: Tensor | None = None
        self.left = 0
        self._entered = torch.Size()  # of what entered the merge of the block that runs

    def _attach(self) -> None:
        super()._attach()
        for index, attention in enumerate(self.attentions):
            self.wrap(attention, "forward", partial(partial, self._attend, index, attention))
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)

    def _attend(self, index: int, attention: Any, fused: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        run = self.state()
        assert run is not None  # the first block made it
        if run.plan[index] is not None:
            run.keys = all_heads(heads_first(key, attention.num_heads), self.heads)
        if run.bias is None:
            return fused(query, key, value)
        return attend(attention, run.bias, query, key, value)

    def _merge(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._entered = args[0].shape
        return super()._merge(index, module, args, kwargs)

    def _leave_branch(self, block: Block, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        # SigLIP adds the tokens before the merge to it in place.
        return None if super()._leave_branch(block, module, args, output) is None else output.new_zeros(self._entered)

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        run = self.end()
        assert run is not None  # the blocks ran
        owners = run.units.owner
        if self.squares is None:
            first = first_of_group(owners[:, self.shape.protected :], owners.shape[1])
        else:
            first = self.squares.owners(owners)
        self._note_left(run, first)
        return run.units.full(output)

    def _note_left(self, run: TowerRun, first: Tensor) -> None:
        """Set `kept` and `left`. first: long `[rows, patches or units]`, for each the first of those that it is one
        with."""
        if self.squares is None:
            left = [count - self.shape.protected for count in run.units.left]
        else:
            left = self.squares.left(run.units.left) or []
        self.left += sum(left)
        self.kept = (first == torch.arange(first.shape[1], device=first.device)).flatten()


class TileDropping(RowDropper, TowerMerger):
    """Drops units in such a tower. plans: of the items of one call, in the order of its rows."""

    def __init__(self, model: Any, plans: Sequence[Plan]) -> None:
        self.plans, setting = plans, plans[0].setting
        assert isinstance(setting.acting, UnitDropper)  # see `dropping_plan`
        super().__init__(model, setting.acting, setting.keep)

    def most(self, rows: int, shape: Tower) -> list[int]:
        if [count for plan in self.plans for count in plan.counts] != [shape.patches] * rows:
            raise PlaceholderMismatchError(f"the tower got {rows} rows of {shape.patches} units, others than planned")
        return [keep for plan in self.plans for keep in plan.keep]


class TileTowerMerger(TowerMerger):
    """Merges so that each image, of however many tiles, is left with what its plan says, as on the Hugging Face side
    (see `integrations.shared.tile_goals`).

    plans: of the images, with one setting. kwargs: arguments of `embed_multimodal`.
    """

    def __init__(self, model: Any, method: EncoderMethod, plans: Sequence[Plan], kwargs: Mapping[str, Any]) -> None:
        super().__init__(model, method, plans[0].setting.keep)
        self.goals: list[Goal] = []
        self.packed: list[tuple[int, PackedFeatures]] = []  # of each image, with its number of tiles
        for plan, tiles, size in zip(plans, kwargs["pixel_values"], kwargs["image_sizes"], strict=True):
            count, shape = len(tiles), torch.as_tensor(size, device="cpu")
            packed = pack(type(model), model.config, shape, count, self.shape.patches)
            self.packed.append((count, packed))
            self.goals += goals_of_image(packed, count, sum(plan.keep), plan.setting, model.config)
        self._parts: PartMatcher | None = None

    def plan_of(self, rows: int, count: int) -> BlockPlan:
        if rows != len(self.goals):
            raise PlaceholderMismatchError(f"the tower got {rows} tiles of images that have {len(self.goals)}")
        self._parts = parts_of_tiles(self.goals, self.shape, partial(self.method.plan, self.budget))
        return self._parts.plan(len(self.blocks))

    def _note_left(self, run: TowerRun, first: Tensor) -> None:
        assert self._parts is not None  # `plan_of` made it
        self.left = sum(self._parts.left[::2])  # of each tile what is shown, then what is cropped
        kept, sizes = [], [count for count, _ in self.packed]
        for tiles, (_, packed) in zip(first.split(sizes), self.packed, strict=True):
            (image,) = packed.images
            found = packed.follow(tiles, image)
            kept.append(found == torch.arange(len(found), device=found.device))
            self.left += len(image) - int((packed.numbers(image) >= 0).sum())  # newlines stay
        self.kept = torch.cat(kept)
