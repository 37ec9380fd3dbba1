# SPDX-License-Identifier: Apache-2.0
"""Merge or drop units inside towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5, GLM).

The layout is shared with vLLM (shared/towers/packed.py). This module reads the inputs of transformers' towers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.hf.towers.base import ThreadKey, TowerPart, check_bias
from tokenprune.integrations.hf.towers.unit_dropping import check_drops, denormalize, get_color_statistics
from tokenprune.integrations.shared.attachable import get_hidden_states, get_thread_states
from tokenprune.integrations.shared.towers.packed import Order, PackedLayout, find_first_units
from tokenprune.integrations.shared.towers.reducer import Host, TowerReducer
from tokenprune.integrations.shared.towers.run import TowerRun
from tokenprune.integrations.shared.towers.unit_dropping import Grids, choose_units
from tokenprune.integrations.shared.towers.units import average_groups
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.sites.encoder import TowerMethod
from tokenprune.selection.sites.units import UnitDropper


def get_packed_tower(adapter: Adapter) -> Any:
    """Return the packed vision tower of a family with `tower_rows="all images"`."""
    towers = (getattr(adapter.base, name, None) for name in ("visual", "vision_model"))
    return next(tower for tower in towers if hasattr(tower, "merger"))


class PackedTower(TowerPart):
    """Merges or drops units inside a packed tower, and records the groups of merged tokens or the kept tokens.

    Raises:
        UnsupportedSetupError: If attention takes no bias and the method needs one.
        BudgetError: If a method that drops units gets a budget that is not per image.
        OptionError: If a method that drops units names a block that does not exist, or needs the processor's colours.
    """

    def __init__(self, adapter: Adapter, method: TowerMethod, budget: Budget, processor: Any = None) -> None:
        super().__init__(adapter, method, budget)
        self.tower = get_packed_tower(adapter)
        self.grids_key = ThreadKey()
        dropper = method if isinstance(method, UnitDropper) else None
        # Merged units are restored before the mergers, so that the mergers compute the same bits as without merging.
        fills = dropper is None or not dropper.removes
        self.layout = PackedLayout(self.tower, method, fills, budget)
        self.reducer = TowerReducer(self.layout, Host())
        self.observers: list[Observer] = []
        if dropper is not None:
            self.record_field, self.reads_processor = "kept", True
            self.decoder = DecoderShape.from_config(adapter.text_config)
            check_drops(dropper, budget, len(self.layout.blocks))
            self.color_statistics = get_color_statistics(processor) if dropper.sees == "pixels" else None
            if self.color_statistics is None and (reason := dropper.reads_colours):
                raise OptionError(
                    f"{method.name}: {reason}, and the model gets normalised pixels. Pass processor=, or leave the "
                    "option out."
                )
            return
        self.merges = not method.drops
        if method.proportional:
            self.observers = [Observer(block.attn, self._pop_bias) for block in self.tower.blocks]
        self._check_attention()

    def _check_attention(self) -> None:
        config = self.tower.blocks[0].attn.config if not self.observers else self.observers[0].config
        check_bias(self.method, config, uneven=False)  # rows are not padded

    def _attach(self) -> None:
        self.attach_part(self.reducer)
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        for observer in self.observers:
            self.attach_part(observer)
        if isinstance(self.method, UnitDropper):
            return
        for index, block in enumerate(self.tower.blocks):
            projection = getattr(block.attn, "qkv", None) or block.attn.k
            self.hook(projection.register_forward_hook, partial(self._record_keys, index))

    # -- the encoder

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        # GLM's towers get each frame of a video as a separate image.
        get_thread_states()[self.grids_key] = self.adapter.grids(encoding.modality, encoding.on_host)
        try:
            output = encode(encoding)
        finally:
            get_thread_states().pop(self.grids_key, None)
        if self.record_field == "groups":
            owners = get_record(output).owners
            self.record_groups(output, None if owners is None else find_first_units(list(owners)))
        return output

    # -- input and output of the tower

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        order = partial(self._get_order, grids, kwargs.get("window_index"))
        pixels, weight = get_hidden_states(args, kwargs), next(self.tower.merger.parameters())
        device = pixels.device if weight.is_meta else weight.device  # offloaded weights are on the meta device
        unit_grids = get_thread_states().pop(self.grids_key, None)
        if unit_grids is None or sum(map(math.prod, unit_grids)) * self.layout.patches != len(pixels):
            unit_grids = self.layout.to_unit_grids(grids)
        if isinstance(self.method, UnitDropper):
            self.reducer.start(self._begin_dropping(self.method, pixels, unit_grids, order, device))
            return
        self._check_attention()  # the attention implementation may have changed after the patch
        self.reducer.start(self.layout.begin_merging(self.method, unit_grids, order(), device))

    def _get_order(self, grids: Tensor, window_index: Tensor | None) -> Tensor | None:
        """Return the order in which a tower with window attention processes units, long `[units]`.

        None for other towers. `window_index`: the order that the caller computed, or None.
        """
        if window_index is not None or not hasattr(self.tower, "window_size"):
            return window_index
        return compat.get_window_order(self.tower, grids)

    def _begin_dropping(
        self, method: UnitDropper, pixels: Tensor, grids: Grids, order: Order, device: torch.device
    ) -> TowerRun:
        if not method.removes:
            grids = [(1, h, w) for t, h, w in grids for _ in range(t)]
        sizes = [math.prod(grid) for grid in grids]
        num_kept = [self.budget.resolve([size], layer=0, shape=self.decoder, text_tokens=0)[0] for size in sizes]
        chosen = None
        if method.sees == "pixels":
            with torch.no_grad():
                colors = denormalize(pixels.float(), self.color_statistics)
                chosen = choose_units(method, colors, grids, num_kept, self.layout.patches)
        return self.layout.begin_dropping(method, grids, num_kept, order, device, chosen)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self.reducer.pop_run()
        assert run is not None  # started in `_enter_tower`
        counts = [num_units for (num_units,) in run.counts] or run.units.num_units * len(self.layout.blocks)
        owners = run.get_owners() if self.record_field == "groups" else None
        self.record_tokens(output, [count * self.layout.patches for count in counts], owners, run.kept)
        if run.is_active:
            output.last_hidden_state = run.units.expand(output.last_hidden_state)
            run.restore_states(output)
        features = getattr(output, "deepstack_features", None)
        if owners and features and self.merges:
            # Deepstack features come from blocks before the last merges, so average them over the final groups.
            output.deepstack_features = [average_groups(x, torch.cat(owners)) for x in features]
        return output

    # -- hooks of the blocks

    def _record_keys(self, index: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Record the keys before the rotary embedding, so that units are compared by content, not by position."""
        run = self.reducer.get_run()
        if run is not None and run.plan[index] is not None:
            attention = self.tower.blocks[index].attn
            heads, first = output.view(len(output), -1, attention.head_dim), attention.num_heads
            # Keys follow the queries in `qkv` and may have fewer heads, or they have a separate projection.
            keys = heads[:, first : (first + heads.shape[1]) // 2] if hasattr(attention, "qkv") else heads
            run.keys = keys.float().mean(1)

    def _pop_bias(self, observation: Any) -> Tensor | None:
        """Return the bias of the next attention call (one image, frame or window), and remove it from the run."""
        run = self.reducer.get_run()
        if run is None or run.bias is None:
            return None
        width = observation.key.shape[2]
        bias, run.bias = run.bias[..., :width], run.bias[..., width:]
        return bias.to(observation.key.dtype).expand(1, 1, width, width)
