# SPDX-License-Identifier: Apache-2.0
"""Worker: towers that lay the patches of a call's images end to end (Qwen2-VL to Qwen3.5, GLM), made to run on the
units that are left, as on the Hugging Face side (see `integrations.shared.reducer`).

Fused attention takes no bias, so proportional attention after the first merge is PyTorch's, piece by piece. Everything
is attached for one call only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.attachable import states
from tokenprune.integrations.shared.towers.merging import PackedMerger, firsts
from tokenprune.integrations.shared.towers.reducer import TowerReducer, TowerRun, packed_blocks
from tokenprune.integrations.shared.towers.unit_dropping import Grids, choosing_packed, dropping
from tokenprune.integrations.shared.towers.units import Units, mean_of_groups
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.settings.towers import served_tower
from tokenprune.integrations.vllm.worker.tower import all_heads, attend, attentions_of
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.units import UnitDropper


class Wrapping(TowerReducer):
    """Wraps the forward of modules: vLLM calls that of some by itself, past their hooks."""

    def around(
        self, module: nn.Module, before: Callable | None, after: Callable | None = None, last: bool = False
    ) -> None:
        self.wrap(module, "forward", partial(partial, _around, module, before, after))


def _around(
    module: nn.Module, before: Callable | None, after: Callable | None, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    changed = None if before is None else before(module, args, kwargs)
    args, kwargs = (args, kwargs) if changed is None else changed
    output = forward(*args, **kwargs)
    changed = None if after is None else after(module, args, output)
    return output if changed is None else changed


class WrappedTower(Wrapping):
    """Has the blocks of `tower` run on the units that are left. A subclass says in `start` which leave.

    refused: what cannot be done with a tower that attends otherwise.
    """

    refused: str
    tower: Any

    def _attach(self) -> None:
        super()._attach()
        self.wrap(self.tower, "prepare_encoder_metadata", partial(partial, self._describe))
        for merger in (self.tower.merger, *getattr(self.tower, "deepstack_merger_list", ())):
            self.around(merger, None, self._leave_merger)

    def start(self, grids: Grids, order: Tensor | None, device: torch.device) -> TowerRun:
        """Return the state of a forward that begins. grids: (frames, height, width) in units of each image or video;
        order: see `TowerRun`; device: of the units."""
        raise NotImplementedError

    @property
    def run(self) -> TowerRun:
        """The forward that runs."""
        run = self.state()
        assert run is not None  # `_describe` makes it, before the first block
        return run

    def _describe(self, prepare: Callable[..., dict[str, Any]], grid_thw: Any, *args: Any, **kwargs: Any) -> Any:
        known = prepare(grid_thw, *args, **kwargs)
        if any(known.get(f"sequence_lengths{which}") is not None for which in ("", "_full", "_window")):
            raise UnsupportedSetupError(
                f"{self.refused} a vision tower that attends by FlashInfer, which takes lengths in a form of its own: "
                "start with --mm-encoder-attn-backend FLASH_ATTN, or use a method after the tower, such as divprune"
            )
        order = known.get("window_index")  # Qwen2.5-VL: units stand window by window
        device, side = known["rotary_pos_emb_cos"].device, self.tower.spatial_merge_size
        grids = [(t, h // side, w // side) for t, h, w in torch.as_tensor(grid_thw, device="cpu").tolist()]
        states()[self] = self.start(grids, order, device)
        return known

    def _leave_merger(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Return a merger's rows, of the length that the model cuts them by."""
        return self.run.units.full(output)


class UnitDropping(WrappedTower):
    """Drops units at the input of a block. The front end chose them, where the method sees pixels (front/pixels.py).

    plans: of the items of one call, in the order in which their patches stand in the tower's sequence. kept: bool, the
    units that stay, of all items end to end. left: how many these are.
    """

    refused = "units cannot be dropped inside"

    def __init__(self, tower: Any, plans: Sequence[Plan]) -> None:
        super().__init__()
        self.tower, self.plans, self.blocks = tower, plans, packed_blocks(tower)
        self._ran: TowerRun | None = None

    def start(self, grids: Grids, order: Tensor | None, device: torch.device) -> TowerRun:
        side, depth, method = self.tower.spatial_merge_size, len(self.blocks), self.plans[0].setting.acting
        assert isinstance(method, UnitDropper)  # see `dropping_plan`
        sizes = [sum(plan.counts) for plan in self.plans]
        self._ran = run = TowerRun(Units.packed(sum(sizes), side**2, device), [None] * depth, sizes=sizes, order=order)
        if self.plans[0].kept is None:
            most = [sum(plan.keep) for plan in self.plans]
            run.drops = choosing_packed(run, method, grids, most, side**2)
        else:
            run.kept = [plan.mask for plan in self.plans]
            stays = torch.cat(run.kept)
            run.drops = {method.block(depth): lambda hidden: dropping(stays, order, hidden.device)}
        return run

    @property
    def kept(self) -> Tensor:
        assert self._ran is not None and self._ran.kept is not None  # the tower ran
        return torch.cat(self._ran.kept)

    @property
    def left(self) -> int:
        return int(self.kept.sum())


class PackedTowerMerger(PackedMerger, WrappedTower):
    """Merges in the tower of vLLM's `model` between `attach` and `detach`. Afterwards `kept` tells what is left.

    kept: bool, of the units of all images and videos end to end; True for the first of each merged one. left: how
    many these are.
    """

    def __init__(self, model: Any, method: EncoderMethod, keep: float | int) -> None:
        self.tower, self.patches = model.visual, model.visual.spatial_merge_size**2
        self.refused = f"{method.name} does not merge in"
        self.attentions, self.heads = attentions_of(model), self.tower.num_heads
        blocks = packed_blocks(self.tower)
        super().__init__(method, Budget.from_number(keep), blocks, served_tower(method, model.config))
        self.kept: Tensor | None = None
        self.left = 0

    def _attach(self) -> None:
        super()._attach()
        for index, (block, attention) in enumerate(zip(self.tower.blocks, self.attentions, strict=True)):
            self.around(block.attn.qkv, None, partial(self._note_keys, index))
            self.wrap(attention, "forward", partial(partial, self._attend, attention))
        self.around(self.tower, None, self._leave_tower)

    def start(self, grids: Grids, order: Tensor | None, device: torch.device) -> TowerRun:
        return self.begin(grids, order, device)

    def _note_keys(self, index: int, module: nn.Module, args: tuple, output: Any) -> None:
        """Note the keys before the rotary embedding, so that units are compared by content, not by place."""
        if self.run.plan[index] is not None:
            attention, qkv = self.tower.blocks[index].attn, output[0] if isinstance(output, tuple) else output
            if hasattr(attention, "split_qkv"):  # Qwen2-VL, whose weights may be cut anywhere between devices
                keys = attention.split_qkv(qkv)[1].flatten(0, 1)
            else:
                keys = qkv.view(len(qkv), 3, attention.num_attention_heads_per_partition, -1)[:, 1]
            self.run.keys = all_heads(keys, self.heads).float().mean(1)

    def _attend(
        self, attention: Any, fused: Any, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **rest: Any
    ) -> Tensor:
        if (bias := self.run.bias) is None:
            return fused(query=query, key=key, value=value, cu_seqlens=cu_seqlens, **rest)
        return attend(attention, bias, query, key, value, cu_seqlens.diff().tolist())

    def _merge(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        residual = kwargs.get("residual")
        if residual is None or self.run.plan[index] is None:
            return super()._merge(index, module, args, kwargs)
        # Qwen2.5-VL's norm adds it, and hands on the sum, to which the block adds what the MLP returns.
        changed = super()._merge(index, module, (args[0] + residual,), {})
        if changed is None:
            return None
        self.run.merged = None
        (merged,), _ = changed
        return (merged,), {"residual": torch.zeros_like(merged)}

    def _leave_tower(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Note the units that are left, and average the features for deeper layers over each merged unit."""
        owners = self.run.owners()
        self.left += sum(self.run.units.left)
        self.kept = torch.cat([first == torch.arange(len(first), device=first.device) for first in firsts(owners)])
        width = output.shape[1] // (1 + len(getattr(self.tower, "deepstack_merger_list", ())))
        main, deeper = output[:, :width], output[:, width:]
        if not deeper.shape[1] or self.method.drops:
            return output
        return torch.cat([main, mean_of_groups(deeper, torch.cat(owners))], dim=1)


def dropping_plan(plan: Plan) -> bool:
    """Return True if units of an item leave in the tower."""
    return plan.reduces and isinstance(plan.setting.method, UnitDropper)
