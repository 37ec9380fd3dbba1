# SPDX-License-Identifier: Apache-2.0
"""Merging inside the vision towers of Qwen2-VL to Qwen3.5, which lay the patches of a call's images end to end.

`integrations.shared.packed_merging` does the merging, as on the Hugging Face side. This module wraps vLLM's blocks: a
block gets borders and rotary places of the units that are left, its second norm the merged patches,
and the merger's output the length that the model cuts it by. Fused attention takes no bias, so proportional attention
behind the first merge is PyTorch's, piece by piece. Everything is attached for one call only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.packed_features import first_of_group
from tokenprune.integrations.shared.packed_merging import PackedUnits, mean_of_groups
from tokenprune.integrations.vllm.setting.towers import served_tower
from tokenprune.integrations.vllm.worker.tower import all_heads, attentions_of, heads_first
from tokenprune.integrations.vllm.worker.unit_dropping import check_lengths, longest
from tokenprune.sites.encoder import EncoderMethod, Matcher


class PackedTowerMerger(Attachable):
    """Merges in the tower of vLLM's `model` between `attach` and `detach`. Afterwards `kept` tells what is left.

    kept: bool, of the units of all images and videos end to end; True for the first of each merged one. left: how
    many these are.
    """

    def __init__(self, model: Any, method: EncoderMethod, keep: float | int) -> None:
        super().__init__()
        self.tower, self.attentions = model.visual, attentions_of(model)
        self.method, self.keep, self.shape = method, keep, served_tower(method, model.config)
        self.heads: int = self.tower.num_heads
        self.kept: Tensor | None = None
        self.left = 0
        self._packed: PackedUnits | None = None
        self._order: Tensor | None = None
        self._width = 0  # of the features that enter the language model

    def _attach(self) -> None:
        # No hooks of modules: vLLM calls the forward of some by itself.
        self.wrap(self.tower, "prepare_encoder_metadata", self._describe)
        for index, (block, attention) in enumerate(zip(self.tower.blocks, self.attentions, strict=True)):
            self.wrap(block, "forward", partial(partial, self._run_block))
            self.wrap(block.attn.qkv, "forward", partial(partial, self._note_keys, index))
            self.wrap(attention, "forward", partial(partial, self._attend, attention))
            self.wrap(block.norm2, "forward", partial(partial, self._merge, index))
            self.wrap(block.mlp, "forward", partial(partial, self._run_branch))
        for merger in getattr(self.tower, "deepstack_merger_list", ()):
            self.wrap(merger, "forward", partial(partial, self._show))
        self.wrap(self.tower.merger, "forward", partial(partial, self._leave))
        self.wrap(self.tower, "forward", partial(partial, self._encode))

    def _describe(self, prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def describe(grid_thw: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            known = prepare(grid_thw, *args, **kwargs)
            check_lengths(known, f"{self.method.name} does not merge in")
            self._order = known.get("window_index")  # Qwen2.5-VL: units stand window by window
            grids = torch.as_tensor(grid_thw, device="cpu").tolist()
            device, unit = known["rotary_pos_emb_cos"].device, self.tower.spatial_merge_size**2
            self._packed = PackedUnits.of(grids, unit, self.keep, self._plan, device)
            return known

        return describe

    @property
    def _state(self) -> PackedUnits:
        assert self._packed is not None  # `_describe` makes it, before the first block
        return self._packed

    def _plan(self, count: int, keep: float | int) -> list[Matcher | None]:
        return self.method.plan(Budget.of_checked(keep), self.shape.of(count))

    def _run_block(self, forward: Any, x: Tensor, **known: Any) -> Tensor:
        state = self._state
        state.enter()
        if state.size is not None:
            borders = state.lengths(known["cu_seqlens"])
            changed = {"cu_seqlens": borders, "max_seqlen": longest(known.get("max_seqlen"), borders)}
            changed |= {name: state.gathered(known[name]) for name in ("rotary_pos_emb_cos", "rotary_pos_emb_sin")}
            known |= changed
        output = forward(x, **known)
        return output if state.output is None else state.output

    def _note_keys(self, index: int, forward: Any, x: Tensor) -> Any:
        """Note the keys before the rotary embedding, so that units are compared by content, not by place."""
        output = forward(x)
        if self._state.merges_in(index):
            attention, qkv = self.tower.blocks[index].attn, output[0] if isinstance(output, tuple) else output
            if hasattr(attention, "split_qkv"):  # Qwen2-VL, whose weights may be cut anywhere between devices
                keys = attention.split_qkv(qkv)[1].flatten(0, 1)
            else:
                keys = qkv.view(len(qkv), 3, attention.num_attention_heads_per_partition, -1)[:, 1]
            self._state.keys = all_heads(keys, self.heads).float().mean(1)
        return output

    def _attend(
        self, attention: Any, fused: Any, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor,
        **rest: Any,
    ) -> Tensor:  # fmt: skip
        bias = self._state.bias(query.dtype) if self.method.proportional else None
        if bias is None:
            return fused(query=query, key=key, value=value, cu_seqlens=cu_seqlens, **rest)
        sizes = cu_seqlens.diff().tolist()
        pieces = (heads_first(x, attention.num_heads).split(sizes, dim=2) for x in (query, key, value))
        out = [
            nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=attention.scale)
            for q, k, v, added in zip(*pieces, bias[None, None, None].split(sizes, dim=3), strict=True)
        ]
        return torch.cat(out, dim=2).transpose(1, 2).reshape(query.shape)

    def _merge(self, index: int, forward: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        state = self._state
        added = {} if residual is None else {"residual": residual}  # Qwen2.5-VL's norm adds it, and hands on the sum
        merged = None
        if state.keys is not None:
            merged = state.merge(index, (x if residual is None else x + residual).flatten(0, -2))
        if merged is None:
            return forward(x, **added)
        merged = merged.unsqueeze(1)  # [patches, 1, D]
        if residual is not None:
            return forward(merged, residual=torch.zeros_like(merged))
        state.merged = merged
        return forward(merged)

    def _run_branch(self, forward: Any, x: Tensor) -> Tensor:
        state, output = self._state, forward(x)
        if state.merged is None:
            return output
        state.output, state.merged = state.merged + output, None
        return output.new_zeros(1)  # for the block to add to the patches before the merge

    def _show(self, forward: Any, x: Tensor) -> Tensor:
        """Return features for a deeper layer: each unit that entered gets those of the unit it is part of so far."""
        return forward(x)[self._state.owner]

    def _leave(self, forward: Any, x: Tensor) -> Tensor:
        """Return the merger's rows: each unit that entered gets the row of the unit it is part of."""
        rows = forward(x)[self._state.owner]
        self._width = rows.shape[1]
        return rows

    def _encode(self, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Note the units that are left, and average the features for deeper layers over each merged unit."""
        rows = forward(*args, **kwargs)
        state, self._packed = self._state, None
        owners = state.owners_by_rows(self._order)
        firsts = [first_of_group(owner[None], len(state.owner))[0] for owner in owners]
        self.left += sum(state.left)
        self.kept = torch.cat([first == torch.arange(len(first), device=first.device) for first in firsts])
        deeper = rows[:, self._width :]
        if not deeper.shape[1]:
            return rows
        return torch.cat([rows[:, : self._width], mean_of_groups(deeper, torch.cat(owners))], dim=1)
