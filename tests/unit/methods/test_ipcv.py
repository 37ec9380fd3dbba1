# SPDX-License-Identifier: Apache-2.0
"""ipcv against a tower that runs block by block and patch by patch in naive loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from module_calls import record_inputs, replace_outputs
from oracle import close
from packed_towers import DIFFERENT, NAMES, UNIT, drawn, in_rows, tensors_of, tower_of
from tokenprune import OptionError, Site
from tokenprune.budgets import Budget
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.integrations.shared.towers.units import Restoration, Units
from tokenprune.kernels.merging import Merge
from tokenprune.settings.cost import CostModel, Load
from tower_features import check_decoder, encode, run_patched

KEEP = 0.4
# The second image is a single unit.
BATCHES = ({"images": (2, 1), "sizes": ((8, 12), (2, 2), (6, 10))}, {"images": (0, 0), "video": True})


def build_model(name: str, build: Any) -> Any:
    """Return the model, with at least three blocks in its tower."""
    model = build(FAMILIES[name])
    if len(tower_of(model).blocks) < 3:
        model = copy.deepcopy(model)
        tower_of(model).blocks.append(copy.deepcopy(tower_of(model).blocks[0]))
    return model


def list_items(model: Any, grids: Tensor) -> list[list[list[int]]]:
    """Return the patch indices of each unit of each image or frame, in the tower's sequence."""
    rows, items, start = in_rows(tower_of(model), grids).tolist(), [], 0
    for frames, height, width in grids.tolist():
        for _ in range(frames):
            units = rows[start : start + height * width // UNIT]
            items.append([list(range(UNIT * unit, UNIT * unit + UNIT)) for unit in units])
            start += len(units)
    return items


def compute_distance(a: Tensor, b: Tensor) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)))


def choose_units(items: list[list[list[int]]], before: Tensor, current: Tensor) -> list[list[int]]:
    """Return the units of each image that the previous block changed most, on average over their patches."""
    kept = []
    for units in items:
        change = [sum(compute_distance(before[patch], current[patch]) for patch in unit) / UNIT for unit in units]
        count = min(len(units), max(1, round(KEEP * len(units))))
        kept.append(sorted(sorted(range(len(units)), key=change.__getitem__)[-count:]))
    return kept


def restore(y: dict[int, Tensor], h: Tensor, guides: dict[int, list[int]]) -> Tensor:
    """Return all patches: kept patches from `y`, and dropped patches from `h` plus the mean change of their guides."""
    output = h.clone()
    for patch, value in y.items():
        output[patch] = value
    for patch, guide_patches in guides.items():
        output[patch] = h[patch] + sum(y[guide] - h[guide] for guide in guide_patches) / len(guide_patches)
    return output


def naive(
    model: Any, inputs: Any, grids: Tensor, layer: int, stabilise: int, neighbours: int
) -> tuple[list[Tensor], list[list[int]]]:
    """Return the restored output of each block from `layer` on, patch by patch, and the kept units."""
    with record_inputs(*tower_of(model).blocks, note=lambda args, kwargs: (args[0], kwargs)) as calls:
        encode(model, inputs)
    items = list_items(model, grids)
    h = calls[layer][0]
    kept = choose_units(items, calls[layer - 1][0], h)
    kept_patches, guides = set(), {}
    for units, kept_units in zip(items, kept, strict=True):
        kept_of_image = [patch for unit in kept_units for patch in units[unit]]
        kept_patches |= set(kept_of_image)
        for patch in (patch for unit in units for patch in unit if patch not in kept_of_image):
            guides[patch] = sorted(kept_of_image, key=lambda guide: compute_distance(h[guide], h[patch]))[:neighbours]
    rows, output, out = sorted(kept_patches), h, []
    for index, block in enumerate(tower_of(model).blocks[layer:], start=layer):
        arguments = dict(calls[index][1])
        rotations, borders = arguments.pop("position_embeddings"), arguments.pop("cu_seqlens").tolist()
        arguments.pop("max_seqlen", None)
        y: dict[int, Tensor] = {}
        for start, end in pairwise(borders):
            sequence = [row for row in range(start, end) if index < layer + stabilise or row in kept_patches]
            if not sequence:
                continue
            overrides = dict(
                cu_seqlens=torch.tensor([0, len(sequence)]), position_embeddings=[x[sequence] for x in rotations]
            )
            x = output[sequence] + block.attn(block.norm1(output[sequence]), **arguments, **overrides)
            kept_indices = [i for i, row in enumerate(sequence) if row in kept_patches]
            x = x[kept_indices] + block.mlp(block.norm2(x[kept_indices]))
            y |= {sequence[i]: value for i, value in zip(kept_indices, x, strict=True)}
        assert sorted(y) == rows
        output = restore(y, h, guides)
        out.append(output)
    return out, kept


@contextmanager
def replace_block_outputs(model: Any, layer: int, states: list[Tensor]) -> Iterator[None]:
    """Replace the outputs of the unpatched tower's blocks from `layer` on within this context."""
    pairs = zip(tower_of(model).blocks[layer:], states, strict=True)
    with replace_outputs({block: lambda _, x=x: x for block, x in pairs}):
        yield


@pytest.mark.parametrize("batch", BATCHES, ids=("image", "video"))
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_tower_matches_patchwise_reference(name: str, batch: dict[str, Any], build) -> None:
    family, modality = FAMILIES[name], "video" if "video" in batch else "image"
    if modality == "video" and not family.video:
        pytest.skip("no videos")
    model, inputs = build_model(name, build), family.make_inputs(**batch)
    grids, blocks = inputs[f"{modality}_grid_thw"], len(tower_of(model).blocks)
    cases = [(layer, stabilise) for layer in range(1, blocks - 1) for stabilise in (0, 1, 7)]
    for layer, stabilise in cases if name in DIFFERENT else cases[:2]:
        states, kept = naive(model, inputs, grids, layer, stabilise, 3)
        with tokenprune.patched(model, "ipcv", keep=KEEP, layer=layer, stabilise=stabilise, neighbours=3):
            got = encode(model, inputs)[modality]
        with replace_block_outputs(model, layer, states):
            want = encode(model, inputs)[modality]
        for actual, expected in zip(tensors_of(got), tensors_of(want), strict=True):
            assert actual.shape == expected.shape
            close(actual, expected)
        kept_units = torch.cat(get_record(got).kept).nonzero().flatten().tolist()
        sizes = [h * w // UNIT for t, h, w in grids.tolist() for _ in range(t)]
        assert kept_units == [sum(sizes[:item]) + unit for item, units in enumerate(kept) for unit in units]
        num_patches, num_kept = UNIT * sum(sizes), UNIT * len(kept_units)
        expected_counts = [num_patches if index < layer + stabilise else num_kept for index in range(blocks)]
        assert get_record(got).block_tokens == expected_counts


@torch.no_grad()
def test_hidden_states_cover_all_patches(build) -> None:
    model, inputs = build(FAMILIES["qwen3_vl"]), FAMILIES["qwen3_vl"].make_inputs(images=(2, 1))
    grids = inputs["image_grid_thw"]
    with record_inputs(*tower_of(model).blocks) as inputs_per_block:
        encode(model, inputs)
    for stabilise in (0, 1, 2):
        states, _ = naive(model, inputs, grids, 1, stabilise, 10)
        with tokenprune.patched(model, "ipcv", keep=KEEP, layer=1, stabilise=stabilise):
            got = tower_of(model)(inputs["pixel_values"], grid_thw=grids, output_hidden_states=True)
        want = [*inputs_per_block[:2], *states]
        assert [len(x) for x in got.hidden_states] == [len(x) for x in want]
        for actual, expected in zip(got.hidden_states, want, strict=True):
            close(actual, expected)
        close(got.last_hidden_state, states[-1])


@pytest.mark.parametrize("after", ["divprune", "fastv", None])
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_later_method_cuts_restored_tokens(name: str, after: str | None, build) -> None:
    family = FAMILIES[name]
    model, inputs = build_model(name, build), drawn(family.make_inputs(images=(2, 1)))
    first = tokenprune.method("ipcv", layer=1, stabilise=1)
    methods, keep = ([first], [KEEP]) if after is None else ([first, after], [KEEP, 0.5])
    run = run_patched(model, inputs, methods, keep)
    stats = run.stats
    entered = [int(x) for x in stats.encoder_tokens_per_layer]
    num_patches = int(inputs["image_grid_thw"].prod(1).sum())
    assert entered[:2] == [num_patches] * 2 and all(0.3 * num_patches < x < 0.5 * num_patches for x in entered[2:])
    assert stats.visual_tokens_in == num_patches // UNIT
    assert [cut.method for cut in stats.cuts] == [after] * (after is not None)
    assert all(cut.site is not Site.IN_ENCODER for cut in stats.cuts)
    if after is None:
        assert stats.visual_tokens_out == num_patches // UNIT
    check_decoder(family, model, inputs, run)


def build_restoration(hidden: Tensor, kept: list[int], guides: list[list[int]]) -> Restoration:
    """Return the guides of the dropped patches as indices into the kept patches."""
    dropped = [row for row in range(len(hidden)) if row not in kept]
    starts = torch.tensor([0, *map(len, guides)]).cumsum(0)[:-1]
    mask = torch.zeros(1, len(hidden), dtype=torch.bool)
    mask[0, kept] = True
    flat = torch.tensor([index for indices in guides for index in indices])
    drop = Merge.from_kept(mask, [len(kept)])
    return Restoration(drop, range(1, 3), 5, hidden, torch.tensor(kept), torch.tensor(dropped), flat, starts)


def test_dropped_patches_move_with_neighbours() -> None:
    """A dropped patch changes by the mean change of its guides: zero, a constant, or the change of a single guide."""
    h = torch.randint(-8, 8, (6, 3), generator=torch.Generator().manual_seed(0)).float()
    h[4] = h[1]
    restoration = build_restoration(h, [1, 3, 5], [[0, 1, 2], [1], [0]])
    assert torch.equal(restoration.restore(h[[1, 3, 5]]), h)
    assert torch.equal(restoration.restore(h[[1, 3, 5]] + 2), h + 2)
    moved = h[[1, 3, 5]] + torch.tensor([[3.0], [6.0], [0.0]])
    output = restoration.restore(moved)
    assert torch.equal(output[[1, 3, 5]], moved) and torch.equal(output[4], output[1])
    assert torch.equal(output[0], h[0] + 3) and torch.equal(output[2], h[2] + 6)
    assert (
        torch.equal(restoration.restore(moved.half()), output.half())
        and restoration.restore(moved.half()).dtype == torch.float16
    )
    assert [restoration.is_due(index) for index in range(6)] == [True, True, False, False, False, True]
    units, remaining = Units.from_packed(3, 2, h.device).apply(
        Merge.from_kept(torch.tensor([[True, False, True]]), [2]), h
    )
    assert torch.equal(units.expand(remaining)[2:4], torch.zeros(2, 3))  # without a restoration, dropped units are zero


def test_chunked_neighbours_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    dropped, kept = x[:30], x[30:]
    method = tokenprune.method("ipcv", neighbours=4)
    want = [sorted(sorted(range(10), key=lambda j: compute_distance(kept[j], patch))[:4]) for patch in dropped]
    assert method.choose_guides(dropped, kept).sort(dim=1).values.tolist() == want
    monkeypatch.setattr("tokenprune.methods.encoder.ipcv._PAIRS", 35)  # three rows
    assert method.choose_guides(dropped, kept).sort(dim=1).values.tolist() == want
    assert method.choose_guides(dropped, kept[:2]).shape == (30, 2) and method.choose_guides(
        dropped[:0], kept
    ).shape == (
        0,
        4,
    )


def test_cost_saves_tower_work_only(build) -> None:
    model, load = CostModel.from_config(build(FAMILIES["qwen2_vl"]).config), Load((96,), 24, 10)
    method = tokenprune.method("ipcv", layer=1)
    unpruned, pruned = (model.predict(load, [method], [Budget.from_keep(keep)]) for keep in (1.0, 0.25))
    assert pruned.tower < unpruned.tower and (pruned.decoder, pruned.tokens) == (unpruned.decoder, unpruned.tokens)
    assert pruned.tokens > model.predict(load, [tokenprune.method("towerdrop")], [Budget.from_keep(0.25)]).tokens


def test_invalid_setups_are_rejected(build) -> None:
    method = tokenprune.method("ipcv")
    assert "restores its tokens at the end of the tower, which needs transformers" in find_unserved_reason(method)
    model = build(FAMILIES["qwen2_vl"])  # has four blocks
    with pytest.raises(OptionError, match=r"with 5 blocks, but this tower has 4\. Pass layer=1 to 2"):
        tokenprune.patch(model, "ipcv")
    with pytest.raises(OptionError, match=r"has 2\. Use a method after the tower"):
        tokenprune.patch(build(FAMILIES["glm4v"]), "ipcv", layer=1)


def test_frames_are_complete_after_tower(build) -> None:
    """Methods that compare frames can follow ipcv, unlike other tower methods."""
    model, inputs = build(FAMILIES["qwen2_vl"]), FAMILIES["qwen2_vl"].make_inputs(images=(0, 0), video=True)
    with tokenprune.patched(model, [tokenprune.method("ipcv", layer=1), "prunevid"], keep=0.5, record=True):
        model(**inputs)
        assert {cut.method for cut in tokenprune.stats(model).cuts} == {"prunevid"}
    with pytest.raises(OptionError, match="drops some of the tokens before"):
        tokenprune.patch(model, ["towerdrop", "prunevid"], keep=0.5)
