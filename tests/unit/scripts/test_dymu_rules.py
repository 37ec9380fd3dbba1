# SPDX-License-Identifier: Apache-2.0
"""The loops that put dymu beside its authors' rules: without these rules they are the library, and each rule tells."""

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
def entering(model: Any, pixels: Tensor) -> tuple[Any, list[Tensor], int]:
    """The blocks of a tower in float64, and what enters the first one."""
    tower = copy.deepcopy(tower_of(model)).double()
    protected = int(hasattr(tower, "pre_layrnorm"))
    embedded = tower.embeddings(pixels.double())
    return blocks_of(tower), list(tower.pre_layrnorm(embedded) if protected else embedded), protected


@pytest.mark.parametrize("name", ["llava", "llava_onevision"])
@torch.no_grad()
def test_without_the_authors_rules_it_is_the_library(rules: Any, name: str) -> None:
    model = FAMILIES[name].build()
    pixels = torch.cat([mixed(model), tiles(model, 3, seed=3)])
    blocks, images, protected = entering(model, pixels)
    shape = tower_shape(model)
    plan = count_merges(shape, shape.patches // 2, "constant")
    found = calibrate(model, pixels, keep=0.5, batch_size=len(pixels), progress=False)
    own = rules.calibrated(blocks, images, protected, plan, rules.OURS)
    assert own == pytest.approx(found.values[0.5].tolist(), abs=1e-5)
    taus = TAUS[name]
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=by_hand(model, taus)):
        owners = get_record(tower_of(model)(pixels)).owners
    numbers = [len(owner.unique()) - protected for owner in owners]
    assert rules.left(blocks, images, protected, taus, rules.OURS) == numbers
    assert len(set(numbers)) > 1


def test_each_rule_changes_what_it_says(rules: Any) -> None:
    g = torch.Generator().manual_seed(0)
    model = FAMILIES["llava_onevision"].build()
    blocks, _, _ = entering(model, tiles(model, 1))
    width = blocks[0].layer_norm1.weight.shape[0]
    images = [torch.randn(15, width, generator=g, dtype=torch.double) for _ in range(4)]
    images[0] = images[0][:1] + 1e-3 * images[0]  # all alike: merges first
    plan = [2] * len(blocks)  # the first image takes all, the others merge nothing
    taus = {
        name: rules.calibrated(blocks, images, 0, plan, rules.Rules(**{name: True}))
        for name in ("reorder", "epsilon", "over_half")
    }
    own = rules.calibrated(blocks, images, 0, plan, rules.OURS)
    assert all(found != own for found in taus.values())
    assert taus["reorder"][0] == taus["epsilon"][0] == own[0], "nothing merged before the first block"
    assert max(abs(a - b) for a, b in zip(taus["epsilon"], own, strict=True)) < 1e-3
    # 15 tokens: 8 in A, of which 7 may merge.
    one = rules.Merged(images[0], 0)
    assert (one.most(rules.OURS), one.most(rules.BATCH)) == (7, 8)
    taus = [-1.0] * 3  # 15 -> 8 -> 4 -> 2, or 15 -> 7 -> 3 -> 1
    assert [rules.left(blocks[:3], images[:1], 0, taus, one) for one in (rules.OURS, rules.BATCH)] == [[2], [1]]
    # Order: what is left of A by place, or with the authors' rule for one image the likest first.
    best, partner = torch.tensor([0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5]), torch.zeros(8, dtype=torch.long)
    orders = []
    for rule in (rules.OURS, rules.ALONE):
        one = rules.Merged(images[1].clone(), 0)
        one.finish(_Block(), best, partner, 3, rule)
        places = (one.x[:5, None] - images[1][::2]).abs().sum(2).argmin(1)
        orders.append(places.tolist())
    assert orders == [[0, 2, 4, 6, 7], [6, 7, 2, 4, 0]]


class _Block:
    """A block whose MLP adds nothing."""

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
