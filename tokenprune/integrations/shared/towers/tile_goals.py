# SPDX-License-Identifier: Apache-2.0
"""Goals of tiles, for models that crop tiles after the tower and add newlines (LLaVA-NeXT, LLaVA-OneVision).

A budget counts the tokens of an image in the decoder: its newlines, which are always kept, and the patches of its tiles
that are not cropped. These patches follow from the image size, so they are known before the tower runs: the model's
packing is run on ids. The tokens without newlines are distributed over the tiles in proportion to their shown patches.
Cropped patches merge only with each other, so they do not change the count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenprune.errors import BudgetError
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures
from tokenprune.integrations.shared.towers.parts import PartMatcher, Plan
from tokenprune.kernels.merging import max_merges
from tokenprune.selection.sites.encoder import Tower

# Mask of the cropped patches of a tile, shape (patches,), bool, and the numbers of kept patches: shown, cropped.
Goal = tuple[Tensor, list[int]]


def compute_tile_goals(
    packed: PackedFeatures, image: Tensor, tiles: int, num_kept: int, read: int, description: str
) -> list[Goal]:
    """Return the goal of each tile of an image.

    Args:
        packed: Ids of the features after packing.
        image: Packed ids of the image, an entry of `packed.images`.
        num_kept: Number of kept tokens of the image, including newlines.
        read: Number of blocks in which a tile can merge.
        description: The method and its budget, for messages.

    Raises:
        BudgetError: If a tile would keep no token.
    """
    ids = packed.get_feature_ids(image)
    patches = ids[ids >= 0]
    first = int(patches.min()) // packed.tokens_per_tile
    shown = torch.zeros(tiles, packed.tokens_per_tile, dtype=torch.bool, device="cpu")
    shown.view(-1)[patches - first * packed.tokens_per_tile] = True
    counts = shown.sum(1).tolist()
    target = num_kept - int((ids < 0).sum())
    if target < sum(map(bool, counts)):
        raise BudgetError(
            f"{description} keeps {max(0, target)} tokens besides the {len(ids) - sum(counts)} newlines of an image of "
            f"{len(ids)} tokens, and each of its {sum(map(bool, counts))} tiles needs one. Increase keep."
        )
    shares = distribute(target, counts)
    return [
        (~row, [share, _count_cropped(packed.tokens_per_tile - count, target / sum(counts), read)])
        for row, count, share in zip(shown, counts, shares, strict=True)
    ]


def build_tile_matcher(goals: Sequence[Goal], tower: Tower, plan: Callable[[Tower], Plan]) -> PartMatcher:
    """Return a matcher that merges the shown and the cropped patches of each tile separately.

    Args:
        plan: Returns the matchers of all blocks for a part of a tile, described as a tower.

    Raises:
        BudgetError: If a goal cannot be reached.
    """

    def build_plan(patches: int, target: int) -> Plan:
        return plan(tower.with_tokens(patches + tower.protected, target)) if target < patches else [None] * tower.blocks

    cropped = torch.stack([row for row, _ in goals]).long()
    part_index = cropped + 2 * torch.arange(len(goals), device="cpu")[:, None]
    counts = torch.bincount(part_index.flatten(), minlength=2 * len(goals)).tolist()
    row = [part // 2 for part in range(len(counts))]
    part_index = torch.nn.functional.pad(part_index, (tower.protected, 0), value=-1)
    return PartMatcher(
        counts, [target for _, targets in goals for target in targets], build_plan, row, part_index, tower.protected
    )


def _count_cropped(count: int, share: float, read: int) -> int:
    """Return the number of kept cropped patches of a tile: the same share as of its shown patches.

    A block can at most halve them, so the number may be larger.
    """
    minimum = count
    for _ in range(read):
        minimum -= max_merges(minimum)
    return max(minimum, round(share * count))


def distribute(total: int, counts: list[int]) -> list[int]:
    """Distribute `total` in proportion to `counts`.

    Each part is at most its count, and at least 1 if its count is not 0.
    """
    shares = [min(count, max(1, total * count // sum(counts))) if count else 0 for count in counts]
    while (missing := total - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        can = [i for i, (share, count) in enumerate(zip(shares, counts, strict=True)) if 1 <= share + step <= count]
        if not can:
            break
        # Change the part that is furthest from its proportion.
        best = max(can, key=lambda i: step * (total * counts[i] / sum(counts) - shares[i]))
        shares[best] += step
    return shares
