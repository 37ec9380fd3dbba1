# SPDX-License-Identifier: Apache-2.0
"""Towers of transformers that pack the patches of all images into one sequence, made to run on the units that are left
(see `integrations.shared.reducer`), and merging inside those of Qwen2-VL to Qwen3.5, or dropping by keys inside any."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.sequence.record import record_of
from tokenprune.integrations.hf.towers.base import GroupedTokens, ThreadKey, TowerPatch
from tokenprune.integrations.shared.attachable import hidden_states, states
from tokenprune.integrations.shared.towers.merging import PackedMerger, firsts
from tokenprune.integrations.shared.towers.reducer import TowerReducer, TowerRun, packed_blocks
from tokenprune.integrations.shared.towers.unit_dropping import Grids
from tokenprune.integrations.shared.towers.units import mean_of_groups
from tokenprune.selection.sites.encoder import EncoderMethod, Tower

Order = Callable[[], Tensor | None]


def tower_of(adapter: Adapter) -> Any:
    """Return the tower of packed patches, which families with `tower_rows="all images"` have."""
    towers = (getattr(adapter.base, name, None) for name in ("visual", "vision_model"))
    return next(tower for tower in towers if hasattr(tower, "merger"))


class PackedTower(TowerReducer, GroupedTokens):
    """Has the blocks of `tower` run on the units that are left. A subclass says in `start` which leave.

    patches: that become one visual token. fills: whether a merger gets rows of all units, or brings these back.
    """

    tower: Any
    patches: int
    fills = False

    def find_tower(self, adapter: Adapter) -> None:
        """Note the tower of a model."""
        self.tower, self.key = tower_of(adapter), ThreadKey()  # of grids
        self.patches = self.tower.spatial_merge_size**2

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        # GLM's towers are handed each frame of a video as an image of its own.
        states()[self.key] = self.adapter.grids(encoding.modality, encoding.on_host)
        try:
            return encode(encoding)
        finally:
            states().pop(self.key, None)

    def _attach(self) -> None:
        super()._attach()
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        for merger in (self.tower.merger, *getattr(self.tower, "deepstack_merger_list", ())):
            if self.fills:
                self.hook(merger.register_forward_pre_hook, self._enter_merger)
            else:
                self.hook(merger.register_forward_hook, self._leave_merger)

    def start(self, pixels: Tensor, grids: Grids, order: Order, device: torch.device) -> TowerRun:
        """Return the state of a forward that begins. pixels: `[patches, P]` of all images or videos; grids: (frames,
        height, width) in units of each; order: returns that of `TowerRun`; device: of the units."""
        raise NotImplementedError

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        order = partial(self._order, grids, kwargs.get("window_index"))
        pixels, weight = hidden_states(args, kwargs), next(self.tower.merger.parameters())
        device = pixels.device if weight.is_meta else weight.device  # that of offloaded weights is not known yet
        known = states().pop(self.key, None)
        if known is None or sum(map(math.prod, known)) * self.patches != len(pixels):
            side = self.tower.spatial_merge_size
            known = [(t, h // side, w // side) for t, h, w in torch.as_tensor(grids, device="cpu").tolist()]
        states()[self] = self.start(pixels, known, order, device)

    def _order(self, grids: Tensor, known: Tensor | None) -> Tensor | None:
        if known is not None or not hasattr(self.tower, "window_size"):
            return known
        return compat.window_order(self.tower, grids)  # its units stand window by window

    def _enter_merger(self, module: nn.Module, args: tuple) -> tuple | None:
        run = states().get(self)
        return (run.units.full(args[0]), *args[1:]) if run is not None and run.acts else None

    def _leave_merger(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        run = states().get(self)
        return run.units.full(output) if run is not None and run.acts else None

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self.end()
        assert run is not None  # `_enter_tower` made it
        counts = [left for (left,) in run.counts] or run.units.left * len(self.blocks)
        owners = run.owners() if self.leaves == "groups" else None
        self.leave_tokens(output, [count * self.patches for count in counts], owners, run.kept)
        if run.acts:
            output.last_hidden_state = run.units.full(output.last_hidden_state)
            run.restore_states(output)
        features = getattr(output, "deepstack_features", None)
        if owners and features and self.merges:  # of blocks at which not all members of a group were one yet
            output.deepstack_features = [mean_of_groups(x, torch.cat(owners)) for x in features]
        return output


class PackedTowerPatch(PackedMerger, PackedTower, TowerPatch):
    """Merges inside a packed tower of `adapter`'s model, and tells which visual tokens became one.

    Raises UnsupportedSetupError for attention back ends that take no bias.
    """

    uneven = False  # frames lie end to end
    fills = True  # the model's features then are those of a full grid, to the bit

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        self.find_tower(adapter)
        blocks = packed_blocks(self.tower)
        # How many units an image has, only the image tells: 1 stands for that.
        super().__init__(method, budget, blocks, Tower(1, 0, len(blocks), len(blocks), self.tower))
        self.observers = []
        if method.proportional:
            self.observers = [Observer(block.attn, self._bias) for block in self.tower.blocks]
        self.belong(adapter, method, budget)
        self.merges = not method.drops
        self._check_attention()

    def _check_attention(self) -> None:
        self.check_bias(self.tower.blocks[0].attn.config if not self.observers else self.observers[0].config)

    def _attach(self) -> None:
        super()._attach()
        for observer in self.observers:
            self.attach_part(observer)
        for index, block in enumerate(self.tower.blocks):
            shown = getattr(block.attn, "qkv", None) or block.attn.k
            self.hook(shown.register_forward_hook, partial(self._note_keys, index))

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        return TowerPatch.around_encode(self, partial(PackedTower.around_encode, self, encode), encoding)

    def start(self, pixels: Tensor, grids: Grids, order: Order, device: torch.device) -> TowerRun:
        self._check_attention()  # it may have been changed after the patch
        return self.begin(grids, order(), device)

    # -- after the tower

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor] | None:
        owners = record_of(output).owners
        return None if owners is None else firsts(list(owners))

    # -- hooks of the blocks

    def _note_keys(self, index: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Keep the keys before the rotary embedding, so that units are compared by content and not by place."""
        run = states().get(self)
        if run is not None and run.plan[index] is not None:
            attention = self.tower.blocks[index].attn
            heads, first = output.view(len(output), -1, attention.head_dim), attention.num_heads
            # Keys, which may have fewer heads, stand between queries and values, or have a projection of their own.
            keys = heads[:, first : (first + heads.shape[1]) // 2] if hasattr(attention, "qkv") else heads
            run.keys = keys.float().mean(1)

    def _bias(self, observation: Any) -> Tensor | None:
        """Return the logarithm of the units' weights, for the next piece that attends to itself."""
        run = states().get(self)
        if run is None or run.bias is None:
            return None
        width = observation.key.shape[2]
        bias, run.bias = run.bias[..., :width], run.bias[..., width:]
        return bias.to(observation.key.dtype).expand(1, 1, width, width)
