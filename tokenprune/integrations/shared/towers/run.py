# SPDX-License-Identifier: Apache-2.0
"""The state of one forward of a vision tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.integrations.shared.towers.parts import PartMatcher
from tokenprune.integrations.shared.towers.units import Restoration, Units
from tokenprune.kernels.merging import Merge
from tokenprune.selection.sites.encoder import Matcher


@dataclass(frozen=True)
class Block:
    """A pre-norm block.

    Attributes:
        module: The block.
        norm: The first module of its MLP branch.
        end: The last module of its MLP branch.
        scale: Name of the parameter that multiplies the output of `end`, if any.
    """

    module: nn.Module
    norm: nn.Module
    end: nn.Module
    scale: str = ""


@dataclass
class TowerRun:
    """The state of one forward of a tower.

    Attributes:
        units: The units that are kept so far.
        plan: Matcher of each block; None if the block merges nothing.
        drops: By block index, a function from the hidden states to the drop at the input of the block, or None.
        sizes: Packed towers: number of units of each image that entered, in the order of rows.
        order: Packed towers: long `[N]`, unit index at each position of the tower's sequence; None if these are equal.
        kept: Packed towers: mask of the kept units of each image, bool on the host, if units are dropped.
        is_active: False if all units are kept.
        restoration: How dropped units come back, if they do.
        counts: Number of units of each row that entered each block.
        history: Units of the hidden states at the input of each block.
        ordered: Whether the patches of a square are adjacent.
        bias: Bias of the attention logits in the current block.
        keys: Attention keys of the current block, for its matcher.
        merged: Input of the MLP of the current block after a merge.
        shape_before_merge: Shape of that input before the merge.
        output: Output of the current block after a merge.
        parts: State of the matcher, if tiles have goals.
    """

    units: Units
    plan: Sequence[Matcher | None]
    drops: Mapping[int, Callable[[Tensor], Merge | None]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    order: Tensor | None = None
    kept: list[Tensor] | None = None
    is_active: bool = True
    restoration: Restoration | None = None
    counts: list[list[int]] = field(default_factory=list)
    history: list[Units] = field(default_factory=list)
    ordered: bool = False
    bias: Tensor | None = None
    keys: Tensor | None = None
    merged: Tensor | None = None
    shape_before_merge: Sequence[int] = ()
    output: Tensor | None = None
    parts: PartMatcher | None = None
    _carried: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def apply(self, merge: Merge, hidden: Tensor) -> Tensor:
        """Merge the units and return the hidden states of the remaining units."""
        self.units, hidden = self.units.apply(merge, hidden)
        self._carried = {}
        return hidden

    def enter(self, index: int, hidden: Tensor, proportional: bool) -> Tensor:
        """Begin the block at `index` and return its input after a drop."""
        self.keys = self.merged = self.output = None
        if (drop := self.drops.get(index)) is not None:
            with torch.no_grad():
                merge = drop(hidden)
            if merge is not None and index:  # the input of the first block is recorded below
                self.history.append(self.units)
            hidden = hidden if merge is None else self.apply(merge, hidden)
        self.counts.append(self.units.num_units)
        if len(self.history) == index:
            self.history.append(self.units)
        bias = self.units.compute_bias(proportional, hidden.dtype)
        self.bias = None if bias is None else bias.to(hidden.device)
        return hidden

    def restore(self, hidden: Tensor) -> Tensor:
        """Expand hidden states of the kept units to all units that entered."""
        hidden = self.units.expand(hidden)
        self.units, self._carried = replace(self.history[0], restoration=self.units.restoration), {}
        return hidden

    def update_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a block that change with the kept units; see `Units.update_arguments`."""
        return self.units.update_arguments(given, self._carried)

    def restore_states(self, output: Any) -> None:
        """Expand the hidden states in a tower's output to all units that entered."""
        if (found := getattr(output, "hidden_states", None)) is not None:
            pairs = zip([*self.history, self.units], found, strict=False)
            output.hidden_states = tuple(None if x is None else units.expand(x) for units, x in pairs)

    def get_owners(self) -> list[Tensor]:
        """Return `Units.owner` of a packed tower per image, in the order of rows."""
        (owner,) = self.units.owner
        if self.order is not None:
            owner = owner[self.order.to(owner.device).argsort()]
        return list(owner.split(self.sizes))


def get_packed_blocks(tower: Any) -> list[Block]:
    """Return the blocks of a packed tower, of either library."""
    return [Block(block, block.norm2, block.mlp) for block in tower.blocks]
