# SPDX-License-Identifier: Apache-2.0
"""Drop units at the input of a block, in towers whose images or tiles have rows of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.towers.blocks import find_blocks
from tokenprune.integrations.hf.towers.merging import EncoderPatch
from tokenprune.integrations.hf.towers.unit_dropping import KeptUnits
from tokenprune.integrations.shared.attachable import states, with_output
from tokenprune.integrations.shared.checks import AFTER_THE_TOWER
from tokenprune.integrations.shared.towers.reducer import Block, TowerRun
from tokenprune.integrations.shared.towers.squares import by_units
from tokenprune.integrations.shared.towers.unit_dropping import Grids, RowDropper, choose_units, choosing
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.observation import Observation
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.units import UnitDropper


class TileDrop(RowDropper, EncoderPatch):
    """Has `method` drop units in the tower of `adapter`'s model.

    Raises UnsupportedSetupError for towers that are not known, and in a forward for tiles that are padded; OptionError
    for a block that there is not, or whose output nobody reads.
    """

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget) -> None:
        super().__init__(adapter, method, budget)
        self.merges, self.middle = False, not method.removes
        method.checked_block(self.shape.read)

    def _note_masked(self, run: TowerRun, observation: Observation, mask: Tensor) -> None:
        raise UnsupportedSetupError(
            f"{self.method.name}: some patches of these images are padding, which dropping would mix with others. "
            f"{AFTER_THE_TOWER}"
        )


class GridDrop(KeptUnits):
    """Has `method` drop units in a tower each of whose rows is a grid of its own, with padding after it (NaFlex).

    Raises what `KeptUnits` does, and UnsupportedSetupError for towers that are not known.
    """

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget) -> None:
        knows = f"{method.name} knows SigLIP 2 of images of any shape"
        self.tower, self.encoder, layers = find_blocks(adapter, ("Siglip2EncoderLayer",), knows)
        self.side = adapter.family.side(adapter.config)
        blocks = [Block(one, one.get_submodule("layer_norm2"), one.get_submodule("mlp")) for one in layers]
        super().__init__(adapter, method, budget, blocks)

    def _attach(self) -> None:
        super()._attach()
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)
        self.hook(self.tower.register_forward_hook, self._leave_tower)

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[2]
        pixels = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
        weight = next(self.encoder.parameters())
        device = pixels.device if weight.is_meta else weight.device  # that of offloaded weights is not known yet
        states()[self] = self._begin(shapes.tolist(), pixels.shape[1], device)

    def _begin(self, shapes: list[list[int]], width: int, device: torch.device) -> TowerRun:
        """Return the state of a forward that begins. shapes: (height, width) in patches of each image; width: of rows,
        in patches."""
        grids: Grids = [(1, height // self.side, width // self.side) for height, width in shapes]
        sizes, patches = [math.prod(grid) for grid in grids], self.side**2
        most = [self.budget.resolve([size], layer=0, shape=self.shape, text_tokens=0)[0] for size in sizes]
        owner = torch.arange(width, device=device).expand(len(grids), -1)
        run = TowerRun(Units(owner, [patches * size for size in sizes]), [None] * len(self.blocks))
        run.kept = [torch.ones(size, dtype=torch.bool, device="cpu") for size in sizes]
        run.acts = any(left < size for left, size in zip(most, sizes, strict=True))
        host = torch.device("cpu")
        of_rows = [row * width + by_units(h, w, self.side, host) for row, (h, w) in enumerate(shapes)]
        places = torch.cat(of_rows)  # of patches unit by unit, in rows end to end

        def fold(hidden: Tensor) -> Tensor:
            return hidden.flatten(0, 1)[to_device(places, hidden.device)].unflatten(0, (-1, patches))

        def choose(x: Tensor, of_each: int) -> Merge:
            stays = choose_units(self.method, x, grids, most, of_each)
            run.kept = list(stays.split(sizes))
            own = torch.zeros(len(grids) * width, dtype=torch.bool, device="cpu")
            own[places] = stays.repeat_interleave(patches)
            left = [patches * int(image.sum()) for image in run.kept]
            return Merge.dropping(to_device(own.view(-1, width), x.device), left)

        run.drops = choosing(self.method, self.block, fold, choose) if run.acts else {}
        return run

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        changed, run = super()._enter_block(index, module, args, kwargs), self.state()
        if run is None or not run.units.drops:
            return changed
        (hidden, *_), kwargs = changed or (args, kwargs)
        return (hidden,), kwargs | {"attention_mask": run.bias}  # of the rows that are left, None where they are alike

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self.state()
        return with_output(run.units.full, output) if run is not None and run.acts else None

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> None:
        run = self.end()
        assert run is not None  # `_enter_tower` made it
        counts = [sum(left) for left in run.counts] or [sum(run.units.left)] * len(self.blocks)
        self.leave_tokens(output, counts, kept=run.kept)
        run.restore_states(output)
