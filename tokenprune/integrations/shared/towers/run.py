# SPDX-License-Identifier: Apache-2.0
"""The state of one forward of a vision tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.integrations.shared.towers.parts import PartMatcher
from tokenprune.integrations.shared.towers.units import Units, WayBack
from tokenprune.kernels.merging import Merge
from tokenprune.selection.sites.encoder import Matcher


@dataclass(frozen=True)
class Block:
    """A pre-norm block: `norm` and `end` are the first and the last module of its MLP branch; `scale` is the name of
    the parameter that multiplies what `end` returns, if there is one."""

    module: nn.Module
    norm: nn.Module
    end: nn.Module
    scale: str = ""


@dataclass
class TowerRun:
    """One forward of a tower.

    units: what is left so far. plan: what finds the merge of each block. drops: what finds, of the hidden states that
    reach the block of an index, the units that stay, see `Merge.dropping`; None where all do. Of packed towers, sizes:
    how many units of each image entered, in the order of rows; order: long `[N]`, the units in the order in which the
    tower lines them up, None where that is the order of rows. kept: of each image which units stay, bool on the host,
    where units drop. acts: False where all stay. back: how units that left come back, if they do.

    counts: units of each row that entered each block. history: the units that its hidden states are of. ordered:
    whether patches stand square by square. bias: what is added to the attention logits of the block that runs. keys:
    what its matcher gets. merged: what enters its MLP, if some merged; entered: the shape before that; output: what
    leaves it then. parts: the tiles' parts, where these have goals of their own.
    """

    units: Units
    plan: Sequence[Matcher | None]
    drops: Mapping[int, Callable[[Tensor], Merge | None]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    order: Tensor | None = None
    kept: list[Tensor] | None = None
    acts: bool = True
    back: WayBack | None = None
    counts: list[list[int]] = field(default_factory=list)
    history: list[Units] = field(default_factory=list)
    ordered: bool = False
    bias: Tensor | None = None
    keys: Tensor | None = None
    merged: Tensor | None = None
    entered: Sequence[int] = ()
    output: Tensor | None = None
    parts: PartMatcher | None = None
    _carried: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def apply(self, merge: Merge, hidden: Tensor) -> Tensor:
        """Return what hidden states become by a merge."""
        self.units, hidden = self.units.apply(merge, hidden)
        self._carried = {}
        return hidden

    def enter(self, index: int, hidden: Tensor, proportional: bool) -> Tensor:
        """Note that the block at `index` begins, and return what it gets of `hidden`."""
        self.keys = self.merged = self.output = None
        if (drop := self.drops.get(index)) is not None:
            with torch.no_grad():
                merge = drop(hidden)
            if merge is not None and index:  # of the first block its input as it begins is noted
                self.history.append(self.units)
            hidden = hidden if merge is None else self.apply(merge, hidden)
        self.counts.append(self.units.left)
        if len(self.history) == index:
            self.history.append(self.units)
        bias = self.units.bias(proportional, hidden.dtype)
        self.bias = None if bias is None else bias.to(hidden.device)
        return hidden

    def restore(self, hidden: Tensor) -> Tensor:
        """Return hidden states of all units that entered, of those of the units that are left."""
        hidden = self.units.full(hidden)
        self.units, self._carried = replace(self.history[0], back=self.units.back), {}
        return hidden

    def carry(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a block that are others for the units that are left; see `Units.carry`."""
        return self.units.carry(given, self._carried)

    def restore_states(self, output: Any) -> None:
        """Give the hidden states on a tower's output, if any, what all units have that entered."""
        if (found := getattr(output, "hidden_states", None)) is not None:
            pairs = zip([*self.history, self.units], found, strict=False)
            output.hidden_states = tuple(None if x is None else units.full(x) for units, x in pairs)

    def owners(self) -> list[Tensor]:
        """Return `Units.owner` of a packed tower image by image, in the order of rows."""
        (owner,) = self.units.owner
        if self.order is not None:
            owner = owner[self.order.to(owner.device).argsort()]
        return list(owner.split(self.sizes))


def packed_blocks(tower: Any) -> list[Block]:
    """Return the blocks of a packed tower, of either library."""
    return [Block(block, block.norm2, block.mlp) for block in tower.blocks]
