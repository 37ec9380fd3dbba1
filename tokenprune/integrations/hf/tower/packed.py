# SPDX-License-Identifier: Apache-2.0
"""The base of what reduces towers that pack the patches of all images into one sequence: hooks that have a tower of
transformers run on the units that are left (see `integrations.shared.packed`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.tower.base import GroupedTokens
from tokenprune.integrations.shared.attachable import hidden_states, states, with_hidden_states
from tokenprune.integrations.shared.block_merging import check_checkpointing
from tokenprune.integrations.shared.packed import PackedRun
from tokenprune.integrations.shared.packed_merging import mean_of_groups

Order = Callable[[], Tensor | None]


class PackedTower(GroupedTokens):
    """Has the blocks of `tower` run on the units that are left. A subclass says in `start` which leave.

    unit: patches that become one visual token.
    """

    tower: Any
    unit: int

    def _attach(self) -> None:
        super()._attach()
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        for index, block in enumerate(self.tower.blocks):
            self.hook(block.register_forward_pre_hook, partial(self._enter_block, index), with_kwargs=True)
        for merger in (self.tower.merger, *getattr(self.tower, "deepstack_merger_list", ())):
            self._hook_merger(merger)

    def _hook_merger(self, merger: nn.Module) -> None:
        """Bring back the rows of all units after a merger, so that it runs on those that are left."""
        self.hook(merger.register_forward_hook, self._leave_merger)

    def start(self, pixels: Tensor, grids: list[list[int]], order: Order, device: torch.device) -> PackedRun:
        """Return the state of a forward that begins. pixels: `[patches, P]` of all images or videos; grids: (frames,
        height, width) in patches of each; order: returns that of `PackedRun`; device: of the units."""
        raise NotImplementedError

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        order = partial(self._order, grids, kwargs.get("window_index"))
        pixels, weight = hidden_states(args, kwargs).detach(), next(self.tower.merger.parameters())
        device = pixels.device if weight.is_meta else weight.device  # that of offloaded weights is not known yet
        states()[self] = self.start(pixels, torch.as_tensor(grids, device="cpu").tolist(), order, device)

    def _order(self, grids: Tensor, known: Tensor | None) -> Tensor | None:
        if known is not None or not hasattr(self.tower, "window_size"):
            return known
        return compat.window_order(self.tower, grids)  # its units stand window by window

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = states().get(self)
        if run is None or not (run.drops or run.match):
            return None  # a block that checkpointing runs again, or all units stay
        check_checkpointing(module, hidden_states(args, kwargs))
        if index in run.drops:
            args, kwargs = with_hidden_states(run.drop(index, hidden_states(args, kwargs)), args, kwargs)
        changed = run.enter(index, kwargs)
        return (args, kwargs | changed) if changed else None

    def _leave_merger(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        run = states().get(self)
        return run.units.full(output) if run is not None and run.counts else None

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = states().pop(self)
        counts = run.counts or [len(run.units.kept)] * len(self.tower.blocks)
        owners = run.owners() if run.match else None
        self.leave_tokens(output, [count * self.unit for count in counts], owners, run.kept)
        if run.counts:
            output.last_hidden_state = run.units.full(output.last_hidden_state)
            if getattr(output, "hidden_states", None) is not None:
                output.hidden_states = run.spread(output.hidden_states)
        features = getattr(output, "deepstack_features", None)
        if owners and features:  # of blocks at which not all members of a group were one yet
            output.deepstack_features = [mean_of_groups(x, torch.cat(owners)) for x in features]
        return output
