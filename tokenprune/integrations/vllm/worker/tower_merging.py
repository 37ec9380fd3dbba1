# SPDX-License-Identifier: Apache-2.0
"""Merging inside the vision tower: methods of the site IN_ENCODER that leave exactly what `keep` asks for of an image.

The blocks' own forward runs, with the hooks of `integrations.shared.block_merging` around it, so merged tokens cost
neither MLP nor attention in what is left of the tower. Fused attention takes no bias, so while tokens are merged
proportionally, or rows are padded, the blocks attend by PyTorch's. Everything is attached for one call only.

An image or tile is one row of its tower, all of one size, and its visual tokens are the row's patches (LLaVA-1.5) or
squares of them (pixel shuffle and pooling: Idefics3, SmolVLM, InternVL, Gemma 3), which then merge as wholes; so their
number is known beforehand. Towers of Qwen: see packed_merging.py; tiles that are cropped after the tower (LLaVA-NeXT,
LLaVA-OneVision): tile_merging.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.families import tower_kind
from tokenprune.integrations.shared.block_merging import Block, Merger, Merging
from tokenprune.integrations.shared.packed_features import first_of_group
from tokenprune.integrations.vllm.setting.plan import Plan
from tokenprune.integrations.vllm.setting.towers import heads_of, merges_in_tower, served_tower, units_of
from tokenprune.integrations.vllm.worker.packed import dropping
from tokenprune.integrations.vllm.worker.tower import all_heads, attentions_of, blocks_of, heads_first
from tokenprune.sites.encoder import EncoderMethod

# Names in a block, where they are not those of CLIP and SigLIP: the second norm, and what scales the MLP's output.
_NAMES = {"internvl_vision": ("layernorm_after", "lambda_2"), "intern_vit_6b": ("norm2", "ls2")}


def stretches(plans: Sequence[Plan]) -> list[tuple[int, int]]:
    """Split a call's plans into pieces that the tower treats alike; return (start, end) of each, at least one."""
    pieces, start = [], 0
    for _, group in groupby(plans, key=lambda plan: plan.setting.as_dict() if merging(plan) else dropping(plan)):
        pieces.append((start, start := start + len(list(group))))
    return pieces or [(0, 0)]


def merging(plan: Plan) -> bool:
    return plan.reduces and merges_in_tower(plan.setting.method)


class TowerMerger(Merger):
    """Merges in the tower of vLLM's `model` between `attach` and `detach`. Afterwards `kept` tells what is left.

    kept: bool, of the patches or units of all images end to end; True for the first of each merged token. left: how
    many these are.
    """

    def __init__(self, model: Any, method: EncoderMethod, keep: float | int) -> None:
        layers = blocks_of(model)
        self.heads, self.attentions = heads_of(model.config.vision_config), attentions_of(model)
        self.encoder = next(module for module in model.modules() if any(part is layers for part in module.children()))
        norm, scale = _NAMES.get(tower_kind(model.config) or "", ("layer_norm2", ""))
        blocks = [Block(layer, getattr(layer, norm), layer.mlp, scale=scale) for layer in layers]
        budget, tower = Budget.of_checked(keep), served_tower(method, model.config)
        super().__init__(method, budget, blocks, tower, units_of(model.config))
        self.kept: Tensor | None = None
        self.left = 0
        self._bias: Tensor | None = None
        self._entered = torch.Size()  # of what entered the merge of the block that runs

    def _attach(self) -> None:
        super()._attach()
        for index, attention in enumerate(self.attentions):
            self.wrap(attention, "forward", partial(partial, self._attend, index, attention))
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)

    def _surround(self, index: int, module: nn.Module) -> None:
        # No hooks: vLLM calls the forward of InternViT's blocks by itself.
        self.wrap(module, "forward", partial(partial, self._run_block, index, module))

    def _run_block(self, index: int, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self._enter_block(index, module, args, kwargs)
        output = forward(*args, **kwargs)
        merged = self._leave_block(module, args, output)
        return output if merged is None else merged

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._bias = None
        return super()._enter_block(index, module, args, kwargs)

    def _with_bias(self, index: int, bias: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        self._bias = bias  # the block has no argument for it

    def _attend(self, index: int, attention: Any, fused: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (heads_first(x, attention.num_heads) for x in (query, key, value))
        self.note_keys(index, all_heads(k, self.heads))
        if self._bias is None:
            return fused(query, key, value)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self._bias, scale=attention.scale)
        return out.transpose(1, 2).reshape(query.shape)

    def _merge(self, index: int, module: nn.Module, args: tuple) -> tuple | None:
        self._entered = args[0].shape
        return super()._merge(index, module, args)

    def _leave_branch(self, block: Block, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        # SigLIP adds the tokens before the merge to it in place.
        return None if super()._leave_branch(block, module, args, output) is None else output.new_zeros(self._entered)

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        state = self.end()
        assert state is not None  # the blocks ran
        owners = state.owners[-1]
        if self.units is None:
            first = first_of_group(owners[:, self.shape.protected :], owners.shape[1])
        else:
            first = self.units.owners(owners)
        self._note_left(state, first)
        return state.restore(output)

    def _note_left(self, state: Merging, first: Tensor) -> None:
        """Set `kept` and `left`. first: long `[rows, patches or units]`, for each the first of those that it is one
        with."""
        if self.units is None:
            left = [count - self.shape.protected for count in state.left]
        else:
            left = self.units.left(state.left) or []
        self.left += sum(left)
        self.kept = (first == torch.arange(first.shape[1], device=first.device)).flatten()
