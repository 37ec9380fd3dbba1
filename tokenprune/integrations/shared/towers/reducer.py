# SPDX-License-Identifier: Apache-2.0
"""Reduce the tokens of a vision tower: drop them at the input of a block, or merge them inside it.

A block computes x + attention(norm(x)), then x + mlp(norm(x)). A merge happens between the two. No forward is replaced:
the second norm receives the merged tokens, so the MLP runs only on them. The reducer adds the output of the MLP to the
merged tokens and returns the sum as the output of the block. The block itself adds a zero to its unmerged tokens.

`TowerReducer(layout, host)` serves all towers. A layout (rows.py, packed.py) plans the merges and drops for the shape
of a tower's input. A host adapts the reducer to the library that runs the blocks.
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
    change_output,
    get_hidden_states,
    get_thread_states,
    replace_hidden_states,
)
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.kernels.merging import Merge
from tokenprune.selection.sites.encoder import Matcher, Tower


class TowerLayout:
    """Base of the layouts: how the units of images are arranged in a tower, and how a method reduces them.

    Attributes:
        shape: Facts about the tower that a method may read.
        blocks: The blocks of the tower, in order.
        proportional: Whether attention weighs a merged unit by its number of members.
        acts_mid_block: Whether units merge or leave between attention and MLP.
        starts_at_first_block: Whether the first block begins a forward. If not, the engine calls `TowerReducer.start`.
    """

    method: Any
    shape: Tower
    blocks: Sequence[Block]
    proportional = False
    acts_mid_block = False
    starts_at_first_block = False

    def begin(self, hidden: Tensor) -> TowerRun:
        """Return the state of a forward from the input of its first block."""
        raise NotImplementedError

    def attach(self, reducer: TowerReducer) -> None:
        """Put further functions of `reducer` around modules of the tower."""

    def find_merge(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        """Return the merge of the current block from the keys of its attention."""
        raise NotImplementedError


class Host:
    """The library that runs the blocks. This base class uses PyTorch hooks, and its blocks do not take a bias.

    Attributes:
        takes_bias: Whether blocks take the bias of their attention logits as an argument.
        adds_in_place: Whether blocks add their input to the output of the MLP in place.
    """

    takes_bias = False
    adds_in_place = False

    def add_hooks(
        self, part: Attachable, module: nn.Module, before: Callable | None, after: Callable | None, last: bool
    ) -> None:
        """Call `before` and `after` around `module` until `part` is detached; see `TowerReducer.add_hooks`."""
        if before is not None:
            part.hook(module.register_forward_pre_hook, before, with_kwargs=True)
        if after is not None:
            part.hook(module.register_forward_hook, after, prepend=not last)

    def pass_bias(self, bias: Tensor | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a block with the bias of its attention logits, see `Units.bias`.

        Only called if blocks take one. After a drop `bias` is None if all rows have the same length.
        """
        raise NotImplementedError


class TowerReducer(Attachable):
    """Runs the blocks of one tower on the kept units. The state of a forward is kept per thread."""

    def __init__(self, layout: TowerLayout, host: Host) -> None:
        super().__init__()
        self.layout, self.host = layout, host

    # -- attaching

    def _attach(self) -> None:
        middle = self.layout.acts_mid_block
        for index, block in enumerate(self.layout.blocks):
            leave = partial(self._leave_block, index) if middle else None
            self.add_hooks(block.module, partial(self._enter_block, index), leave)
            if middle:
                self.add_hooks(block.norm, partial(self._merge, index))
                self.add_hooks(block.end, None, partial(self._leave_branch, block), last=True)
        self.layout.attach(self)

    def add_hooks(
        self, module: nn.Module, before: Callable | None, after: Callable | None = None, last: bool = False
    ) -> None:
        """Call functions before and after a module.

        Args:
            before: Gets (module, args, kwargs) and returns changed (args, kwargs), or None.
            after: Gets (module, args, output) and returns a changed output, or None.
            last: Whether `after` runs after the hooks of others, instead of before them.
        """
        self.host.add_hooks(self, module, before, after, last)

    def detach(self) -> None:
        """Remove everything that `attach` installed."""
        self.pop_run()
        super().detach()

    # -- the state of this thread

    def start(self, run: TowerRun) -> None:
        """Set this thread's state."""
        get_thread_states()[self] = run

    def get_run(self) -> TowerRun | None:
        return get_thread_states().get(self)

    def pop_run(self) -> TowerRun | None:
        """Forget this thread's state and return it."""
        return get_thread_states().pop(self, None)

    # -- hooks

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = get_hidden_states(args, kwargs)
        if index == 0 and self.layout.starts_at_first_block:
            get_thread_states()[self] = self.layout.begin(before)
        run = get_thread_states().get(self)
        if run is None or not run.is_active:
            return None  # checkpointing runs the block again, or all units stay
        if index in run.drops or run.plan[index] is not None:
            check_checkpointing(module, before)
        hidden = run.enter(index, before, self.layout.proportional)
        changed = run.update_arguments(kwargs) if run.sizes else {}
        if hidden is not before:
            args, kwargs = replace_hidden_states(hidden, args, kwargs)
        if self.host.takes_bias and (run.bias is not None or run.units.drops):
            args, kwargs = self.host.pass_bias(run.bias, args, kwargs)
        elif hidden is before and not changed:
            return None
        return args, kwargs | changed

    def _merge(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = get_thread_states().get(self)
        if run is None:
            return None
        with torch.no_grad():
            merge = self._find_merge(index, run)
        if merge is None:
            return None
        if (residual := kwargs.get("residual")) is not None:
            # Qwen2.5-VL in vLLM: the norm adds the residual and returns the sum. The block adds the MLP to this sum.
            merged = run.apply(merge, args[0] + residual)
            return (merged,), {"residual": torch.zeros_like(merged)}
        run.shape_before_merge, run.merged = args[0].shape, run.apply(merge, args[0])
        return (run.merged, *args[1:]), kwargs

    def _find_merge(self, index: int, run: TowerRun) -> Merge | None:
        """Return the merge between attention and MLP of the block at `index`, or None."""
        if run.restoration is not None and index in run.restoration.attending:
            return run.restoration.drop
        if (match := run.plan[index]) is None:
            return None
        if run.keys is None:
            name = self.layout.method.name
            raise UnsupportedSetupError(f"{name}: block {index} of the tower did not call its attention function.")
        keys, run.keys = run.keys, None
        return self.layout.find_merge(match, keys, run)

    def _leave_branch(self, block: Block, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        run = get_thread_states().get(self)
        if run is None or run.merged is None:
            return None
        scale = getattr(block.module, block.scale, None) if block.scale else None
        run.output = run.merged + (output if scale is None else scale * output)
        run.merged = None
        return output.new_zeros(run.shape_before_merge if self.host.adds_in_place else 1)

    def _leave_block(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        run = get_thread_states().get(self)
        if run is None:
            return None
        if run.output is not None:
            output = (run.output, *output[1:]) if isinstance(output, tuple) else run.output
            run.output = None
        return (
            change_output(run.restore, output)
            if run.restoration is not None and run.restoration.is_due(index)
            else output
        )


def check_checkpointing(block: nn.Module, hidden: Tensor) -> None:
    """Raise UnsupportedSetupError if `block`, called with `hidden`, would run a second time in the backward pass.

    Re-entrant checkpointing runs a block without gradients, and runs it again for the gradient of its input.
    """
    if not (block.training and getattr(block, "gradient_checkpointing", False)):
        return
    has_trainable = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters())
    if has_trainable or hidden.requires_grad:
        raise UnsupportedSetupError(
            "Gradient checkpointing runs the blocks of the tower a second time, without the state of their merges. "
            "Switch it off for the vision tower."
        )
