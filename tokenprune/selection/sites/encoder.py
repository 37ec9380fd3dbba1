# SPDX-License-Identifier: Apache-2.0
"""Base classes of methods that merge or drop tokens inside the vision tower, block by block (IN_ENCODER)."""

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

VTU_FORMS = ("off", "expanded")  # forms of virtual token unmerging
Matcher = Callable[["Tensor", list[int] | None], Merge | None]


@dataclass(frozen=True)
class Tower:
    """Sizes of a vision tower, known before it runs.

    Args:
        tokens: Number of tokens of an image that enter the first block, including `protected`. If several patches form
            one visual token and merge together, such a unit counts as one token, and a class token is not counted.
        protected: Number of class and register tokens. They come first.
        blocks: Number of blocks.
        blocks_read: Number of leading blocks whose output the model uses.
        module: Tower module, for its fingerprint.
        unit: Number of patches per unit, for towers with a grid of patches.
        num_kept: Number of patches to keep if the budget is split over the tiles of an image. None: use the budget.

    Examples:
        >>> Tower(tokens=577, protected=1, blocks=24, blocks_read=23).count_kept(tokenprune.Budget(keep=0.5))
        288
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
        """Number of tokens without class and register tokens."""
        return self.tokens - self.protected

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the architecture and the weights."""
        assert self.module is not None  # engines set it
        facts = {"unit": self.unit} if self.unit > 1 else {}
        return Fingerprint.from_module(self.module, read=self.blocks_read, protected=self.protected, **facts)

    def with_tokens(self, tokens: int, num_kept: int | None = None) -> Tower:
        """Return a copy of the tower for images with a different number of tokens. See `Tower` for the arguments."""
        other = replace(self, tokens=tokens, num_kept=num_kept)
        if "fingerprint" in self.__dict__:  # computing it reads all weights
            other.__dict__["fingerprint"] = self.fingerprint
        return other

    def count_kept(self, budget: Budget) -> int:
        """Return the number of patches of an image that `budget` keeps."""
        if self.num_kept is not None:
            return self.num_kept
        return budget.resolve_keep(self.patches)


@dataclass(frozen=True)
class TowerMethod(Method):
    """Base class of all methods inside the vision tower. By default, no token is merged."""

    site: ClassVar[Site] = Site.IN_ENCODER
    # Not annotated, so these are options only if a subclass makes them fields. See `EncoderMethod`.
    proportional, ragged, reads, drops = False, False, "", False

    @property
    def calibrated_for(self) -> Fingerprint | None:
        """Fingerprint of the tower that the method was calibrated for. None if it needs no calibration."""
        return None

    def is_identity(self, budget: Budget) -> bool:
        """Return True if no token is merged or dropped, so that the tower needs no patch.

        Raises:
            OptionError: If the budget contradicts the options.
        """
        return budget.is_identity()

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return the matcher of each block. See `EncoderMethod.plan`."""
        return [None] * tower.blocks


@dataclass(frozen=True)
class EncoderMethod(TowerMethod):
    """Base class of methods that merge tokens inside the vision tower, between attention and MLP of each block.

    A subclass implements `plan`. Its matchers receive the keys of a block, and never a model. The engine handles
    features, token sizes, padding, and the way back to the full grid.

    Attributes:
        proportional: True if the logarithm of a token's size is added to its attention logits. A field makes it an
            option, as for `vtu`.
        ragged: True if images of a batch may merge different numbers of tokens. Short rows are then padded, which
            requires an attention implementation with masks.
        reads: Name of a tower observable that matchers receive instead of keys, shape (B, C, patches), float32. Only
            towers with one row per image and one visual token per patch support it.
        drops: True if the matchers drop tokens instead of merging them.
        vtu: Virtual unmerging of the merged tokens in the decoder, one of `VTU_FORMS`.

    Examples:
        >>> from functools import partial
        >>> from tokenprune.kernels.merging import bipartite_match
        >>> class MergeInFirstBlock(EncoderMethod):
        ...     def plan(self, budget, tower):
        ...         count = tower.patches - tower.count_kept(budget)
        ...         match = lambda keys, counts: bipartite_match(keys, count, tower.protected)
        ...         return [match] + [None] * (tower.blocks - 1)
        >>> plan = MergeInFirstBlock().plan(tokenprune.Budget(keep=0.75), Tower(17, 1, 4, 4))
        >>> len(plan), plan[1]
        (4, None)
    """

    proportional, vtu = True, "off"

    @property
    def inexact(self) -> str | None:
        """Reason why an image may keep more or fewer patches than `keep`, and which option changes that.

        For example "r sets the number of merges. Leave r out.". None if the count is always exact.
        """
        return "the method chooses the number of patches. Use a method such as tome."

    def check_served(self, kind: str, dtype: str, blocks: int) -> None:
        """Raise OptionError if the method does not support a tower that a serving engine runs.

        A serving engine stores the weights in another form, so only these facts are known.

        Args:
            kind: Class name of the tower blocks.
            dtype: Data type, such as "bfloat16".
            blocks: Number of blocks.
        """

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return the matcher of each block of the tower. None if a block merges no token.

        `patch` and each forward call this method. A matcher takes the keys of a block, shape (B, n, Dh), float32,
        averaged over the heads, and the number of tokens in each row (followed by padding), or None if there is no
        padding. It returns a `Merge`, or None to merge no token. See `tokenprune.kernels.merging`. The entries from
        `tower.blocks_read` on must be None.

        Raises:
            BudgetError: If the method cannot reach the budget.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement plan()")
