# SPDX-License-Identifier: Apache-2.0
"""Merging inside towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5): which units, and
how, see `integrations.shared.packed_merging`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.attention.observer import Observer
from tokenprune.integrations.hf.encoded.record import record_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.tower.base import TowerPatch
from tokenprune.integrations.shared.attachable import hidden_states, states
from tokenprune.integrations.shared.block_merging import Block, check_checkpointing
from tokenprune.integrations.shared.packed_features import first_of_group
from tokenprune.integrations.shared.packed_merging import PackedUnits, mean_of_groups
from tokenprune.sites.encoder import EncoderMethod, Matcher, Tower

BLOCKS = frozenset(
    f"{name}VisionBlock" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
)


class PackedTowerPatch(TowerPatch):
    """Merges inside a packed tower of `adapter`'s model, and tells which visual tokens became one.

    Raises UnsupportedSetupError for attention back ends that take no bias.
    """

    uneven = False  # frames lie end to end

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        self.tower = adapter.base.visual
        self.unit = self.tower.spatial_merge_size**2  # patches that become one visual token
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
        for merger in (self.tower.merger, *getattr(self.tower, "deepstack_merger_list", ())):
            self.hook(merger.register_forward_pre_hook, self._enter_merger)
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.tower.register_forward_hook, self._leave_tower, with_kwargs=True)

    # -- the tower's outside contract

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._check_attention()  # it may have been changed after the patch
        self.end()
        grids = (kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]).tolist()
        pixels, weight = args[0] if args else kwargs["hidden_states"], next(self.tower.merger.parameters())
        device = pixels.device if weight.is_meta else weight.device  # that of offloaded weights is not known yet
        assert self.budget.keep is not None  # see `Merger`
        states()[self] = PackedUnits.of(grids, self.unit, self.budget.keep, self._plan_of_frame, device)

    def packed(self) -> PackedUnits | None:
        """Return this thread's state, which is another than that of towers whose images have rows of their own."""
        return states().get(self)

    def _plan_of_frame(self, count: int, keep: float | int) -> list[Matcher | None]:
        return self.method.plan(*self._asked(count, keep))

    def _asked(self, count: int, keep: float | int) -> tuple[Budget, Tower]:
        return Budget.of_checked(keep), self.shape.of(count)

    def _enter_merger(self, module: nn.Module, args: tuple) -> tuple | None:
        """Hand the full grid to a merger, which reads the blocks' output."""
        state = self.packed()
        return None if state is None else (state.restore(args[0], state.owner), *args[1:])

    def _leave_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        state = self.packed()
        self.end()
        if isinstance(output, tuple):
            raise UnsupportedSetupError(f"{self.method.name}: the tower must return an output object; use return_dict")
        assert state is not None  # see `_enter_tower`
        output.last_hidden_state = state.restore(output.last_hidden_state, state.owner)
        if getattr(output, "hidden_states", None) is not None:
            stages = zip(output.hidden_states, [*state.owners, state.owner], strict=True)
            output.hidden_states = tuple(state.restore(x, owner) for x, owner in stages)
        # Units of a tower of windows stand in the order of windows, its output in that of rows.
        order = window_order(self.tower, args, kwargs) if hasattr(self.tower, "window_size") else None
        owners = state.owners_by_rows(order)
        self.leave_tokens(output, owners, [count * self.unit for count in state.counts])
        features = getattr(output, "deepstack_features", None)
        if features:  # of blocks at which not all members of a group were one yet
            output.deepstack_features = [mean_of_groups(x, torch.cat(owners)) for x in features]
        return output

    # -- after the tower

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor] | None:
        owners = record_of(output).owners
        if owners is None:
            return None
        units = sum(map(len, owners))  # more than there are groups
        return [first_of_group(of_image[None], units)[0] for of_image in owners]

    # -- hooks of the blocks

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        state = self.packed()
        if state is None:
            return None
        check_checkpointing(module, hidden_states(args, kwargs))
        state.enter()
        if state.size is None:
            return None
        lengths = state.lengths(kwargs["cu_seqlens"])
        changed: dict[str, Any] = {"cu_seqlens": lengths}
        if kwargs.get("max_seqlen") is not None:
            longest = lengths.diff().max()
            changed["max_seqlen"] = longest if isinstance(kwargs["max_seqlen"], Tensor) else int(longest)
        places = kwargs["position_embeddings"]
        changed["position_embeddings"] = tuple(state.gathered(x) for x in places)
        return args, kwargs | changed

    def _note_qkv(self, index: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Keep the keys before the rotary embedding, so that units are compared by content and not by place."""
        state = self.packed()
        if state is not None and state.merges_in(index):
            heads = self.tower.blocks[index].attn.num_heads
            state.keys = output.view(len(output), 3, heads, -1)[:, 1].float().mean(1)

    def _bias(self, observation: Any) -> Tensor | None:
        """Return the logarithm of the units' sizes, for the next piece that attends to itself."""
        state = self.packed()
        if state is None or state.size is None:
            return None
        width = observation.key.shape[2]
        if state.start == 0:
            state.memo["bias"] = state.bias(observation.key.dtype)
        bias = state.memo["bias"][state.start : state.start + width]
        state.start += width
        return bias[None, None, None, :].expand(1, 1, width, width)

    def _merge(self, index: int, module: nn.Module, args: tuple) -> tuple | None:
        state = self.packed()
        if state is None or not state.merges_in(index):
            return None
        if state.keys is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: block {index} of the tower showed no keys: its projections were replaced since "
                "the patch, as an adapter is when it is merged; unpatch, and patch again"
            )
        state.merged = state.merge(index, args[0])
        return None if state.merged is None else (state.merged, *args[1:])


def window_order(tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return long `[N]`, the units of all images in the order in which a tower of windows, called with these arguments,
    lines them up."""
    if kwargs.get("window_index") is not None:
        return kwargs["window_index"]
    return compat.window_order(tower, kwargs["grid_thw"] if "grid_thw" in kwargs else args[1])
