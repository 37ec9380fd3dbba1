# SPDX-License-Identifier: Apache-2.0
"""Hooks that merge tokens inside the blocks of a vision transformer, whichever library the blocks come from.

A block computes x + attention(norm(x)), then x + mlp(norm(x)). The merge sits between the two. No forward is replaced:
a hook hands the second norm the merged tokens, so that the MLP runs on these alone; a hook after the MLP adds its
result to them, which is the block's output, and hands the block a zero to add to the tokens before the merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, UnsupportedSetupError
from tokenprune.integrations.shared.attachable import Attachable, hidden_states, states
from tokenprune.integrations.shared.squares import Squares
from tokenprune.ops.merging import Merge
from tokenprune.sites.encoder import EncoderMethod, Matcher, Tower


@dataclass(frozen=True)
class Block:
    """A pre-norm block: `norm` and `end` are the first and the last module of its MLP branch; `mask` is the name, and
    `mask_place` the place, of the argument that is added to its attention logits; `scale` is the name of the parameter
    that multiplies what `end` returns, if there is one."""

    module: nn.Module
    norm: nn.Module
    end: nn.Module
    mask: str = ""
    mask_place: int = 0
    scale: str = ""


@dataclass
class Merging:
    """One forward of a tower. N tokens enter in each of B rows. n are left so far in the row that has most; the others
    are padded to it, after their tokens.

    plan: what finds the merge of each block. owners: after each block (first: before any) long `[B, N]`, for each token
    that entered the one that it is part of. left: tokens in each row so far; counts: these, as they entered each block.
    size: float32 `[B, n]`, tokens that each is made of, 0 for padding; None before a merge. masked: whether `size` is 0
    for tokens that the tower masks, too. drops: whether tokens were dropped, whose owner is -1. ordered: whether
    patches stand unit by unit (of towers with units). added: what is added to the attention logits of the block that
    runs.
    """

    plan: list[Matcher | None]
    owners: list[Tensor]
    left: list[int]
    size: Tensor | None = None
    masked: bool = False
    drops: bool = False
    ordered: bool = False
    added: Tensor | None = None
    keys: Tensor | None = None
    merged: Tensor | None = None
    output: Tensor | None = None
    counts: list[list[int]] = field(default_factory=list)

    @property
    def padded(self) -> bool:
        """True if the rows differ in length."""
        return len(set(self.left)) > 1

    def bias(self, proportional: bool, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to attention logits, `[B, 1, 1, n]`; None for nothing. Padding gets log(0) = -inf."""
        if self.size is None or not (proportional or self.padded or self.masked):
            return None
        size = self.size if proportional else (self.size > 0).float()
        return size.log().to(dtype)[:, None, None, :]

    def restore(self, x: Tensor, stage: int = -1) -> Tensor:
        """`[B, n, D]` -> `[B, N, D]`: every token that entered gets the feature of the one it is part of; zeros if
        it was dropped."""
        owner = self.owners[stage]
        if owner is self.owners[0]:
            return x
        owner = owner.to(x.device).unsqueeze(-1)
        full = x.gather(1, owner.clamp(min=0).expand(-1, -1, x.shape[-1]))
        return full.masked_fill_(owner < 0, 0) if self.drops else full


class Merger(Attachable):
    """Attached to the blocks of one tower, in their order; the state of a forward is kept per thread.

    tower: what the method knows of it; its `tokens` are those of an image as the config has it. units: the patches that
    merge as one, which are tokens to the method; None where each patch is for itself. shows: whether blocks show more
    than keys (`EncoderMethod.reads`).
    Raises BudgetError for a budget that is neither a share nor a number of tokens, or that cannot be reached;
    UnsupportedSetupError for a method that reads what the tower does not show.
    """

    shows = False

    def __init__(
        self,
        method: EncoderMethod,
        budget: Budget,
        blocks: Sequence[Block],
        tower: Tower,
        units: Squares | None = None,
    ) -> None:
        super().__init__()
        if budget.keep is None or budget.per != "image":
            raise BudgetError(
                f"{method.name} acts in the encoder, where each image is for itself: keep is a share of its "
                f"patches or a number of them, not {budget}"
            )
        if method.reads and (not self.shows or units is not None):
            raise UnsupportedSetupError(
                f"{method.name} drops patches inside the tower by {method.reads}, which takes a CLIP or SigLIP tower "
                "that sees an image as one tile, and each of whose patches becomes a visual token; use a method after "
                "the tower, or leave out the option"
            )
        self.method, self.budget, self.blocks, self.shape = method, budget, list(blocks), tower
        self.units = units
        self.plan(tower.tokens)  # raises what cannot be reached

    # -- attaching

    def _attach(self) -> None:
        for index, block in enumerate(self.blocks):
            self._surround(index, block.module)
            self.hook(block.norm.register_forward_pre_hook, partial(self._merge, index))
            self.hook(block.end.register_forward_hook, partial(self._leave_branch, block))

    def _surround(self, index: int, module: nn.Module) -> None:
        """See to it that a block begins with `_enter_block`, and ends with `_leave_block`."""
        self.hook(module.register_forward_pre_hook, partial(self._enter_block, index), with_kwargs=True)
        # Before the hooks of others: what they see is the block's output.
        self.hook(module.register_forward_hook, self._leave_block, prepend=True)

    def detach(self) -> None:
        """Remove everything that `attach` installed."""
        self.end()
        super().detach()

    # -- the state of this thread

    def state(self) -> Merging | None:
        return states().get(self)

    def end(self) -> Merging | None:
        """Forget this thread's state and return it."""
        return states().pop(self, None)

    def plan(self, count: int) -> list[Matcher | None]:
        """Return the matcher of each block, for `count` tokens that enter; None where a block merges nothing."""
        tower = self.shape if count == self.shape.tokens else self.shape.of(count)
        return self.method.plan(self.budget, tower)

    def plan_of(self, rows: int, count: int) -> list[Matcher | None]:
        """Return the plan of a forward with `rows` images, of each of which `count` tokens enter."""
        return self.plan(count if self.units is None else self.units.count(count))

    # -- hooks

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        hidden = hidden_states(args, kwargs)
        if index == 0:
            rows, count = hidden.shape[:2]
            owner = torch.arange(count, device=hidden.device).expand(rows, -1)
            states()[self] = Merging(self.plan_of(rows, count), [owner], [count] * rows)
        state = self.state()
        if state is None:
            return None
        check_checkpointing(module, hidden)
        state.keys = state.merged = state.output = state.added = None
        state.counts.append(state.left)
        bias = state.bias(self.method.proportional, hidden.dtype)
        if bias is None:
            return None
        state.added = bias.to(hidden.device)
        return self._with_bias(index, state.added, args, kwargs)

    def _with_bias(self, index: int, bias: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """See to it that `bias` `[B, 1, 1, n]` is added to a block's attention logits; returns the block's arguments,
        or None to leave them."""
        block = self.blocks[index]
        given = args[block.mask_place] if len(args) > block.mask_place else kwargs.get(block.mask)
        if given is not None:
            raise UnsupportedSetupError(f"{self.method.name}: the tower's blocks got an attention mask of their own")
        if len(args) > block.mask_place:
            return (*args[: block.mask_place], bias, *args[block.mask_place + 1 :]), kwargs
        return args, kwargs | {block.mask: bias}

    def note_keys(self, index: int, keys: Tensor) -> None:
        """keys: `[B, H, n, Dh]` of the attention of a block, or what the method reads of it."""
        state = self.state()
        if state is not None and state.plan[index] is not None:
            state.keys = keys

    def _merge(self, index: int, module: nn.Module, args: tuple) -> tuple | None:
        state = self.state()
        if state is None:
            return None
        owner = state.owners[-1]
        state.owners.append(owner)
        match = state.plan[index]
        if match is None:
            return None
        if state.keys is None:
            raise UnsupportedSetupError(f"{self.method.name}: block {index} of the tower showed no attention keys")
        with torch.no_grad():
            merge = self._find(match, state.keys, state)
        state.keys = None
        if merge is None:
            return None
        hidden = args[0]
        if state.size is None:
            state.size = torch.ones(hidden.shape[:2], dtype=torch.float32, device=hidden.device)
        state.merged = merge.mean(hidden, state.size)
        state.size = merge.sum(state.size)
        state.owners[-1] = merge.assign.gather(1, owner.clamp(min=0))
        if merge.drops or state.drops:
            state.owners[-1].masked_fill_(owner < 0, -1)
            state.drops = True
        state.left = merge.left or [merge.keep.shape[1]] * len(state.left)
        return (state.merged, *args[1:])

    def _find(self, match: Matcher, noted: Tensor, state: Merging) -> Merge | None:
        """Return the merge of the block whose keys, or what else matchers read, were `noted`."""
        left = state.left if state.padded else None
        if self.method.reads:
            return match(noted, left)
        keys = noted.float().mean(dim=1)
        if self.units is None:
            return match(keys, left)
        order = None if state.ordered else self.units.order(keys.shape[1], keys.device)
        merge = match(self.units.fold(keys, order), self.units.left(left))
        if merge is None:
            return None
        state.ordered = True
        return self.units.spread(merge, order)

    def _leave_branch(self, block: Block, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        state = self.state()
        if state is None or state.merged is None:
            return None
        scale = getattr(block.module, block.scale, None) if block.scale else None
        state.output = state.merged + (output if scale is None else scale * output)
        state.merged = None
        return output.new_zeros(1)

    def _leave_block(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = self.state()
        if state is None or state.output is None:
            return None
        merged, state.output = state.output, None
        return (merged, *output[1:]) if isinstance(output, tuple) else merged


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
