# SPDX-License-Identifier: Apache-2.0
"""The goal of each tile, where models crop tiles after their tower, and set rows apart by newlines (LLaVA-NeXT,
LLaVA-OneVision).

A budget is for an image as the decoder sees it: its newlines, which stay, and the patches of all its tiles that are not
cropped. Which these are follows from the image's size alone, so it is known before the tower runs: the model's own
packing is tried on numbers. The rest is shared out over the tiles in proportion to their patches. Patches that are
cropped merge among themselves, so that they change no count.
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

# Of a tile: which of its patches are cropped, bool `[patches]`, and how many of those that are not, and of those that
# are, are to be left.
Goal = tuple[Tensor, list[int]]


def compute_tile_goals(
    packed: PackedFeatures, image: Tensor, tiles: int, left: int, read: int, asked: str
) -> list[Goal]:
    """Return the goal of each of an image's tiles.

    image: the numbers of the image, of `packed`. tiles: how many it has. left: tokens to be left of the image, newlines
    included. read: blocks in which a tile can merge. asked: the method and its budget, for errors.
    Raises BudgetError where the newlines leave a tile nothing.
    """
    ids = packed.get_feature_ids(image)
    patches = ids[ids >= 0]
    first = int(patches.min()) // packed.tokens_per_tile
    shown = torch.zeros(tiles, packed.tokens_per_tile, dtype=torch.bool, device="cpu")
    shown.view(-1)[patches - first * packed.tokens_per_tile] = True
    counts = shown.sum(1).tolist()
    wanted = left - int((ids < 0).sum())
    if wanted < sum(map(bool, counts)):
        raise BudgetError(
            f"{asked} of an image of {len(ids)} tokens leaves {max(0, wanted)} beside its {len(ids) - sum(counts)} "
            f"newlines, and each of its {sum(map(bool, counts))} tiles needs one: keep more"
        )
    shares = distribute(wanted, counts)
    return [
        (~row, [share, _cropped(packed.tokens_per_tile - count, wanted / sum(counts), read)])
        for row, count, share in zip(shown, counts, shares, strict=True)
    ]


def build_tile_matcher(goals: Sequence[Goal], tower: Tower, plan: Callable[[Tower], Plan]) -> PartMatcher:
    """Return what merges the tiles of a forward so that each reaches its goal: of each what is shown, then what is
    cropped. plan: of a tile's part, which it sees as the tower of an image. Raises BudgetError for goals that cannot be
    reached."""

    def plan_of(patches: int, wanted: int) -> Plan:
        return plan(tower.with_tokens(patches + tower.protected, wanted)) if wanted < patches else [None] * tower.blocks

    cropped = torch.stack([row for row, _ in goals]).long()
    place = cropped + 2 * torch.arange(len(goals), device="cpu")[:, None]
    counts = torch.bincount(place.flatten(), minlength=2 * len(goals)).tolist()
    row = [part // 2 for part in range(len(counts))]
    place = torch.nn.functional.pad(place, (tower.protected, 0), value=-1)
    return PartMatcher(counts, [wanted for _, both in goals for wanted in both], plan_of, row, place, tower.protected)


def _cropped(count: int, share: float, read: int) -> int:
    """Return how many of a tile's cropped patches to leave: the share of the others, or as near as halving blocks
    come."""
    least = count
    for _ in range(read):
        least -= max_merges(least)
    return max(least, round(share * count))


def distribute(total: int, counts: list[int]) -> list[int]:
    """Share `total` out in proportion to `counts`: at least 1 to each that is not 0, at most as much as there is."""
    shares = [min(count, max(1, total * count // sum(counts))) if count else 0 for count in counts]
    while (missing := total - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        can = [i for i, (share, count) in enumerate(zip(shares, counts, strict=True)) if 1 <= share + step <= count]
        if not can:
            break
        # The one whose share is furthest from its proportion.
        best = max(can, key=lambda i: step * (total * counts[i] / sum(counts) - shares[i]))
        shares[best] += step
    return shares
