# SPDX-License-Identifier: Apache-2.0
"""Merging in towers that join a square of patches into one visual token, against plain loops over one tile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from families import FAMILIES as ALL
from merging_models import UNITS, layers_of, tower_of
from module_calls import record_inputs
from oracle import close
from tests.unit.methods.test_dymu import naive_match
from tests.unit.methods.test_tome import naive
from tokenprune import BudgetError, Site, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.towers.squares import Squares
from tokenprune_bench.calibration import calibrate
from tower_features import check_decoder, run_patched
from zoo import FAMILIES, Family

SIDE = 2  # patches on a side of a unit, in all test models
GRID = 8  # patches on a side of a tile
BATCHES = {"ragged": {"images": (2, 1)}, "text beside": {"images": (0, 2)}, "one row": {"only": 1}}


@pytest.fixture(params=UNITS)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def tiles(count: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def draw_mixed_tiles(seed: int = 0) -> Tensor:
    """Return four tiles that lose different numbers of units."""
    pixels = tiles(4, seed)
    pixels[1] = pixels[1, :, :, :1]  # stripes
    pixels[2, :, 16:] = 0.3
    return pixels


def encode(model: Any, pixels: Tensor, mask: Tensor | None = None) -> Any:
    """Return the features of tiles.

    Args:
        mask: Mask of the pixels, shape (T, 32, 32), bool.
    """
    if "vision_model" not in dict(model.model.named_children()):
        return model.model.get_image_features(pixels)
    return model.model.get_image_features(pixels[None], None if mask is None else mask[None].long())


def features_of(output: Any, tile: int) -> Tensor:
    """Return the features of one tile, shape (units, channels). transformers 5.24 joins the tiles of a prompt."""
    return torch.cat(list(output.pooler_output)).view(-1, (GRID // SIDE) ** 2, output.pooler_output[0].shape[-1])[tile]


def project(family: Family, model: Any, unit: Tensor) -> Tensor:
    """Project one unit (4, channels) in raster order: pixel shuffle joins its patches, pooling averages them."""
    if family.name == "gemma3":
        projector = model.model.multi_modal_projector
        return projector.mm_soft_emb_norm(unit.mean(0)) @ projector.mm_input_projection_weight
    joined = unit.flatten()[None]
    if family.name == "internvl":
        return model.model.multi_modal_projector(joined)[0]
    return model.model.connector.modality_projection(joined)[0]


@torch.no_grad()
def naive_tower(
    family: Family,
    model: Any,
    pixels: Tensor,
    plan: list[int | Callable[[Tensor], list[list[int]]]],
    proportional: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Run one tile through the blocks in plain loops.

    Args:
        plan: Number of merged units of each block, or a function that returns the merged units in their new order.
        mask: Mask of the patches without padding, shape (patches,), bool.

    Returns:
        The feature of each merged unit, and its members (units in raster order).
    """
    tower, classes = tower_of(model), int(family.name == "internvl")
    mask = torch.ones(GRID**2, dtype=torch.bool) if mask is None else mask
    if "vision_model" in dict(model.model.named_children()):
        embedded = tower.embeddings(pixels[None], mask.view(1, GRID, GRID))[0]
    else:
        embedded = tower.embeddings(pixels[None])[0]
    x, patches = embedded[:classes], embedded[classes:]
    # Per kept unit: values (4, channels), and the number of patches in each of its four positions.
    units, weights = [], []
    for row in range(0, GRID, SIDE):
        for column in range(0, GRID, SIDE):
            members = [(row + i) * GRID + column + j for i in range(SIDE) for j in range(SIDE)]
            units.append(patches[members])
            weights.append(mask[members].float())
    groups = [[unit] for unit in range(len(units))]
    for block, r in zip(layers_of(tower), plan, strict=True):
        internvl = hasattr(block, "lambda_1")
        attention = block.attention if internvl else block.self_attn
        flat = torch.cat([x, *units])
        h = (block.layernorm_before if internvl else block.layer_norm1)(flat)
        k = attention.k_norm(attention.k_proj(h)) if internvl else attention.k_proj(h)
        k = k.view(len(h), attention.num_heads, -1).mean(1)
        weight = torch.cat([torch.ones(classes), *weights])
        bias = (weight if proportional else (weight > 0).float()).log()[None, None, None]
        attended = attention(h[None], attention_mask=bias.expand(1, 1, len(h), -1))[0][0]
        flat = flat + (block.lambda_1 * attended if internvl else attended)
        x, units = flat[:classes], list(flat[classes:].view(-1, SIDE**2, flat.shape[1]))
        metric = k[classes:].reshape(len(units), -1)
        joined = r(metric) if callable(r) else naive(metric, r, 0)[0]
        merged, sizes = [], []
        for members in joined:
            size = torch.stack([weights[member] for member in members])  # [members, 4]
            total = torch.stack([weights[m][:, None] * units[m] for m in members]).sum(0) / size.sum(0)[:, None]
            merged.append(torch.where(size.sum(0)[:, None] > 0, total, units[members[0]]))
            sizes.append(size.sum(0))
        units, weights = merged, sizes
        groups = [[i for member in members for i in groups[member]] for members in joined]
        flat = torch.cat([x, *units])
        h = block.mlp((block.layernorm_after if internvl else block.layer_norm2)(flat))
        flat = flat + (block.lambda_2 * h if internvl else h)
        x, units = flat[:classes], list(flat[classes:].view(-1, SIDE**2, flat.shape[1]))
    norm = tower.layernorm if family.name == "internvl" else tower.post_layernorm
    return torch.stack([project(family, model, norm(unit)) for unit in units]), groups


def check_tile(features: Tensor, groups: Tensor, want: tuple[Tensor, list[list[int]]]) -> None:
    """Compare the features (units, channels) and the recorded groups of one tile with the naive result."""
    for feature, members in zip(*want, strict=True):
        for member in members:
            close(features[member], feature)
            assert int(groups[member]) == min(members)


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_tower_matches_naive_loop(family: Family, build, attn: str, proportional: bool) -> None:
    model, pixels, plan = build(family, attn), tiles(), [5, 0, 3]
    with tokenprune.patched(model, "tome", r=plan, proportional=proportional):
        got = encode(model, pixels)
    for tile, image in enumerate(pixels):
        want = naive_tower(family, model, image, plan, proportional)
        assert sorted(i for group in want[1] for i in group) == list(range(16)) and len(want[1]) == 8
        check_tile(features_of(got, tile), get_record(got).groups[tile], want)


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_padded_patches_have_zero_weight(build, attn: str, proportional: bool) -> None:
    """Idefics3 and SmolVLM mask patches that contain only padding."""
    family = FAMILIES["smolvlm"]
    model, pixels, plan = build(family, attn), tiles(), [5, 0, 3]
    mask = torch.ones(2, 32, 32, dtype=torch.bool)
    mask[0, 20:], mask[0, :, 28:] = False, False  # 5 x 7 patches remain, so some units are incomplete
    pixels = pixels * mask[:, None]
    plain = encode(model, pixels, mask)
    with tokenprune.patched(model, "tome", r=plan, proportional=proportional):
        got = encode(model, pixels, mask)
    for tile in range(2):
        patches = mask[tile, ::4, ::4].flatten()
        want = naive_tower(family, model, pixels[tile], plan, proportional, patches)
        check_tile(features_of(got, tile), get_record(got).groups[tile], want)
        unmerged, _ = naive_tower(family, model, pixels[tile], [0] * 3, proportional, patches)
        close(features_of(plain, tile), unmerged)  # the loop itself is correct


@torch.no_grad()
def test_mlps_run_on_fewer_units_and_counts_are_exact(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    count, classes = sum(map(sum, inputs.counts)), int(family.name == "internvl")
    for keep, num_kept in ((0.5, 8), (0.3, 5), (7, 7), (1.0, 16), (16, 16), (1000, 16)):
        mlps = [block.mlp for block in layers_of(tower_of(model))]
        with (
            tokenprune.patched(model, "tome", keep=keep),
            record_inputs(*mlps, note=lambda args, kwargs: args[0].shape[1]) as token_counts,
        ):
            model(**inputs)
            stats = tokenprune.stats(model)
        assert (stats.visual_tokens_in, stats.visual_tokens_out) == (count, count // 16 * num_kept)
        assert token_counts[-1] == 4 * num_kept + classes
        if keep != 1.0:
            assert stats.encoder_tokens_per_layer == [count // 16 * n for n in (64 + classes, *token_counts[:-1])]


@pytest.mark.parametrize("method", ["tome", ["tome", "fastv"]])
@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_generate_and_combined_methods(family: Family, model, batch: str, method: Any) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    run = run_patched(model, inputs, method, 0.5)
    cut, stats = run.step_cuts[0], run.stats
    assert cut.site == Site.IN_ENCODER
    # The first index of each group of bit-equal features, with the other indices as its sources.
    sizes = sorted(len(sources) for row in cut.sources for sources in row.values())
    features = run.outputs["image"].pooler_output.flatten(0, 1)
    counts = sorted(features.unique(dim=0, return_counts=True)[1].tolist())
    assert sizes == counts and len(counts) == stats.visual_tokens_per_layer[0] == stats.visual_tokens_in // 2
    check_decoder(family, model, inputs, run)


@each("name", "paligemma aya_vision cohere2_vision qianfan_ocr qwen3_vl_moe qwen3_5".split())
@torch.no_grad()
def test_same_tower_in_other_families(name: str) -> None:
    """Merged features are bit-equal after projector and pixel shuffle, so units match the family's tokens."""
    family = ALL[name]
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    before = model(**inputs).logits
    run = run_patched(model, inputs, "tome", 0.5, steps=0)
    tiles = list(run.outputs["image"].pooler_output)
    counts = sorted(n for tile in tiles for n in tile.unique(dim=0, return_counts=True)[1].tolist())
    (cut,) = run.stats.cuts
    assert sorted(len(sources) for row in cut.sources for sources in row.values()) == counts
    assert run.stats.visual_tokens_out == len(counts) == sum(round(0.5 * len(tile)) for tile in tiles)
    if name != "qwen3_5":  # its stateful layers cannot skip masked tokens
        check_decoder(family, model, inputs, run)
    assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_dymu_is_calibrated_and_merges_above_its_thresholds(family: Family, build) -> None:
    model, pixels = build(family), draw_mixed_tiles()
    # From other tiles: a threshold is the similarity of a pair of their units.
    thresholds = calibrate(model, list(draw_mixed_tiles(seed=1)), keep=0.5, batch_size=4, progress=False)
    rules = [partial(naive_match, tau=value, protected=0) for value in thresholds.values[0.5].tolist()]
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds):
        got = encode(model, pixels)
    kept_counts = []
    for tile, image in enumerate(pixels):
        want = naive_tower(family, model, image, rules, True)
        check_tile(got.pooler_output[tile], get_record(got).groups[tile], want)
        kept_counts.append(len(want[1]))
    assert (
        len(set(kept_counts)) > 1 and 20 < sum(kept_counts) < 48
    )  # a different number per tile, about half on average
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds, exact=True):
        assert [len(groups.unique()) for groups in get_record(encode(model, pixels)).groups] == [8] * 4


@torch.no_grad()
def test_virtual_unmerging_of_units(build) -> None:
    """vtu: the decoder attends to all positions, and computes only on the merged tokens."""
    family = FAMILIES["internvl"]
    model, inputs = build(family), family.make_inputs()
    thresholds = calibrate(model, list(tiles(4)), keep=0.5, batch_size=4, progress=False)
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds, vtu="expanded"):
        assert model(**inputs).logits.isfinite().all()
        assert tokenprune.stats(model).visual_tokens_out < sum(map(sum, inputs.counts))


@torch.no_grad()
def test_other_image_sizes(build) -> None:
    """InternVL interpolates its positions for tiles of other sizes. Their units merge, too."""
    model = build(FAMILIES["internvl"])
    with tokenprune.patched(model, "tome", keep=0.5):
        got = encode(model, torch.nn.functional.interpolate(tiles(), 48))
        assert [len(groups.unique()) for groups in get_record(got).groups] == [18, 18]
        with pytest.raises(UnsupportedSetupError, match=r"25 patches.*not a square grid of 2 x 2 units"):
            encode(model, torch.nn.functional.interpolate(tiles(), 20))


def test_squares_of_a_grid() -> None:
    units = Squares(3, 2)
    assert (units.size, units.count_units(2 + 36), units.to_unit_counts([2 + 18, 2 + 9])) == (9, 4, [2, 1])
    order = units.build_order(2 + 36, torch.device("cpu")).view(4, 9)
    assert order[1].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    for tokens in (2 + 35, 2 + 25, 2, 0):
        with pytest.raises(UnsupportedSetupError, match="not a square grid"):
            units.count_units(tokens)


@torch.no_grad()
def test_unsupported_setups_raise(build) -> None:
    family = FAMILIES["smolvlm"]
    model = copy.deepcopy(build(family))
    with pytest.raises(BudgetError, match="cannot keep 1 of 16 patches"):
        tokenprune.patch(model, "tome", keep=tokenprune.Budget(tokens=1))
    model.model.vision_model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedSetupError, match="proportional=False"):
        tokenprune.patch(model, "tome", keep=0.5)
