# SPDX-License-Identifier: Apache-2.0
"""Compare dymu with its authors' rules, in loops: without the rules the loops equal the library; each rule changes the
result."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from made_up_thresholds import TAUS, by_hand, tower_shape
from merging_models import blocks_of, tower_of
from tests.unit.methods.test_dymu import mixed
from tests.unit.tower.test_encoder import tiles
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune_bench.calibration import calibrate
from tokenprune_bench.calibration.merge import count_merges

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def rules(script: Any) -> Any:
    return script("dymu_rules")


@torch.no_grad()
def embed_images(model: Any, pixels: Tensor) -> tuple[Any, list[Tensor], int]:
    """Return the blocks of a tower in float64, the inputs of the first block, and the number of protected tokens."""
    tower = copy.deepcopy(tower_of(model)).double()
    protected = int(hasattr(tower, "pre_layrnorm"))
    embedded = tower.embeddings(pixels.double())
    return blocks_of(tower), list(tower.pre_layrnorm(embedded) if protected else embedded), protected


@pytest.mark.parametrize("name", ["llava", "llava_onevision"])
@torch.no_grad()
def test_without_the_authors_rules_it_equals_the_library(rules: Any, name: str) -> None:
    model = FAMILIES[name].build()
    pixels = torch.cat([mixed(model), tiles(model, 3, seed=3)])
    blocks, images, protected = embed_images(model, pixels)
    shape = tower_shape(model)
    plan = count_merges(shape, shape.patches // 2, "constant")
    calibration = calibrate(model, pixels, keep=0.5, batch_size=len(pixels), progress=False)
    loop_taus = rules.calibrated(blocks, images, protected, plan, rules.OURS)
    assert loop_taus == pytest.approx(calibration.values[0.5].tolist(), abs=1e-5)
    taus = TAUS[name]
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=by_hand(model, taus)):
        owners = get_record(tower_of(model)(pixels)).owners
    counts = [len(owner.unique()) - protected for owner in owners]
    assert rules.left(blocks, images, protected, taus, rules.OURS) == counts
    assert len(set(counts)) > 1


def test_each_rule_changes_the_result(rules: Any) -> None:
    g = torch.Generator().manual_seed(0)
    model = FAMILIES["llava_onevision"].build()
    blocks, _, _ = embed_images(model, tiles(model, 1))
    width = blocks[0].layer_norm1.weight.shape[0]
    images = [torch.randn(15, width, generator=g, dtype=torch.double) for _ in range(4)]
    images[0] = images[0][:1] + 1e-3 * images[0]  # nearly equal tokens, which merge first
    plan = [2] * len(blocks)  # the first image merges all tokens, and the other images keep theirs
    taus = {
        name: rules.calibrated(blocks, images, 0, plan, rules.Rules(**{name: True}))
        for name in ("reorder", "epsilon", "over_half")
    }
    our_taus = rules.calibrated(blocks, images, 0, plan, rules.OURS)
    assert all(rule_taus != our_taus for rule_taus in taus.values())
    assert taus["reorder"][0] == taus["epsilon"][0] == our_taus[0], "no tokens merged before the first block"
    assert max(abs(a - b) for a, b in zip(taus["epsilon"], our_taus, strict=True)) < 1e-3
    # 15 tokens: 8 in set A, and 7 can merge.
    merged = rules.Merged(images[0], 0)
    assert (merged.max_merges(rules.OURS), merged.max_merges(rules.BATCH)) == (7, 8)
    taus = [-1.0] * 3  # 15 -> 8 -> 4 -> 2, or 15 -> 7 -> 3 -> 1
    assert [rules.left(blocks[:3], images[:1], 0, taus, rule) for rule in (rules.OURS, rules.BATCH)] == [[2], [1]]
    # The remaining tokens of A are ordered by index, or by similarity with the authors' rule for one image.
    best, partner = torch.tensor([0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5]), torch.zeros(8, dtype=torch.long)
    orders = []
    for rule in (rules.OURS, rules.ALONE):
        merged = rules.Merged(images[1].clone(), 0)
        merged.finish(_Block(), best, partner, 3, rule)
        indices = (merged.x[:5, None] - images[1][::2]).abs().sum(2).argmin(1)
        orders.append(indices.tolist())
    assert orders == [[0, 2, 4, 6, 7], [6, 7, 2, 4, 0]]


class _Block:
    """A block whose MLP adds zero."""

    mlp = layer_norm2 = staticmethod(lambda x: torch.zeros_like(x))


def test_schedules(rules: Any) -> None:
    counts = rules.authors_schedule(504, 12)
    assert counts == [84, 77, 70, 63, 56, 49, 42, 35, 28, 0, 0, 0]
    assert sum(rules.authors_schedule(384, 24)) == 384
    table = rules.schedules_table()
    assert "| SigLIP-B, 12 blocks | 504 | reverse_linear | 16 | 0 |" in table
    assert "| CLIP-L, 23 of 24 blocks read | 384 | reverse_linear | 32 | 32 |" in table
    page = rules.PAGE.read_text()
    assert table in page and "| unchanged, 256 patches | 0.5 |" in page
