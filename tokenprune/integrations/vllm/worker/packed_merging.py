# SPDX-License-Identifier: Apache-2.0
"""Worker: merging inside the vision towers of Qwen2-VL to Qwen3.5, which lay the patches of a call's images end to end.

Which units merge, `integrations.shared.packed_merging` finds, as on the Hugging Face side; for the rest see packed.py.
A block's second norm gets the merged patches. Fused attention takes no bias, so proportional attention after the first
merge is PyTorch's, piece by piece.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.integrations.shared.packed import PackedRun, PackedUnits
from tokenprune.integrations.shared.packed_features import first_of_group
from tokenprune.integrations.shared.packed_merging import PackedMatch, mean_of_groups
from tokenprune.integrations.vllm.setting.towers import served_tower
from tokenprune.integrations.vllm.worker.packed import WrappedTower
from tokenprune.integrations.vllm.worker.tower import all_heads, attentions_of, heads_first
from tokenprune.sites.encoder import EncoderMethod, Matcher


class PackedTowerMerger(WrappedTower):
    """Merges in the tower of vLLM's `model` between `attach` and `detach`. Afterwards `kept` tells what is left.

    kept: bool, of the units of all images and videos end to end; True for the first of each merged one. left: how
    many these are.
    """

    def __init__(self, model: Any, method: EncoderMethod, keep: float | int) -> None:
        super().__init__(model.visual)
        self.refused = f"{method.name} does not merge in"
        self.attentions, self.heads = attentions_of(model), self.tower.num_heads
        self.method, self.keep, self.shape = method, keep, served_tower(method, model.config)
        self.kept: Tensor | None = None
        self.left = 0

    def _attach(self) -> None:
        super()._attach()
        for index, (block, attention) in enumerate(zip(self.tower.blocks, self.attentions, strict=True)):
            self.wrap(block.attn.qkv, "forward", partial(partial, self._note_keys, index))
            self.wrap(attention, "forward", partial(partial, self._attend, attention))
            self.wrap(block.norm2, "forward", partial(partial, self._merge, index))
            self.wrap(block.mlp, "forward", partial(partial, self._run_branch))
        self.wrap(self.tower, "forward", partial(partial, self._encode))

    def start(self, grids: list[list[int]], order: Tensor | None, device: torch.device) -> PackedRun:
        match = PackedMatch.of(grids, self.unit, self.keep, self._plan)
        units = PackedUnits.of(sum(match.sizes), self.unit, device)
        return PackedRun(units, match.sizes, order, match=match)

    def _plan(self, count: int, keep: float | int) -> list[Matcher | None]:
        return self.method.plan(Budget.of_checked(keep), self.shape.of(count))

    def _note_keys(self, index: int, forward: Any, x: Tensor) -> Any:
        """Note the keys before the rotary embedding, so that units are compared by content, not by place."""
        output = forward(x)
        run = self.run
        if run.match is not None and run.match.merges_in(index):
            attention, qkv = self.tower.blocks[index].attn, output[0] if isinstance(output, tuple) else output
            if hasattr(attention, "split_qkv"):  # Qwen2-VL, whose weights may be cut anywhere between devices
                keys = attention.split_qkv(qkv)[1].flatten(0, 1)
            else:
                keys = qkv.view(len(qkv), 3, attention.num_attention_heads_per_partition, -1)[:, 1]
            run.keys = all_heads(keys, self.heads).float().mean(1)
        return output

    def _attend(
        self, attention: Any, fused: Any, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor,
        **rest: Any,
    ) -> Tensor:  # fmt: skip
        bias = self.run.units.log_weight(query.dtype) if self.method.proportional else None
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
        run = self.run
        added = {} if residual is None else {"residual": residual}  # Qwen2.5-VL's norm adds it, and hands on the sum
        merged = None
        if run.keys is not None:
            merged = run.merge(index, (x if residual is None else x + residual).flatten(0, -2))
        if merged is None:
            return forward(x, **added)
        merged = merged.unsqueeze(1)  # [patches, 1, D]
        if residual is not None:
            return forward(merged, residual=torch.zeros_like(merged))
        run.merged = merged
        return forward(merged)

    def _run_branch(self, forward: Any, x: Tensor) -> Tensor:
        run, output = self.run, forward(x)
        if run.merged is None:
            return output
        run.output, run.merged = run.merged + output, None
        return output.new_zeros(1)  # for the block to add to the patches before the merge

    def _encode(self, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Note the units that are left, and average the features for deeper layers over each merged unit."""
        rows, run = forward(*args, **kwargs), self.run
        owners = run.owners()
        firsts = [first_of_group(owner[None], len(run.units.owner))[0] for owner in owners]
        self.left += len(run.units.kept)
        self.kept = torch.cat([first == torch.arange(len(first), device=first.device) for first in firsts])
        width = rows.shape[1] // (1 + len(getattr(self.tower, "deepstack_merger_list", ())))
        main, deeper = rows[:, :width], rows[:, width:]
        if not deeper.shape[1]:
            return rows
        return torch.cat([main, mean_of_groups(deeper, torch.cat(owners))], dim=1)
