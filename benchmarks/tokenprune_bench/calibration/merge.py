# SPDX-License-Identifier: Apache-2.0
"""Merging during calibration: in each block the most similar pairs of a whole batch, as many as the schedule says.

The similarity of the first pair that does not merge is the block's threshold for this batch.
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
    """Merge a fixed number of tokens a block, shared out among a batch's images, and note the thresholds.

    found: those of the last batch, for each block, one for each size of images in it.
    """

    name: ClassVar[str] = "dymu"
    ragged = True

    schedule: str = "constant"
    found: dict[int, list[float]] = field(default_factory=dict)

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return what merges the schedule's number of tokens in each block, and notes the threshold."""
        counts = merges_per_block(tower, tower.count_kept(budget), self.schedule)
        return [partial(self._match, i, r, tower.protected) if r else None for i, r in enumerate(counts)]

    def thresholds(self, blocks: int) -> Tensor:
        """Return the last batch's threshold of each of a tower's blocks, float64; 1.0 where nothing could merge."""
        means = [sum(self.found[i]) / len(self.found[i]) if i in self.found else 1.0 for i in range(blocks)]
        return torch.tensor(means, dtype=torch.float64, device="cpu")

    def _match(self, block: int, r: int, protected: int, keys: Tensor, counts: list[int] | None) -> Merge | None:
        best, partner = best_partners(keys, protected, counts)
        counts = counts or [keys.shape[1]] * len(keys)
        caps = torch.tensor([max_merges(count, protected) for count in counts], device=best.device)
        ranked = best.sort(dim=1, descending=True, stable=True).values
        # In an image of odd length there may be one source more than half of it.
        allowed = torch.arange(ranked.shape[1], device=best.device) < caps[:, None]
        values, places = ranked.masked_fill(~allowed, -torch.inf).flatten().sort(descending=True, stable=True)
        edges = min(r * len(counts), int(caps.sum()))
        first_left = float(values[edges]) if edges < len(values) else 0.0
        self.found.setdefault(block, []).append(max(0.0, first_left))
        shares = (places[:edges] // ranked.shape[1]).bincount(minlength=len(counts))
        return ragged_merge(best, partner, shares.tolist(), protected, counts)


def merges_per_block(tower: Tower, left: int, schedule: str) -> list[int]:
    """Return how many tokens each block merges so that `left` patches of an image are left.

    schedule: "constant" (what is over goes to the first blocks), "linear" (falling to 0) or "reverse_linear". What a
    block cannot merge, because it merges at most half of its tokens, goes to the others in the same proportions. Blocks
    whose output is not read merge nothing. Raises BudgetError for fewer patches than halving in each block leaves.
    """
    wanted, blocks = tower.patches - left, tower.blocks_read
    most_of_all = tower.tokens * blocks**2  # every block that takes part is asked for more than it can
    reach = sum(_capped(_shares(most_of_all, blocks, schedule), tower))
    if wanted > reach:
        raise BudgetError(
            f"dymu cannot leave {left} of {tower.patches} patches with schedule={schedule!r}: a block merges at most "
            f"half of its tokens, so the {blocks} blocks that count leave {tower.patches - reach} at least; keep more"
        )
    total = wanted
    while sum(counts := _capped(_shares(total, blocks, schedule), tower)) < wanted:
        total += 1
    for block in reversed(range(blocks)):  # one more in all may be two more here
        counts[block] -= min(counts[block], sum(counts) - wanted)
    return counts + [0] * (tower.blocks - blocks)


def _shares(total: int, blocks: int, schedule: str) -> list[int]:
    """Whole numbers in the schedule's proportions that add up to `total`."""
    if schedule == "constant" or blocks < 2:
        share, over = divmod(total, max(1, blocks))
        return [share + (block < over) for block in range(blocks)]
    # Their running sums are those of (blocks - 1), ..., 1, 0, scaled and rounded.
    whole = blocks * (blocks - 1) // 2
    sums = [total * (whole - (blocks - block) * (blocks - block - 1) // 2) for block in range(blocks + 1)]
    counts = [after - before for before, after in pairwise((2 * part + whole) // (2 * whole) for part in sums)]
    return counts if schedule == "linear" else counts[::-1]


def _capped(counts: list[int], tower: Tower) -> list[int]:
    left, capped = tower.tokens, []
    for count in counts:
        capped.append(min(count, max_merges(left, tower.protected)))
        left -= capped[-1]
    return capped
