# SPDX-License-Identifier: Apache-2.0
"""Drop units at the input of a block, in towers whose images or tiles have rows of their own."""

from __future__ import annotations

from torch import Tensor

from tokenprune.budget import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.tower.merging import EncoderPatch
from tokenprune.integrations.shared.observation import Observation
from tokenprune.integrations.shared.reducer import TowerRun
from tokenprune.integrations.shared.unit_dropping import MergesNothing, RowDropper
from tokenprune.sites.units import UnitDropper


class TileDrop(RowDropper, EncoderPatch):
    """Has `method` drop units in the tower of `adapter`'s model.

    Raises UnsupportedSetupError for towers that are not known, and in a forward for tiles that are padded; OptionError
    for a block that there is not, or whose output nobody reads.
    """

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget) -> None:
        super().__init__(adapter, MergesNothing(drops=method), budget)
        self.step = Step(method, budget)
        self.merges, self.dropper = False, method
        method.checked_block(self.shape.read)

    def _note_masked(self, run: TowerRun, observation: Observation, mask: Tensor) -> None:
        raise UnsupportedSetupError(
            f"{self.method.name}: some patches of these images are padding, which units that leave would mix with "
            "others; use a method that acts after the tower, such as divprune"
        )
