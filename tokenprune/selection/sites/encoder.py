# SPDX-License-Identifier: Apache-2.0
"""Bases of methods in the vision tower, and of those that choose the tokens to merge, block by block (IN_ENCODER)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from tokenprune.budgets import Budget
from tokenprune.kernels.merging import Merge
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection.method import Method, Site

if TYPE_CHECKING:
    from torch import Tensor, nn

VTU_FORMS = ("off", "expanded")  # of virtual token unmerging
Matcher = Callable[["Tensor", list[int] | None], Merge | None]


@dataclass(frozen=True)
class Tower:
    """Facts about a vision tower, known before it runs.

    tokens: that enter an image's first block, `protected` (class, register) ones included; these come first. Where
    several patches become one visual token and merge as one, such a unit is a token here, and a class token beside it
    is left out. blocks: how many there are; read: how many of them, from the first, reach anyone with their output.
    module: what the fingerprint is taken of. unit: patches in a unit of a tower whose patches stand on a grid. wanted:
    patches to be left, where a budget was shared out over the tiles of an image; None: what the budget says.
    """

    tokens: int
    protected: int
    blocks: int
    blocks_read: int
    module: nn.Module | None = None
    unit: int = 1
    num_kept: int | None = None

    @property
    def patches(self) -> int:
        return self.tokens - self.protected

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Tells this tower, with its weights, from others."""
        assert self.module is not None  # engines give it
        facts = {"unit": self.unit} if self.unit > 1 else {}
        return Fingerprint.from_module(self.module, read=self.blocks_read, protected=self.protected, **facts)

    def with_tokens(self, tokens: int, num_kept: int | None = None) -> Tower:
        """Return the same tower for images of which `tokens` enter."""
        other = replace(self, tokens=tokens, num_kept=num_kept)
        if "fingerprint" in self.__dict__:  # it takes a look at all weights
            other.__dict__["fingerprint"] = self.fingerprint
        return other

    def count_kept(self, budget: Budget) -> int:
        """Return how many patches `budget` leaves of an image."""
        if self.num_kept is not None:
            return self.num_kept
        return budget.resolve_keep(self.patches)


@dataclass(frozen=True)
class TowerMethod(Method):
    """Base of the methods that act inside the vision tower; nothing merges in its blocks, unless a subclass says so."""

    site: ClassVar[Site] = Site.IN_ENCODER
    # Not annotated: these are no options, unless a subclass makes them fields; see `EncoderMethod`.
    proportional, ragged, reads, drops = False, False, "", False

    @property
    def calibrated_for(self) -> Fingerprint | None:
        """Fingerprint of the tower that the method was calibrated for; None if it is not calibrated."""
        return None

    def is_identity(self, budget: Budget) -> bool:
        """Return whether nothing merges or leaves, so that the tower is left alone; raise OptionError for a budget that
        contradicts the options."""
        return budget.is_identity()

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return what finds the merge of each of the tower's blocks; see `EncoderMethod.plan`."""
        return [None] * tower.blocks


@dataclass(frozen=True)
class EncoderMethod(TowerMethod):
    """Base of the methods that merge tokens inside the vision tower, in each block between attention and MLP.

    A subclass implements `plan`. It sees the keys of a block's attention and never a model; features, sizes, padding
    and the way back to the full grid are the engine's.

    proportional: add the logarithm of a token's size to its attention logits; make it a field to offer the choice.
    ragged: whether images of one batch may merge different numbers of tokens. Then short rows are padded, which takes
    an attention that can mask padding.
    reads: name of an observable of a tower's block that matchers get in the place of keys, float32 `[B, C, patches]`,
    for methods that drop by it. Only towers whose images have rows of their own, of patches that each become a visual
    token, show one. drops: True in a subclass whose matchers drop by keys.
    vtu: virtual unmerging of the merged tokens in the decoder, one of `VTU_FORMS`; make it a field to offer the choice.
    """

    proportional, vtu = True, "off"

    @property
    def inexact(self) -> str | None:
        """Why an image may keep another number of patches than `keep` asks for, and which option changes that, as in "r
        sets the number of merges. Leave r out."; None if every image keeps that number."""
        return "the method decides how many patches an image keeps. Use a method such as tome."

    def check_served(self, kind: str, dtype: str, blocks: int) -> None:
        """Raise OptionError if the method cannot merge in a tower of which no more than this is known: a serving engine
        keeps the weights in another form. kind: class of its blocks. dtype: such as "bfloat16"."""

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return what finds the merge of each of the tower's blocks; None where a block merges nothing.

        A matcher takes the keys of a block's attention, float32 `[B, n, Dh]` (mean over the heads), and the number of
        real tokens in each row (the others are padding, after them), or None if all are real. It returns the `Merge`,
        or None if nothing merges (see `kernels.merging`). Called when the model is patched, and in each forward.
        Blocks from `tower.blocks_read` on show no keys: theirs is None. Raises BudgetError for what cannot be reached.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement plan()")
