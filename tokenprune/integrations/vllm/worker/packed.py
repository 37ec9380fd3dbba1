# SPDX-License-Identifier: Apache-2.0
"""Worker: towers that lay the patches of a call's images end to end, made to run on the units that are left (see
`integrations.shared.packed`, as on the Hugging Face side).

A block gets borders and rotary places of the units that are left, and the merger's output the length that the model
cuts it by. Everything is attached for one call only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.packed import PackedRun, PackedUnits
from tokenprune.integrations.vllm.setting.plan import Plan


class WrappedTower(Attachable):
    """Has the blocks of `tower` run on the units that are left, between `attach` and `detach`. A subclass says in
    `start` which leave.

    unit: patches that become one visual token. refused: what cannot be done with a tower that attends otherwise.
    """

    refused: str

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        self.unit: int = tower.spatial_merge_size**2
        self._state: PackedRun | None = None

    def _attach(self) -> None:
        # No hooks of modules: vLLM calls the forward of some by itself.
        self.wrap(self.tower, "prepare_encoder_metadata", partial(partial, self._describe))
        for index, block in enumerate(self.tower.blocks):
            self.wrap(block, "forward", partial(partial, self._run_block, index))
        for merger in (self.tower.merger, *getattr(self.tower, "deepstack_merger_list", ())):
            self.wrap(merger, "forward", partial(partial, self._spread))

    def start(self, grids: list[list[int]], order: Tensor | None, device: torch.device) -> PackedRun:
        """Return the state of a forward that begins. grids: (frames, height, width) in patches of each image or video;
        order: see `PackedRun`; device: of the units."""
        raise NotImplementedError

    @property
    def run(self) -> PackedRun:
        """The forward that runs."""
        assert self._state is not None  # `_describe` makes it, before the first block
        return self._state

    def _describe(self, prepare: Callable[..., dict[str, Any]], grid_thw: Any, *args: Any, **kwargs: Any) -> Any:
        known = prepare(grid_thw, *args, **kwargs)
        if any(known.get(f"sequence_lengths{which}") is not None for which in ("", "_full", "_window")):
            raise UnsupportedSetupError(
                f"{self.refused} a vision tower that attends by FlashInfer, which takes lengths in a form of its own: "
                "start with --mm-encoder-attn-backend FLASH_ATTN, or use a method after the tower, such as divprune"
            )
        order = known.get("window_index")  # Qwen2.5-VL: units stand window by window
        device = known["rotary_pos_emb_cos"].device
        self._state = self.start(torch.as_tensor(grid_thw, device="cpu").tolist(), order, device)
        return known

    def _run_block(self, index: int, forward: Any, x: Tensor, **known: Any) -> Tensor:
        run = self.run
        if index in run.drops:
            x = run.drop(index, x)
        output = forward(x, **known | run.enter(index, known))
        return output if run.output is None else run.output

    def _spread(self, forward: Any, x: Tensor) -> Tensor:
        """Return a merger's rows: each unit that entered gets the row of the unit that it is part of so far, zeros if
        it was dropped."""
        return self.run.units.full(forward(x))


class UnitDropping(WrappedTower):
    """Drops units ahead of the first block; the front end chose them by their pixels, see front/pixels.py.

    plans: of the items of one call, in the order in which their patches stand in the tower's sequence. kept: bool, the
    units that stay, of all items end to end. left: how many these are.
    """

    refused = "units cannot be dropped ahead of"

    def __init__(self, tower: Any, plans: Sequence[Plan]) -> None:
        super().__init__(tower)
        self.sizes, self.kept = [len(plan.mask) for plan in plans], torch.cat([plan.mask for plan in plans])
        self.left = int(self.kept.sum())

    def start(self, grids: list[list[int]], order: Tensor | None, device: torch.device) -> PackedRun:
        stays = self.kept if order is None else self.kept[order.cpu()]
        units = PackedUnits.of(len(stays), self.unit, device)
        return PackedRun(units, self.sizes, order, drops={0: lambda hidden: stays})


def dropping(plan: Plan) -> bool:
    return plan.kept is not None and plan.reduces
