# SPDX-License-Identifier: Apache-2.0
"""The reducer of vision towers: tokens leave at the input of a block, or merge inside it, whichever library the blocks
come from.

A block computes x + attention(norm(x)), then x + mlp(norm(x)). A merge sits between the two. No forward is replaced:
the second norm is handed the merged tokens, so that the MLP runs on these alone; what the MLP returns is added to them,
which is the block's output, and the block is handed a zero to add to the tokens before the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.attachable import (
    Attachable,
    hidden_states,
    states,
    with_hidden_states,
    with_output,
)
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
    what its matcher gets. merged: what enters its MLP, if some merged; output: what leaves it then.
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
    output: Tensor | None = None
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


class TowerReducer(Attachable):
    """Attached to the blocks of one tower, in their order; the state of a forward is kept per thread. A subclass starts
    it.

    proportional: whether a unit counts in attention as often as it has members. middle: whether units merge, or leave,
    in the middle of blocks.
    """

    blocks: Sequence[Block]
    proportional = False
    middle = False

    # -- attaching

    def _attach(self) -> None:
        for index, block in enumerate(self.blocks):
            leave = partial(self._leave_block, index) if self.middle else None
            self.around(block.module, partial(self._enter_block, index), leave)
            if self.middle:
                self.around(block.norm, partial(self._merge, index))
                self.around(block.end, None, partial(self._leave_branch, block), last=True)

    def around(
        self, module: nn.Module, before: Callable | None, after: Callable | None = None, last: bool = False
    ) -> None:
        """Have `before(module, args, kwargs)` return what `module` gets instead, (args, kwargs), or None; and
        `after(module, args, output)` what it returns instead, or None, before the hooks of others, unless `last`."""
        if before is not None:
            self.hook(module.register_forward_pre_hook, before, with_kwargs=True)
        if after is not None:
            self.hook(module.register_forward_hook, after, prepend=not last)

    def detach(self) -> None:
        """Remove everything that `attach` installed."""
        self.end()
        super().detach()

    # -- the state of this thread

    def state(self) -> TowerRun | None:
        return states().get(self)

    def end(self) -> TowerRun | None:
        """Forget this thread's state and return it."""
        return states().pop(self, None)

    # -- hooks

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = states().get(self)
        if run is None or not run.acts:
            return None  # a block that checkpointing runs again, or all units stay
        before = hidden_states(args, kwargs)
        if index in run.drops or run.plan[index] is not None:
            check_checkpointing(module, before)
        hidden = run.enter(index, before, self.proportional)
        changed = run.carry(kwargs) if run.sizes else {}
        if hidden is not before:
            args, kwargs = with_hidden_states(hidden, args, kwargs)
        if run.bias is not None:
            args, kwargs = self._with_bias(index, run.bias, args, kwargs)
        elif hidden is before and not changed:
            return None
        return args, kwargs | changed

    def _with_bias(self, index: int, bias: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a block with `bias`, see `Units.bias`, to be added to its attention logits; as they
        are where it is handed to the attention in another way."""
        return args, kwargs

    def _merge(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = states().get(self)
        if run is None:
            return None
        with torch.no_grad():
            merge = self.merge_of(index, run)
        if merge is None:
            return None
        run.merged = run.apply(merge, args[0])
        return (run.merged, *args[1:]), kwargs

    def merge_of(self, index: int, run: TowerRun) -> Merge | None:
        """Return the merge in the middle of the block at `index`, which runs; None if there is none."""
        return run.back.drop if run.back is not None and index in run.back.attending else None

    def _leave_branch(self, block: Block, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        run = states().get(self)
        if run is None or run.merged is None:
            return None
        scale = getattr(block.module, block.scale, None) if block.scale else None
        run.output = run.merged + (output if scale is None else scale * output)
        run.merged = None
        return output.new_zeros(1)

    def _leave_block(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        run = states().get(self)
        if run is None:
            return None
        if run.output is not None:
            output = (run.output, *output[1:]) if isinstance(output, tuple) else run.output
            run.output = None
        return with_output(run.restore, output) if run.back is not None and run.back.after(index) else output


def check_checkpointing(block: nn.Module, hidden: Tensor) -> None:
    """Raise UnsupportedSetupError if `block`, called with `hidden`, would run a second time in the backward pass.

    Checkpointing of the re-entrant kind calls it without gradients, and runs it again for the input's.
    """
    if not (block.training and getattr(block, "gradient_checkpointing", False)):
        return
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in block.parameters())
    if learns or hidden.requires_grad:
        raise UnsupportedSetupError(
            "Gradient checkpointing runs the blocks of the tower a second time, without the state of their merges. "
            "Switch it off for the vision tower."
        )
