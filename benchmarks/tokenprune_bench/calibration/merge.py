# SPDX-License-Identifier: Apache-2.0
"""Merging during calibration: each block merges the most similar pairs of a batch, in the number of the schedule.

The similarity of the first pair that is not merged is the block's threshold for this batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.kernels.merging import Merge, best_partners, max_merges, ragged_merge
from tokenprune.selection.sites.encoder import EncoderMethod, Matcher, Tower

SCHEDULES = ("constant", "linear", "reverse_linear")


@dataclass(frozen=True)
class Calibrator(EncoderMethod):
    """Merge a fixed number of tokens per block, shared among the images of a batch, and record the thresholds.

    Attributes:
        schedule: Schedule of the merged tokens per block, see `count_merges`.
        batch_thresholds: Thresholds of the last batch by block, one per image size in the batch.
    """

    name: ClassVar[str] = "dymu"
    ragged = True

    schedule: str = "constant"
    batch_thresholds: dict[int, list[float]] = field(default_factory=dict)

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return one matcher per block. A matcher merges the scheduled number of tokens and records the threshold."""
        counts = count_merges(tower, tower.count_kept(budget), self.schedule)
        return [partial(self._match, i, r, tower.protected) if r else None for i, r in enumerate(counts)]

    def thresholds(self, blocks: int) -> Tensor:
        """Return the last batch's threshold of each block, float64. 1.0 for blocks that cannot merge."""
        means = [
            sum(self.batch_thresholds[i]) / len(self.batch_thresholds[i]) if i in self.batch_thresholds else 1.0
            for i in range(blocks)
        ]
        return torch.tensor(means, dtype=torch.float64, device="cpu")

    def _match(self, block: int, r: int, protected: int, keys: Tensor, counts: list[int] | None) -> Merge | None:
        best, partner = best_partners(keys, protected, counts)
        counts = counts or [keys.shape[1]] * len(keys)
        caps = torch.tensor([max_merges(count, protected) for count in counts], device=best.device)
        ranked = best.sort(dim=1, descending=True, stable=True).values
        # An image with an odd number of tokens can have one source more than it may merge.
        allowed = torch.arange(ranked.shape[1], device=best.device) < caps[:, None]
        values, order = ranked.masked_fill(~allowed, -torch.inf).flatten().sort(descending=True, stable=True)
        edges = min(r * len(counts), int(caps.sum()))
        first_left = float(values[edges]) if edges < len(values) else 0.0
        self.batch_thresholds.setdefault(block, []).append(max(0.0, first_left))
        shares = (order[:edges] // ranked.shape[1]).bincount(minlength=len(counts))
        return ragged_merge(best, partner, shares.tolist(), protected, counts)


def count_merges(tower: Tower, left: int, schedule: str) -> list[int]:
    """Return the number of tokens that each block merges so that `left` patches of an image remain.

    A block merges at most half of its tokens. The other blocks take the excess in the same proportions. Blocks with
    unread outputs merge no tokens.

    Args:
        tower: Shape of the tower.
        left: Number of patches to keep.
        schedule: "constant" (the remainder goes to the first blocks), "linear" (falling to 0) or "reverse_linear".

    Raises:
        BudgetError: If halving in each block keeps more patches than `left`.
    """
    target, blocks = tower.patches - left, tower.blocks_read
    upper = tower.tokens * blocks**2  # more than any block can merge
    reach = sum(_limit_counts(_split_total(upper, blocks, schedule), tower))
    if target > reach:
        raise BudgetError(
            f"dymu cannot keep only {left} of {tower.patches} patches with schedule={schedule!r}: {blocks} blocks that "
            f"halve their tokens keep at least {tower.patches - reach}. Increase keep."
        )
    total = target
    while sum(counts := _limit_counts(_split_total(total, blocks, schedule), tower)) < target:
        total += 1
    for block in reversed(range(blocks)):  # raising the total by one can raise the sum by more
        counts[block] -= min(counts[block], sum(counts) - target)
    return counts + [0] * (tower.blocks - blocks)


def _split_total(total: int, blocks: int, schedule: str) -> list[int]:
    """Split `total` into integers in the proportions of the schedule."""
    if schedule == "constant" or blocks < 2:
        share, over = divmod(total, max(1, blocks))
        return [share + (block < over) for block in range(blocks)]
    # The cumulative sums are the scaled and rounded cumulative sums of (blocks - 1), ..., 1, 0.
    denominator = blocks * (blocks - 1) // 2
    sums = [total * (denominator - (blocks - block) * (blocks - block - 1) // 2) for block in range(blocks + 1)]
    rounded = ((2 * part + denominator) // (2 * denominator) for part in sums)
    counts = [after - before for before, after in pairwise(rounded)]
    return counts if schedule == "linear" else counts[::-1]


def _limit_counts(counts: list[int], tower: Tower) -> list[int]:
    left, capped = tower.tokens, []
    for count in counts:
        capped.append(min(count, max_merges(left, tower.protected)))
        left -= capped[-1]
    return capped
