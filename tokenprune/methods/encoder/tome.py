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
    """Merge the most similar tokens inside the vision tower, in each block between attention and MLP.

    r: tokens to merge in each block: an int; a list with one number for each block (missing ones are 0); or a tuple
    (r, slope) with a slope from -1 (first block 2r, last 0) over 0 (constant) to 1. Without r, `keep` decides: the
    smallest constant r that leaves this share of the patches (or this many).
    proportional: add the logarithm of a token's size to its attention logits, so that a merged token counts as often as
    its members did. Turn it off for towers that were trained without supervision (MAE).

    Source: Bolya et al., "Token Merging: Your ViT But Faster", section 3.

    Differs from the paper: at the tower's end every patch gets the feature of its merged token back, so that projectors
    see a full grid; the language model then sees one token for each merged one, at the position of its first patch.
    """

    r: int | list | tuple | None = None
    proportional: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.r is None or _is_count(self.r)
        if isinstance(self.r, list):
            good = all(map(_is_count, self.r))
        elif isinstance(self.r, tuple):
            good = len(self.r) == 2 and _is_count(self.r[0]) and isinstance(self.r[1], numbers.Real)
            good = good and -1 <= self.r[1] <= 1
        self._check(good, f"r={self.r!r} must be an int >= 0, a list of them, or (r, slope) with a slope in [-1, 1]")

    def is_identity(self, budget: Budget) -> bool:
        """Return True if nothing merges; raise OptionError for a budget that contradicts `r`."""
        self._check(not (budget.is_identity() and self.r), f"keep=1.0 merges nothing, r={self.r!r} does: leave out one")
        return budget.is_identity()

    @property
    def inexact(self) -> str | None:
        return None if self.r is None else "r sets the number of merges. Leave r out, and set keep."

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return what merges the schedule's number of tokens in each block."""
        return [_matcher(r, tower.protected) if r else None for r in self.schedule(budget, tower)]

    def schedule(self, budget: Budget, tower: Tower) -> list[int]:
        """Return how many tokens each of a tower's blocks merges.

        Raises BudgetError for a share that halving in every block cannot reach.
        """
        if self.r is None:
            wanted = tower.patches - tower.count_kept(budget)
            plan = _smallest_constant(wanted, tower.tokens, tower.protected, tower.blocks_read)
        else:
            plan = self._given(tower.blocks)
        left, merged = tower.tokens, []
        for index in range(tower.blocks):
            merged.append(
                min(plan[index], max_merges(left, tower.protected)) if index < min(tower.blocks_read, len(plan)) else 0
            )
            left -= merged[-1]
        return merged

    def _given(self, blocks: int) -> list[int]:
        if isinstance(self.r, list):
            self._check(len(self.r) <= blocks, f"r has {len(self.r)} entries, but the tower has only {blocks} blocks")
            return self.r + [0] * (blocks - len(self.r))
        r, slope = self.r if isinstance(self.r, tuple) else (self.r, 0)
        first = int(r * (1 - slope))
        step = 2 * (r - first) / max(1, blocks - 1)
        return [int(first + step * index) for index in range(blocks)]


def _matcher(r: int, protected: int) -> Matcher:
    return lambda keys, counts: bipartite_match(keys, r, protected)  # all rows have as many tokens


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def _smallest_constant(wanted: int, count: int, protected: int, blocks: int) -> list[int]:
    """Return the smallest number that, merged in every block as far as possible, adds up to `wanted`."""
    for r in range(-(-wanted // max(1, blocks)), count):
        left = count
        plan: list[int] = []
        for _ in range(blocks):
            plan.append(min(r, max_merges(left, protected), wanted - sum(plan)))
            left -= plan[-1]
        if sum(plan) == wanted:
            return plan
        if r >= max_merges(count, protected):
            break
    raise BudgetError(
        f"tome cannot leave {count - protected - wanted} of {count - protected} patches: a block merges at most half "
        f"of its tokens, so after the {blocks} blocks that count {left - protected} are left; ask for more"
    )
