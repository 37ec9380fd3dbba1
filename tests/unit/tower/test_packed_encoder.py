# SPDX-License-Identifier: Apache-2.0
"""Merging in towers that pack all images into one sequence, against plain loops over one frame at a time."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
from families import FAMILIES as ALL
from module_calls import get_first_input, record_inputs
from oracle import close
from packed_towers import BATCHES, order_of_windows
from processors import photo
from tests.unit.methods.test_tome import naive
from tests.unit.tower.test_encoder_models import PACKED
from tokenprune import BudgetError, OptionError, Site, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune_bench.calibration import calibrate
from tower_features import check_decoder, encode, run_patched
from zoo import FAMILIES, Family

UNIT = 4


@pytest.fixture(params=PACKED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@torch.no_grad()
def naive_tower(model: Any, pixels: Tensor, grid: Tensor, plan: list[int], proportional: bool) -> tuple[Any, list]:
    """Run one frame through the blocks in plain loops.

    Returns:
        The features of each unit in raster order, their groups, and deepstack features.
    """
    tower = model.model.visual
    _, h, w = grid.tolist()
    height, width = h // 2, w // 2
    with record_inputs(
        tower.blocks[0], note=lambda args, kwargs: (get_first_input(args, kwargs), kwargs["position_embeddings"])
    ) as entered:
        tower(pixels, grid_thw=grid[None])
    ((start, rotations),) = entered
    side = tower.window_size // 2 // tower.patch_size if hasattr(tower, "window_size") else max(height, width)
    order = order_of_windows(height, width, side)
    windows = {unit: (unit // width // side, unit % width // side) for unit in order}
    rotate = sys.modules[type(tower).__module__].apply_rotary_pos_emb_vision
    x = start.view(-1, UNIT, start.shape[-1])  # [units, 4, D] in the order of windows
    cos, sin = (p.view(len(order), UNIT, -1) for p in rotations)
    groups = [[unit] for unit in range(len(order))]
    deepstack = []
    for index, (block, r) in enumerate(zip(tower.blocks, plan, strict=True)):
        attention = block.attn
        flat = block.norm1(x.flatten(0, 1))
        q, k, v = attention.qkv(flat).view(len(flat), 3, attention.num_heads, -1).unbind(1)
        metric = k.mean(1).view(len(x), -1)
        first_units = [group[0] for group in groups]
        q, k = rotate(q, k, cos[first_units].flatten(0, 1), sin[first_units].flatten(0, 1))
        logits = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
        if proportional:
            sizes = torch.tensor([float(len(group)) for group in groups]).repeat_interleave(UNIT)
            logits = logits + sizes.log()
        if index not in getattr(tower, "fullatt_block_indexes", range(99)):
            window = torch.tensor([hash(windows[order[unit]]) for unit in first_units]).repeat_interleave(UNIT)
            logits = logits.masked_fill(window[:, None] != window[None, :], -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", logits.softmax(-1), v).flatten(1)
        x = x + attention.proj(attended).view_as(x)
        # The kept unit is the first of its group, and keeps its index.
        joined = sorted(naive(metric, r(metric) if callable(r) else r, 0)[0])
        weight = torch.tensor([float(len(group)) for group in groups])
        x = torch.stack([(x[m] * weight[m, None, None]).sum(0) / weight[m].sum() for m in joined])
        groups = [[i for member in members for i in groups[member]] for members in joined]
        x = x + block.mlp(block.norm2(x.flatten(0, 1))).view_as(x)
        if index in getattr(tower, "deepstack_visual_indexes", ()):
            merger = tower.deepstack_merger_list[list(tower.deepstack_visual_indexes).index(index)]
            deepstack.append(_spread(merger(x.flatten(0, 1)), groups, order))
    features = _spread(tower.merger(x.flatten(0, 1)), groups, order)
    groups = [sorted(order[unit] for unit in group) for group in groups]
    for feature in deepstack:  # in earlier blocks the group was not complete
        for group in groups:
            feature[group] = feature[group].mean(0)
    return (features, deepstack), groups


def count_above(metric: Tensor, threshold: float) -> int:
    """Return the number of units that DToMe merges: partners above the threshold, at most half of the units."""
    unit = metric / metric.norm(dim=-1, keepdim=True)
    best = (unit[::2] @ unit[1::2].T).amax(1) if len(metric) > 1 else metric.new_zeros(0)
    return min(int((best > threshold).sum()), len(metric) // 2)


def _spread(merged: Tensor, groups: list[list[int]], order: list[int]) -> Tensor:
    grid = torch.empty(len(order), merged.shape[1])
    for feature, group in zip(merged, groups, strict=True):
        grid[[order[unit] for unit in group]] = feature
    return grid


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_tower_matches_naive_loop(family: Family, build, attn: str, proportional: bool) -> None:
    check_tower(family, build(family, attn), proportional)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_similar_towers_match_naive_loop(name: str) -> None:
    check_tower(ALL[name], ALL[name].build(), proportional=True)


@torch.no_grad()
def check_tower(family: Family, model: Any, proportional: bool) -> None:
    inputs, depth = family.make_inputs(images=(2, 1)), len(model.model.visual.blocks)
    plan = [4, 0, 3, 2][:depth]
    with tokenprune.patched(model, "tome", r=plan, proportional=proportional):
        got = encode(model, inputs)["image"]
    grids, start = inputs["image_grid_thw"], 0
    for image, grid in enumerate(grids):
        patches = int(grid.prod())
        pixels = inputs["pixel_values"][start : start + patches]
        (want, deepstack), groups = naive_tower(model, pixels, grid, plan, proportional)
        close(got.pooler_output[image], want)
        for actual, expected in zip(getattr(got, "deepstack_features", None) or [], deepstack, strict=True):
            close(actual[image], expected)
        first = {unit: group[0] for group in groups for unit in group}
        assert get_record(got).groups[image].tolist() == [first[unit] for unit in range(len(want))]
        assert len(groups) == len(want) - sum(plan)
        start += patches


def photos(sizes: list[tuple[int, int]]) -> list[Any]:
    return [photo(height, width, seed) for seed, (height, width) in enumerate(sizes)]


def small_processor() -> Any:
    return Qwen2VLImageProcessor(patch_size=4, min_pixels=64, max_pixels=10**6)


@torch.no_grad()
def test_dymu_is_calibrated_and_merges_above_its_thresholds(family: Family, build) -> None:
    model, processor = build(family), small_processor()
    images = photos([(48, 64), (48, 64), (32, 56), (64, 40)])
    thresholds = calibrate(model, images, processor=processor, keep=0.4, batch_size=4)
    values = thresholds.values[0.4].tolist()
    assert all(0 < value < 1 for value in values)
    inputs = processor(images=images, return_tensors="pt")
    with tokenprune.patched(model, "dymu", keep=0.4, thresholds=thresholds):
        got = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    start, shares, total = 0, [], 0
    for image, grid in enumerate(inputs["image_grid_thw"]):
        patches = int(grid.prod())
        rules = [partial(count_above, threshold=value) for value in values]
        (want, _), groups = naive_tower(model, inputs["pixel_values"][start : start + patches], grid, rules, True)
        close(got.pooler_output[image], want)
        assert len(get_record(got).groups[image].unique()) == len(groups)
        shares.append(len(groups) / len(want))
        start, total = start + patches, total + patches // UNIT
    assert len(set(shares)) > 2  # a separate share per image
    assert 0.3 < sum(shares) / 4 < 0.5
    with pytest.raises(OptionError, match="only the processor"):
        calibrate(model, [torch.zeros(3, 32, 32)], processor=processor, keep=0.4)


@torch.no_grad()
def test_thresholds_of_one_size_keep_the_budget(build) -> None:
    model, processor = build(FAMILIES["qwen2_vl"]), small_processor()
    images = photos([(48, 64)] * 5)
    thresholds = calibrate(model, images, processor=processor, keep=0.5, batch_size=5)
    inputs = processor(images=images, return_tensors="pt")
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds):
        got = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    units = int(inputs["image_grid_thw"][0].prod()) // UNIT
    assert sum(len(groups.unique()) for groups in get_record(got).groups) == 5 * round(0.5 * units)


@torch.no_grad()
def test_exact_dymu_keeps_the_budget_of_each_image(family: Family, build) -> None:
    model, processor = build(family), small_processor()
    images = photos([(48, 64), (32, 56), (64, 40), (24, 24)])
    thresholds = calibrate(model, images[:1], processor=processor, keep=0.4)
    inputs = processor(images=images, return_tensors="pt")
    with tokenprune.patched(model, "dymu", keep=0.4, thresholds=thresholds, exact=True):
        got = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    for groups in get_record(got).groups:
        assert len(groups.unique()) == round(0.4 * len(groups))


@torch.no_grad()
def test_mlps_run_on_fewer_units(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    mlps = [block.mlp for block in model.model.visual.blocks]
    with (
        tokenprune.patched(model, "tome", r=3),
        record_inputs(*mlps, note=lambda args, kwargs: len(args[0])) as row_counts,
    ):
        model(**inputs)
        stats = tokenprune.stats(model)
    count = sum(map(sum, inputs.counts))
    assert row_counts == [UNIT * (count - 9 * block) for block in (1, 2, 3, 4)]
    assert stats.encoder_tokens_per_layer == [UNIT * count, *row_counts[:-1]]
    assert (stats.visual_tokens_in, stats.visual_tokens_out) == (count, count - 36)


@torch.no_grad()
def test_frames_merge_separately(family: Family, model) -> None:
    inputs = family.make_inputs(video=True)
    grids = inputs["video_grid_thw"]
    frames, units = int(grids[0, 0]), int(grids[0, 1:].prod()) // UNIT
    assert frames > 1
    for keep, per_frame in ((0.5, [round(0.5 * units)] * frames), (frames * 2 + 1, [3] + [2] * (frames - 1))):
        with tokenprune.patched(model, "tome", keep=keep):
            groups = get_record(encode(model, inputs)["video"]).groups[0].view(frames, units)
        assert [len(set(frame.tolist())) for frame in groups] == per_frame
        assert all(
            int(frame.min()) >= i * units and int(frame.max()) < (i + 1) * units for i, frame in enumerate(groups)
        )


@pytest.mark.parametrize("method", ["tome", ["tome", "fastv"], ["tome", "divprune"], ["tome", "pool", "dart"]])
@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_generate_and_combined_methods(family: Family, model, batch: str, method: Any) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    run = run_patched(model, inputs, method, 0.5)
    assert run.step_cuts[0].site == Site.IN_ENCODER and run.step_cuts[0].sources is not None
    assert run.stats.visual_tokens_per_layer[0] <= 0.75 * run.stats.visual_tokens_in
    check_decoder(family, model, inputs, run)


@torch.no_grad()
def test_unsupported_setups_raise(build) -> None:
    family = FAMILIES["qwen2_vl"]
    model = copy.deepcopy(build(family))
    inputs = family.make_inputs()
    with tokenprune.patched(model, "tome", keep=tokenprune.Budget(tokens=1)):
        with pytest.raises(BudgetError, match="at most half"):
            model(**inputs)
        assert model(input_ids=inputs["input_ids"].clamp(min=16)).logits.isfinite().all()
    model.model.visual.config._attn_implementation_internal = "flash_attention_2"  # loads no weights
    with pytest.raises(UnsupportedSetupError, match="proportional=False"):
        tokenprune.patch(model, "tome", keep=0.5)
