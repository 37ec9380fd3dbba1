# SPDX-License-Identifier: Apache-2.0
"""The reducer of vision towers: tokens leave at the input of a block, or merge inside it.

A block computes x + attention(norm(x)), then x + mlp(norm(x)). A merge sits between the two. No forward is replaced:
the second norm is handed the merged tokens, so that the MLP runs on these alone; what the MLP returns is added to them,
which is the block's output, and the block is handed a zero to add to the tokens before the merge.

`TowerReducer(layout, host)` is one class for all towers. A layout (rows.py, packed.py) knows how the units of images
lie in the tower; a host is the library that runs the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.kernels.merging import Merge
from tokenprune.selection.sites.encoder import Matcher, Tower


class Layout:
    """How the units of images lie in a tower, and what a method does with them.

    shape: facts that the method knows of the tower. blocks: in their order. proportional: whether a unit counts in
    attention as often as it has members. middle: whether units merge, or leave, in the middle of blocks. begins:
    whether the first block begins a forward; if not, `TowerReducer.start` is called as the tower is entered.
    """

    method: Any
    shape: Tower
    blocks: Sequence[Block]
    proportional = False
    middle = False
    begins = False

    def begin(self, hidden: Tensor) -> TowerRun:
        """Return the state of a forward whose first block gets `hidden`."""
        raise NotImplementedError

    def find(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        """Return the merge of the block that runs, from the keys of its attention."""
        raise NotImplementedError


class Host:
    """The library that runs the blocks. This one calls modules, so that hooks of PyTorch act, and attention gets its
    bias from the part of the engine.

    adds_in_place: whether blocks add their tokens to the output of the MLP in place.
    """

    adds_in_place = False

    def around(
        self, part: Attachable, module: nn.Module, before: Callable | None, after: Callable | None, last: bool
    ) -> None:
        """Call `before` and `after` around `module` until `part` is detached; see `TowerReducer.around`."""
        if before is not None:
            part.hook(module.register_forward_pre_hook, before, with_kwargs=True)
        if after is not None:
            part.hook(module.register_forward_hook, after, prepend=not last)

    def pass_bias(self, bias: Tensor | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a block with `bias`, see `Units.bias`, to be added to its attention logits; None
        where units left and rows are alike."""
        return args, kwargs


class TowerReducer(Attachable):
    """Runs the blocks of one tower on the units that are left. The state of a forward is kept per thread."""

    def __init__(self, layout: Layout, host: Host) -> None:
        super().__init__()
        self.layout, self.host = layout, host

    # -- attaching

    def _attach(self) -> None:
        middle = self.layout.middle
        for index, block in enumerate(self.layout.blocks):
            leave = partial(self._leave_block, index) if middle else None
            self.around(block.module, partial(self._enter_block, index), leave)
            if middle:
                self.around(block.norm, partial(self._merge, index))
                self.around(block.end, None, partial(self._leave_branch, block), last=True)

    def around(
        self, module: nn.Module, before: Callable | None, after: Callable | None = None, last: bool = False
    ) -> None:
        """Have `before(module, args, kwargs)` return what `module` gets instead, (args, kwargs), or None; and
        `after(module, args, output)` what it returns instead, or None, before the hooks of others, unless `last`."""
        self.host.around(self, module, before, after, last)

    def detach(self) -> None:
        """Remove everything that `attach` installed."""
        self.end()
        super().detach()

    # -- the state of this thread

    def start(self, run: TowerRun) -> None:
        """Set this thread's state."""
        states()[self] = run

    def state(self) -> TowerRun | None:
        return states().get(self)

    def end(self) -> TowerRun | None:
        """Forget this thread's state and return it."""
        return states().pop(self, None)

    # -- hooks

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = hidden_states(args, kwargs)
        if index == 0 and self.layout.begins:
            states()[self] = self.layout.begin(before)
        run = states().get(self)
        if run is None or not run.acts:
            return None  # a block that checkpointing runs again, or all units stay
        if index in run.drops or run.plan[index] is not None:
            check_checkpointing(module, before)
        hidden = run.enter(index, before, self.layout.proportional)
        changed = run.carry(kwargs) if run.sizes else {}
        if hidden is not before:
            args, kwargs = with_hidden_states(hidden, args, kwargs)
        if run.bias is not None or run.units.drops:
            args, kwargs = self.host.pass_bias(run.bias, args, kwargs)
        elif hidden is before and not changed:
            return None
        return args, kwargs | changed

    def _merge(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = states().get(self)
        if run is None:
            return None
        with torch.no_grad():
            merge = self._find_merge(index, run)
        if merge is None:
            return None
        if (residual := kwargs.get("residual")) is not None:
            # Qwen2.5-VL's norm in vLLM adds it, and returns the sum, to which the block adds the output of the MLP.
            merged = run.apply(merge, args[0] + residual)
            return (merged,), {"residual": torch.zeros_like(merged)}
        run.entered, run.merged = args[0].shape, run.apply(merge, args[0])
        return (run.merged, *args[1:]), kwargs

    def _find_merge(self, index: int, run: TowerRun) -> Merge | None:
        """Return the merge in the middle of the block at `index`, which runs; None if there is none."""
        if run.back is not None and index in run.back.attending:
            return run.back.drop
        if (match := run.plan[index]) is None:
            return None
        if run.keys is None:
            name = self.layout.method.name
            raise UnsupportedSetupError(f"{name}: block {index} of the tower showed no attention keys")
        keys, run.keys = run.keys, None
        return self.layout.find(match, keys, run)

    def _leave_branch(self, block: Block, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        run = states().get(self)
        if run is None or run.merged is None:
            return None
        scale = getattr(block.module, block.scale, None) if block.scale else None
        run.output = run.merged + (output if scale is None else scale * output)
        run.merged = None
        return output.new_zeros(run.entered if self.host.adds_in_place else 1)

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
            "gradient checkpointing runs the tower's blocks a second time, when what they merged is forgotten; switch "
            "it off for the vision tower"
        )
