# SPDX-License-Identifier: Apache-2.0
"""Merge or drop units inside towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5, GLM).

The layout is shared with transformers (shared/towers/packed.py); this file reads the inputs of vLLM's towers. Fused
attention does not take a bias, so proportional attention runs in PyTorch after the first merge. The hooks are removed
after each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.towers.packed import PackedLayout, find_first_units
from tokenprune.integrations.shared.towers.reducer import Host, TowerReducer
from tokenprune.integrations.shared.towers.run import TowerRun
from tokenprune.integrations.shared.towers.units import average_groups
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.settings.towers import served_tower
from tokenprune.integrations.vllm.worker.tower import attend, find_attentions, gather_heads
from tokenprune.selection.sites.encoder import TowerMethod
from tokenprune.selection.sites.units import UnitDropper


class ForwardHost(Host):
    """vLLM, which calls `forward` of some modules directly and so skips their hooks. `forward` is wrapped instead."""

    def __init__(self, adds_in_place: bool = False) -> None:
        self.adds_in_place = adds_in_place

    def add_hooks(
        self, part: Attachable, module: nn.Module, before: Callable | None, after: Callable | None, last: bool
    ) -> None:
        part.wrap(module, "forward", partial(partial, _run_with_hooks, module, before, after))


def _run_with_hooks(
    module: nn.Module, before: Callable | None, after: Callable | None, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    changed = None if before is None else before(module, args, kwargs)
    args, kwargs = (args, kwargs) if changed is None else changed
    output = forward(*args, **kwargs)
    changed = None if after is None else after(module, args, output)
    return output if changed is None else changed


class ServedPackedTower(Attachable):
    """Merges or drops units in the tower of a vLLM model while it is attached.

    Attributes:
        plans: Plans of the items of one call, in the order of the tower's sequence. One forward treats them alike.
        kept: After a forward, mask of the kept units of all items; True for the first unit of each merged group.
        num_kept: Number of kept units.
    """

    def __init__(self, model: Any, method: TowerMethod, plans: Sequence[Plan]) -> None:
        super().__init__()
        self.tower, self.method, self.plans = model.visual, method, plans
        drops, keep = isinstance(method, UnitDropper), plans[0].setting.budget
        shape = None if drops else served_tower(method, model.config)
        self.layout = PackedLayout(self.tower, method, False, keep, shape)
        self.reducer = TowerReducer(self.layout, ForwardHost())
        self.attentions = [] if drops else find_attentions(model)
        self.kept: Tensor | None = None
        self.num_kept = 0

    def _attach(self) -> None:
        self.attach_part(self.reducer)
        self.wrap(self.tower, "prepare_encoder_metadata", partial(partial, self._describe))
        for index, attention in enumerate(self.attentions):
            self.reducer.add_hooks(self.tower.blocks[index].attn.qkv, None, partial(self._record_keys, index))
            self.wrap(attention, "forward", partial(partial, self._attend, attention))
        self.reducer.add_hooks(self.tower, None, self._leave_tower)

    @property
    def run(self) -> TowerRun:
        """The state of the current forward."""
        run = self.reducer.get_run()
        assert run is not None  # `_describe` makes it, before the first block
        return run

    def _describe(self, prepare: Callable[..., dict[str, Any]], grid_thw: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = prepare(grid_thw, *args, **kwargs)
        if any(metadata.get(f"sequence_lengths{which}") is not None for which in ("", "_full", "_window")):
            drops = isinstance(self.method, UnitDropper)
            refused = "Units cannot be dropped" if drops else f"{self.method.name} cannot merge"
            raise UnsupportedSetupError(
                f"{refused} in a vision tower that uses FlashInfer. Start with --mm-encoder-attn-backend FLASH_ATTN, "
                "or use a method after the tower, such as divprune."
            )
        order = metadata.get("window_index")  # Qwen2.5-VL groups its units by window
        grids, device = self.layout.to_unit_grids(grid_thw), metadata["rotary_pos_emb_cos"].device
        if isinstance(self.method, UnitDropper):
            # For methods that read pixels, the front end chose the units (frontend/pixels.py).
            chosen = None if self.plans[0].kept is None else torch.cat([plan.mask for plan in self.plans])
            num_kept = [sum(plan.keep) for plan in self.plans]
            run = self.layout.begin_dropping(self.method, grids, num_kept, lambda: order, device, chosen)
        else:
            run = self.layout.begin_merging(self.method, grids, order, device)
        self.reducer.start(run)
        return metadata

    # -- hooks of the blocks

    def _record_keys(self, index: int, module: nn.Module, args: tuple, output: Any) -> None:
        """Record the keys before the rotary embedding, so that units are compared by content, not by position."""
        if self.run.plan[index] is not None:
            attention, qkv = self.tower.blocks[index].attn, output[0] if isinstance(output, tuple) else output
            if hasattr(attention, "split_qkv"):  # Qwen2-VL, which may split its weights between devices at any row
                keys = attention.split_qkv(qkv)[1].flatten(0, 1)
            else:
                keys = qkv.view(len(qkv), 3, attention.num_attention_heads_per_partition, -1)[:, 1]
            self.run.keys = gather_heads(keys, self.tower.num_heads).float().mean(1)

    def _attend(
        self, attention: Any, fused: Any, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **others: Any
    ) -> Tensor:
        if (bias := self.run.bias) is None:
            return fused(query=query, key=key, value=value, cu_seqlens=cu_seqlens, **others)
        return attend(attention, bias, query, key, value, cu_seqlens.diff().tolist())

    # -- the output

    def _leave_tower(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Record the kept units. Average the features of deepstack layers over each merged unit."""
        run = self.run
        if isinstance(self.method, UnitDropper):
            assert run.kept is not None  # units were chosen
            self.kept = torch.cat(run.kept)
            self.num_kept = int(self.kept.sum())
            return output
        owners = run.get_owners()
        self.num_kept += sum(run.units.num_units)
        firsts = find_first_units(owners)
        self.kept = torch.cat([first == torch.arange(len(first), device=first.device) for first in firsts])
        width = output.shape[1] // len(self.layout.mergers)
        main, deeper = output[:, :width], output[:, width:]
        if not deeper.shape[1] or self.method.drops:
            return output
        return torch.cat([main, average_groups(deeper, torch.cat(owners))], dim=1)


def is_dropping(plan: Plan) -> bool:
    """Return whether the tower drops units of an item."""
    return plan.reduces and isinstance(plan.setting.method, UnitDropper)
