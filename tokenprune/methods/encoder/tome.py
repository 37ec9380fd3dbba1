# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.kernels.merging import bipartite_match, max_merges
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.encoder import EncoderMethod, Matcher, Tower


@register("tome", site=Site.IN_ENCODER, paper="arXiv 2210.09461, ICLR 2023", merges=True)
@dataclass(frozen=True)
class ToMe(EncoderMethod):
    """Merge the most similar tokens inside the vision tower (ToMe).

    Tokens merge in each block, between attention and MLP, by bipartite soft matching of their keys. Without `r`, `keep`
    decides: the smallest constant `r` that leaves this share or number of patches.

    Args:
        r: Number of tokens merged per block: an int, a list with one number per block (missing entries are 0), or a
            tuple (r, slope) with a slope in [-1, 1]. -1 merges 2r in the first block and 0 in the last; 0 is constant.
        proportional: Add the logarithm of a token's size to its attention logits, so that a merged token counts as
            often as its members. Disable it for towers trained without supervision (MAE).

    Source:
        Bolya et al., "Token Merging: Your ViT But Faster" (arXiv 2210.09461), section 3.

    Differences from the paper:
        - At the end of the tower every patch gets the feature of its merged token, so projectors receive a full grid.
          The language model sees one token per group, at the position of its first patch.

    Examples:
        >>> model = tokenprune.patch(model, ToMe(), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        128
    """

    r: int | list | tuple | None = None
    proportional: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = self.r is None or _is_count(self.r)
        if isinstance(self.r, list):
            is_valid = all(map(_is_count, self.r))
        elif isinstance(self.r, tuple):
            is_valid = len(self.r) == 2 and _is_count(self.r[0]) and isinstance(self.r[1], numbers.Real)
            is_valid = is_valid and -1 <= self.r[1] <= 1
        self._check(
            is_valid, f"r={self.r!r} must be an int >= 0, a list of ints, or (r, slope) with a slope in [-1, 1]"
        )

    def is_identity(self, budget: Budget) -> bool:
        """Return True if no tokens merge.

        Raises:
            OptionError: If the budget contradicts `r`.
        """
        conflict = budget.is_identity() and self.r
        self._check(not conflict, f"keep=1.0 merges no tokens, but r={self.r!r} does. Pass only one.")
        return budget.is_identity()

    @property
    def inexact(self) -> str | None:
        return None if self.r is None else "r sets the number of merges. Pass keep instead of r."

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return a matcher per block that merges the scheduled number of tokens."""
        return [_build_matcher(r, tower.protected) if r else None for r in self.schedule(budget, tower)]

    def schedule(self, budget: Budget, tower: Tower) -> list[int]:
        """Return the number of tokens that each block merges.

        Raises:
            BudgetError: If the budget is too small, because a block merges at most half of its tokens.
        """
        if self.r is None:
            num_merges = tower.patches - tower.count_kept(budget)
            plan = _find_smallest_constant(num_merges, tower.tokens, tower.protected, tower.blocks_read)
        else:
            plan = self._build_schedule(tower.blocks)
        num_tokens, merged = tower.tokens, []
        for index in range(tower.blocks):
            is_merging = index < min(tower.blocks_read, len(plan))
            merged.append(min(plan[index], max_merges(num_tokens, tower.protected)) if is_merging else 0)
            num_tokens -= merged[-1]
        return merged

    def _build_schedule(self, blocks: int) -> list[int]:
        if isinstance(self.r, list):
            self._check(len(self.r) <= blocks, f"r has {len(self.r)} entries, but the tower has {blocks} blocks")
            return self.r + [0] * (blocks - len(self.r))
        r, slope = self.r if isinstance(self.r, tuple) else (self.r, 0)
        first = int(r * (1 - slope))
        step = 2 * (r - first) / max(1, blocks - 1)
        return [int(first + step * index) for index in range(blocks)]


def _build_matcher(r: int, protected: int) -> Matcher:
    return lambda keys, counts: bipartite_match(keys, r, protected)  # all rows have the same number of tokens


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def _find_smallest_constant(num_merges: int, count: int, protected: int, blocks: int) -> list[int]:
    """Return the number of merges in each block, whose sum is `num_merges`.

    Each block merges r tokens, with the smallest r that reaches the sum. A block merges fewer if too few tokens remain,
    or if the sum is reached.

    Args:
        num_merges: Number of merges in all blocks.
        count: Number of tokens that enter the first block, including `protected`.
        protected: Number of class and register tokens, which are never merged.
        blocks: Number of blocks.

    Raises:
        BudgetError: If the blocks cannot merge so many tokens.
    """
    for r in range(-(-num_merges // max(1, blocks)), count):
        num_tokens = count
        plan: list[int] = []
        for _ in range(blocks):
            plan.append(min(r, max_merges(num_tokens, protected), num_merges - sum(plan)))
            num_tokens -= plan[-1]
        if sum(plan) == num_merges:
            return plan
        if r >= max_merges(count, protected):
            break
    raise BudgetError(
        f"tome cannot keep {count - protected - num_merges} of {count - protected} patches: {blocks} blocks that merge "
        f"at most half each leave {num_tokens - protected}. Pass a larger keep."
    )
