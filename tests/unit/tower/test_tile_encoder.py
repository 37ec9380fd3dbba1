# SPDX-License-Identifier: Apache-2.0
"""Exact counts if tiles are cropped after the tower and rows end with newlines: LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import pieces
from merging_models import blocks_of, image_arguments, tower_of
from naive_towers import InputImage
from oracle import close
from tests.unit.methods.test_tome import naive
from tokenprune import Budget, BudgetError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.towers.tile_goals import build_tile_matcher, distribute
from tokenprune.selection import Tower
from tokenprune_bench.calibration import calibrate
from zoo import FAMILIES, Family

BATCHES = {"left": {}, "ragged": {"images": (2, 1)}, "three": {"images": (1, 1, 1)}, "text beside": {"images": (0, 2)}}


@pytest.fixture(params=["llava_next", "llava_onevision"])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_each_image_keeps_its_budget(family: Family, model, batch: str) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    for keep in (0.5, 0.61, 0.8, 30, 16, 1000):
        with tokenprune.patched(model, "tome", keep=keep, record=True):
            model(**inputs)
            stats = tokenprune.stats(model)
        budgets = [[min(n, keep) if isinstance(keep, int) else round(keep * n) for n in row] for row in inputs.counts]
        assert stats.visual_tokens_out == sum(map(sum, budgets))
        if stats.cuts:
            rows = zip(stats.cuts[0].sources, pieces(family, inputs), strict=True)
            assert [[len(kept.keys() & set(image)) for image in images] for kept, images in rows] == budgets


@torch.no_grad()
def test_exact_dymu_keeps_the_budget(family: Family, build) -> None:
    model = build(family)
    g = torch.Generator().manual_seed(5)
    thresholds = calibrate(
        model, [torch.randn(3, 16, 16, generator=g) for _ in range(6)], keep=0.5, batch_size=6, progress=False
    )
    inputs = family.make_inputs(images=(1, 1, 1))
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds, exact=True):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out == sum(round(0.5 * row[0]) for row in inputs.counts)


@torch.no_grad()
def test_tiles_match_naive_loop(family: Family, build) -> None:
    """An image of 8 x 32 pixels has two tiles of 4 x 4 patches, whose first and last rows are cropped.

    Half of its 34 tokens is 17: two newlines and 15 patches, distributed over 16, 8 and 8 shown patches.
    """
    model = build(family)
    inputs = family.make_inputs(rows=1, sizes=[(8, 32)])
    assert inputs.counts == [[34]]
    with tokenprune.patched(model, "tome", keep=0.5):
        output = model.model.get_image_features(**image_arguments(inputs))
    shown = [i for i in range(16) if i // 4 in (1, 2)]
    cropped = [i for i in range(16) if i // 4 in (0, 3)]
    goals = [[(list(range(16)), 7)], [(shown, 4), (cropped, 4)], [(shown, 4), (cropped, 4)]]
    layer = model.config.vision_feature_layer
    read = 3 + 1 + layer
    for tile, parts in enumerate(goals):
        want, groups = naive_tower(tower_of(model), inputs["pixel_values"][0, tile], parts, read)
        close(output.hidden_states[layer][tile], want)
        assert len(groups) == sum(num_kept for _, num_kept in parts)
    assert len(get_record(output).groups[0].unique()) == 17


@torch.no_grad()
def naive_tower(
    tower: Any, pixels: Tensor, parts: list[tuple[list[int], int]], read: int
) -> tuple[Tensor, list[list[int]]]:
    """Run one tile through the blocks in plain loops.

    Args:
        parts: Patches of each part, and their number of kept patches.

    Returns:
        Features of all tokens after the last block that the model reads, and the groups of patches.
    """
    image = InputImage(tower, pixels)
    classes, method = image.protected, tokenprune.method("tome")
    plans = [
        method.schedule(Budget(keep=num_kept), Tower(len(patches) + classes, classes, 3, read))
        for patches, num_kept in parts
    ]
    for index, block in enumerate(blocks_of(tower)[:read]):
        keys, joined = image.attend(block), [[i] for i in range(classes)]
        for (patches, _), plan in zip(parts, plans, strict=True):
            part_tokens = [i for i, group in enumerate(image.groups) if group[0] - classes in patches]
            members, _ = naive(keys[[*range(classes), *part_tokens]], plan[index], classes)
            joined += [[part_tokens[i - classes] for i in group] for group in members if group[0] >= classes]
        image.finish(block, sorted(joined))  # kept units keep their order
    return image.grid(), image.groups[classes:]


def test_budget_below_one_patch_per_tile_raises(build) -> None:
    family = FAMILIES["llava_next"]
    model, inputs = build(family), family.make_inputs(rows=1, sizes=[(16, 32)])
    with (
        torch.no_grad(),
        tokenprune.patched(model, "tome", keep=6),
        pytest.raises(BudgetError, match=r"6 keeps 2 tokens besides the 4 newlines of an image of 52 tokens.*3 tiles"),
    ):
        model(**inputs)


@torch.no_grad()
def test_r_sets_merges_regardless_of_cropping(build) -> None:
    """r= sets the number of merges of each tile directly."""
    family = FAMILIES["llava_next"]
    model, inputs = build(family), family.make_inputs(rows=1, sizes=[(8, 32)])
    with tokenprune.patched(model, "tome", r=3):
        model(**inputs)
        assert tokenprune.stats(model).encoder_tokens_per_layer == [3 * n for n in (17, 14, 11)]


def test_distribute_adds_up_and_follows_counts() -> None:
    rng = random.Random(0)
    for _ in range(300):
        counts = [rng.choice([0, 1, 5, 16, 576, rng.randint(1, 576)]) for _ in range(rng.randint(1, 10))]
        if not any(counts):
            continue
        total = rng.randint(sum(map(bool, counts)), sum(counts))
        shares = distribute(total, counts)
        assert sum(shares) == total
        for share, count in zip(shares, counts, strict=True):
            assert min(1, count) <= share <= count
            if total >= 10 * sum(counts) / max(1, min(filter(None, counts))):  # no share is raised to 1
                assert abs(share - total * count / sum(counts)) < 1 + 1e-9
    assert distribute(15, [16, 8, 8]) == [7, 4, 4]


def test_parts_merge_separately() -> None:
    """Random rows in two parts: each part merges as it would without the other part."""
    g = torch.Generator().manual_seed(0)
    part = torch.randint(0, 2, (3, 12), generator=g)
    part[2] = 0  # all tokens of this row are in one part
    keys = torch.randn(3, 13, 6, generator=g)
    counts = [[int((row == part_index).sum()) for part_index in (0, 1)] for row in part]
    num_kept = [[count - min(2, count // 2) for count in row] for row in counts]
    method = tokenprune.method("tome")

    def plan_of(tower: Tower) -> list:
        return method.plan(Budget(keep=tower.num_kept), tower)

    goals = [(row.bool(), kept) for row, kept in zip(part, num_kept, strict=True)]
    (match,) = build_tile_matcher(goals, Tower(13, 1, 1, 1), plan_of).plan(1)
    merge = match(keys, None)
    assert merge.num_kept == [1 + sum(row) for row in num_kept]
    for row in range(3):
        joined: dict[int, list[int]] = {}
        for token, slot in enumerate(merge.assign[row].tolist()):
            joined.setdefault(slot, []).append(token)
        want = [[0]]
        for part_index in (0, 1):
            tokens = [0] + [1 + i for i in range(12) if part[row, i] == part_index]
            members, _ = naive(keys[row, tokens], counts[row][part_index] - num_kept[row][part_index], 1)
            want += [sorted(tokens[i] for i in group) for group in members[1:]]
        assert sorted(joined.values()) == sorted(want)
