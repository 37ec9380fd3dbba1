# SPDX-License-Identifier: Apache-2.0
"""Merging inside towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5): which units, see
`integrations.shared.packed_merging`; what becomes of them, packed.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention.observer import Observer
from tokenprune.integrations.hf.encoded.record import record_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.tower.base import TowerPatch
from tokenprune.integrations.hf.tower.packed import Order, PackedTower
from tokenprune.integrations.shared.attachable import states
from tokenprune.integrations.shared.block_merging import Block
from tokenprune.integrations.shared.packed import PackedRun, PackedUnits
from tokenprune.integrations.shared.packed_features import first_of_group
from tokenprune.integrations.shared.packed_merging import PackedMatch
from tokenprune.sites.encoder import EncoderMethod, Matcher, Tower

BLOCKS = frozenset(
    f"{name}VisionBlock" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
)


class PackedTowerPatch(PackedTower, TowerPatch):
    """Merges inside a packed tower of `adapter`'s model, and tells which visual tokens became one.

    Raises UnsupportedSetupError for attention back ends that take no bias.
    """

    uneven = False  # frames lie end to end

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        self.tower = adapter.base.visual
        self.unit = self.tower.spatial_merge_size**2
        blocks = [Block(block, block.norm2, block.mlp) for block in self.tower.blocks]
        # How many units an image has, only the image tells: 1 stands for that.
        super().__init__(adapter, method, budget, blocks, Tower(1, 0, len(blocks), len(blocks), self.tower))
        self.observers = []
        if method.proportional:
            attentions = [block.attn for block in self.tower.blocks]
            self.observers = [Observer(attention, self._bias) for attention in attentions]
        self._check_attention()

    def _check_attention(self) -> None:
        self.check_bias(self.tower.blocks[0].attn.config if not self.observers else self.observers[0].config)

    def _attach(self) -> None:
        super()._attach()
        for observer in self.observers:
            self.attach_part(observer)
        for index, block in enumerate(self.tower.blocks):
            self.hook(block.attn.qkv.register_forward_hook, partial(self._note_qkv, index))

    def _surround(self, index: int, module: nn.Module) -> None:
        # `PackedTower` sees to the beginning of a block.
        self.hook(module.register_forward_hook, self._leave_block, prepend=True)

    def _hook_merger(self, merger: nn.Module) -> None:
        self.hook(merger.register_forward_pre_hook, self._enter_merger)

    def _enter_merger(self, module: nn.Module, args: tuple) -> tuple | None:
        """Hand the rows of all patches to a merger: the model's features then are those of a full grid, to the bit."""
        run = states().get(self)
        return None if run is None else (run.units.full(args[0]), *args[1:])

    def start(self, pixels: Tensor, grids: list[list[int]], order: Order, device: torch.device) -> PackedRun:
        self._check_attention()  # it may have been changed after the patch
        assert self.budget.keep is not None  # see `Merger`
        match = PackedMatch.of(grids, self.unit, self.budget.keep, self._plan_of_frame)
        units = PackedUnits.of(sum(match.sizes), self.unit, device)
        return PackedRun(units, match.sizes, order(), match=match)

    def _plan_of_frame(self, count: int, keep: float | int) -> list[Matcher | None]:
        return self.method.plan(Budget.of_checked(keep), self.shape.of(count))

    # -- after the tower

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor] | None:
        owners = record_of(output).owners
        if owners is None:
            return None
        units = sum(map(len, owners))  # more than there are groups
        return [first_of_group(of_image[None], units)[0] for of_image in owners]

    # -- hooks of the blocks

    def _note_qkv(self, index: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Keep the keys before the rotary embedding, so that units are compared by content and not by place."""
        run = states().get(self)
        if run is not None and run.match.merges_in(index):
            heads = self.tower.blocks[index].attn.num_heads
            run.keys = output.view(len(output), 3, heads, -1)[:, 1].float().mean(1)

    def _bias(self, observation: Any) -> Tensor | None:
        """Return the logarithm of the units' weights, for the next piece that attends to itself."""
        run = states().get(self)
        if run is None or run.units.weight is None:
            return None
        width = observation.key.shape[2]
        if run.start == 0:
            run.bias = run.units.log_weight(observation.key.dtype)
        bias = run.bias[run.start : run.start + width]
        run.start += width
        return bias[None, None, None, :].expand(1, 1, width, width)

    def _merge(self, index: int, module: nn.Module, args: tuple) -> tuple | None:
        run = states().get(self)
        if run is None or not run.match.merges_in(index):
            return None
        if run.keys is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: block {index} of the tower showed no keys: its projections were replaced since "
                "the patch, as an adapter is when it is merged; unpatch, and patch again"
            )
        run.merged = run.merge(index, args[0])
        return None if run.merged is None else (run.merged, *args[1:])
