# SPDX-License-Identifier: Apache-2.0
"""Drop units at the input of a block, in towers with one padded row per image and variable grids (NaFlex)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.towers.base import TowerPart
from tokenprune.integrations.hf.towers.blocks import find_blocks
from tokenprune.integrations.hf.towers.unit_dropping import check_drops
from tokenprune.integrations.shared.attachable import change_output
from tokenprune.integrations.shared.towers.reducer import Host, TowerLayout, TowerReducer
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.integrations.shared.towers.squares import order_by_units
from tokenprune.integrations.shared.towers.unit_dropping import Grids, choose_units, plan_drops
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.transfer import to_device
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.sites.units import UnitDropper


class GridHost(Host):
    """Passes the attention bias of `TowerReducer` to the blocks of NaFlex towers in transformers.

    The blocks take it as the argument `attention_mask`.
    """

    takes_bias = True

    def pass_bias(self, bias: Tensor | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args[:1], kwargs | {"attention_mask": bias}  # None if the kept rows have the same length


class GridLayout(TowerLayout):
    """Tower layout with one image per row, padded to the longest row."""

    def __init__(self, method: UnitDropper, blocks: Sequence[Block]) -> None:
        self.method, self.blocks = method, blocks


class GridTower(TowerPart):
    """Drops units in a NaFlex tower, and records the kept units.

    Raises:
        UnsupportedSetupError: If the tower is not supported.
        BudgetError: If the budget is not per image.
        OptionError: If the method names a block that does not exist.
    """

    record_field = "kept"

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget) -> None:
        super().__init__(adapter, method, budget)
        supported = f"{method.name} supports the vision tower SigLIP 2 NaFlex"
        self.tower, self.encoder, layers = find_blocks(adapter, ("Siglip2EncoderLayer",), supported)
        self.side = adapter.family.get_unit_side(adapter.config)
        self.decoder = DecoderShape.from_config(adapter.text_config)
        self.blocks = [Block(layer, layer.get_submodule("layer_norm2"), layer.get_submodule("mlp")) for layer in layers]
        check_drops(method, budget, len(self.blocks))
        self.reducer = TowerReducer(GridLayout(method, self.blocks), GridHost())

    def _attach(self) -> None:
        self.attach_part(self.reducer)
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)
        self.hook(self.tower.register_forward_hook, self._leave_tower)

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[2]
        pixels = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
        weight = next(self.encoder.parameters())
        device = pixels.device if weight.is_meta else weight.device  # offloaded weights are on the meta device
        self.reducer.start(self._begin(shapes.tolist(), pixels.shape[1], device))

    def _begin(self, shapes: list[list[int]], width: int, device: torch.device) -> TowerRun:
        """Build the state of a forward.

        Args:
            shapes: (height, width) of each image, in patches.
            width: Patches per row, including padding.
            device: Device of the tower.
        """
        grids: Grids = [(1, height // self.side, width // self.side) for height, width in shapes]
        sizes, patches = [math.prod(grid) for grid in grids], self.side**2
        budgets = [self.budget.resolve([size], layer=0, shape=self.decoder, text_tokens=0)[0] for size in sizes]
        owner = torch.arange(width, device=device).expand(len(grids), -1)
        run = TowerRun(Units(owner, [patches * size for size in sizes]), [None] * len(self.blocks))
        run.kept = [torch.ones(size, dtype=torch.bool, device="cpu") for size in sizes]
        run.is_active = any(max_units < size for max_units, size in zip(budgets, sizes, strict=True))
        host = torch.device("cpu")
        row_indices = [row * width + order_by_units(h, w, self.side, host) for row, (h, w) in enumerate(shapes)]
        patch_indices = torch.cat(row_indices)  # flat indices of patches, unit by unit

        def fold(hidden: Tensor) -> Tensor:
            return hidden.flatten(0, 1)[to_device(patch_indices, hidden.device)].unflatten(0, (-1, patches))

        def choose(x: Tensor, patches_per_unit: int) -> Merge:
            keep = choose_units(self.method, x, grids, budgets, patches_per_unit)
            run.kept = list(keep.split(sizes))
            keep_patches = torch.zeros(len(grids) * width, dtype=torch.bool, device="cpu")
            keep_patches[patch_indices] = keep.repeat_interleave(patches)
            num_kept = [patches * int(image.sum()) for image in run.kept]
            return Merge.from_kept(to_device(keep_patches.view(-1, width), x.device), num_kept)

        run.drops = plan_drops(self.method, self.method.block(len(self.blocks)), fold, choose) if run.is_active else {}
        return run

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self.reducer.get_run()
        return change_output(run.units.expand, output) if run is not None and run.is_active else None

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> None:
        run = self.reducer.pop_run()
        assert run is not None  # started in `_enter_tower`
        counts = [sum(rows) for rows in run.counts] or [sum(run.units.num_units)] * len(self.blocks)
        self.record_tokens(output, counts, kept=run.kept)
        run.restore_states(output)
