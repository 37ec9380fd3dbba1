# SPDX-License-Identifier: Apache-2.0
"""Dropping units in a tower with separate, padded grids per image (SigLIP 2 as in LFM2-VL).

The reference is the unpatched tower with the columns of dropped units masked.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tokenprune
from families import FAMILIES
from merging_models import layers_of, tower_of
from module_calls import record_inputs
from oracle import close
from tests.unit.methods.test_towerdrop import naive, observe_values
from tests.unit.tower.test_tile_dropping import KEEP, SCORES
from tile_towers import masked
from tokenprune import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tower_features import encode

LFM2 = FAMILIES["lfm2_vl"]
BATCHES = {"of three sizes": {"images": (2, 1)}, "alone": {"only": 1}}


def units_of(height: int, width: int) -> list[list[int]]:
    """Return the patches of each unit."""
    corners = [row * width + column for row in range(0, height, 2) for column in range(0, width, 2)]
    return [[corner, corner + 1, corner + width, corner + width + 1] for corner in corners]


def check_tower(model: Any, inputs: Any, score: str, layer: int) -> None:
    blocks = layers_of(tower_of(model))
    with record_inputs(*blocks) as entered:
        encode(model, inputs)
    patch_mask, shapes = inputs["pixel_attention_mask"].bool(), inputs["spatial_shapes"].tolist()
    visible, kept = torch.zeros_like(patch_mask), []
    for row, (height, width) in enumerate(shapes):
        units = units_of(height, width)
        shown = observe_values(score, [x[row, units] for x in entered], layer).view(1, height // 2, width // 2, -1)
        kept.append(naive(score, shown, round(KEEP * len(units))).flatten())
        visible[row, torch.tensor(units)[kept[-1]].flatten()] = True
    with tokenprune.patched(model, "towerdrop", keep=KEEP, layer=layer, score=score, guard="off"):
        got = encode(model, inputs)["image"]
    assert all(map(torch.equal, get_record(got).kept, kept))
    assert get_record(got).block_tokens == [int(patch_mask.sum())] * layer + [int(visible.sum())] * (
        len(blocks) - layer
    )
    with masked(model, visible, layer, patch_mask):
        want = encode(model, inputs)["image"]
    for actual, expected, units in zip(got.pooler_output, want.pooler_output, kept, strict=True):
        close(actual[units], expected[units])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@torch.no_grad()
def test_tower_matches_tower_masked_from_each_block(batch: dict, score: str, build) -> None:
    model, inputs = build(LFM2), LFM2.make_inputs(**batch)
    for layer in range(score == "change", len(layers_of(tower_of(model)))):
        check_tower(model, inputs, score, layer)


@pytest.mark.parametrize("keep", [0.4, 5])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_blocks_run_only_on_kept_units(attn: str, keep: float, build) -> None:
    """Rows are padded to the longest row. No mask is passed if all rows have the same length."""
    model, inputs = build(LFM2, attn), LFM2.make_inputs(images=(2, 1))
    block = layers_of(tower_of(model))[-1]
    sizes = inputs["spatial_shapes"].prod(1) // 4
    with (
        tokenprune.patched(model, "towerdrop", keep=keep, layer=1, guard="off"),
        record_inputs(block.mlp) as states,
        record_inputs(block.self_attn, note=lambda args, kwargs: kwargs["attention_mask"]) as masks,
    ):
        output = encode(model, inputs)["image"]
    num_kept = [int(image.sum()) for image in get_record(output).kept]
    assert num_kept == [keep if isinstance(keep, int) else round(keep * int(size)) for size in sizes]
    (hidden,), (mask,) = states, masks
    assert hidden.shape[:2] == (3, 4 * max(num_kept))
    if keep == 5:
        assert mask is None
    else:
        assert [int((row == 0).sum()) for row in mask[:, 0, 0]] == [4 * units for units in num_kept]


@torch.no_grad()
def test_hidden_states_have_all_patches(build) -> None:
    model, inputs = copy.deepcopy(build(LFM2)), LFM2.make_inputs(images=(2, 1))
    unpruned = encode(model, inputs, output_hidden_states=True)["image"].hidden_states
    with tokenprune.patched(model, "towerdrop", keep=KEEP, layer=1, guard="off"):
        output = encode(model, inputs, output_hidden_states=True)["image"]
    num_kept = 4 * sum(int(image.sum()) for image in get_record(output).kept)
    for index, (actual, expected) in enumerate(zip(output.hidden_states, unpruned, strict=True)):
        assert actual.shape == expected.shape
        assert int(actual.any(-1).sum()) == (num_kept if index > 1 else actual[..., 0].numel())
        assert torch.equal(actual, expected) == (index < 2)


def test_unsupported_setups_raise(build) -> None:
    model = build(LFM2)
    with pytest.raises(OptionError, match="block 2 is out of range: the vision tower has 2"):
        tokenprune.patch(model, "towerdrop", layer=2)
    with pytest.raises(UnsupportedSetupError, match="not adjacent in one sequence"):
        tokenprune.patch(model, "towerdrop", score="detail")
    with pytest.raises(BudgetError, match="acts before the prompt is known"):
        tokenprune.patch(model, "towerdrop", layer=1, keep=tokenprune.Budget(keep=0.5, per="prompt"))
