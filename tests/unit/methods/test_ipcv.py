# SPDX-License-Identifier: Apache-2.0
"""`ipcv` against a tower that is run block by block, patch by patch, from the description of its authors' code."""

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


def model_of(name: str, build: Any) -> Any:
    """The model, with three blocks in its tower at least."""
    model = build(FAMILIES[name])
    if len(tower_of(model).blocks) < 3:
        model = copy.deepcopy(model)
        tower_of(model).blocks.append(copy.deepcopy(tower_of(model).blocks[0]))
    return model


def items_of(model: Any, grids: Tensor) -> list[list[list[int]]]:
    """Return the patch indices of each unit of each image or frame, in the tower's sequence."""
    places, items, start = in_rows(tower_of(model), grids).tolist(), [], 0
    for frames, height, width in grids.tolist():
        for _ in range(frames):
            units = places[start : start + height * width // UNIT]
            items.append([list(range(UNIT * unit, UNIT * unit + UNIT)) for unit in units])
            start += len(units)
    return items


def apart(a: Tensor, b: Tensor) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)))


def chosen(items: list[list[list[int]]], before: Tensor, now: Tensor) -> list[list[int]]:
    """The units of each image that the block before changed most, by the mean over their patches."""
    found = []
    for units in items:
        change = [sum(apart(before[patch], now[patch]) for patch in unit) / UNIT for unit in units]
        most = min(len(units), max(1, round(KEEP * len(units))))
        found.append(sorted(sorted(range(len(units)), key=change.__getitem__)[-most:]))
    return found


def restored(y: dict[int, Tensor], h: Tensor, guides: dict[int, list[int]]) -> Tensor:
    """Return all patches: kept patches from `y`, and dropped patches from `h` plus the mean change of their guides."""
    full = h.clone()
    for patch, value in y.items():
        full[patch] = value
    for patch, near in guides.items():
        full[patch] = h[patch] + sum(y[one] - h[one] for one in near) / len(near)
    return full


def naive(
    model: Any, inputs: Any, grids: Tensor, layer: int, stabilise: int, neighbours: int
) -> tuple[list[Tensor], list[list[int]]]:
    """Return the restored output of each block from `layer` on, patch by patch, and the kept units."""
    with record_inputs(*tower_of(model).blocks, note=lambda args, kwargs: (args[0], kwargs)) as seen:
        encode(model, inputs)
    items = items_of(model, grids)
    h = seen[layer][0]
    kept = chosen(items, seen[layer - 1][0], h)
    stays, guides = set(), {}
    for units, own in zip(items, kept, strict=True):
        left = [patch for unit in own for patch in units[unit]]
        stays |= set(left)
        for patch in (patch for unit in units for patch in unit if patch not in left):
            guides[patch] = sorted(left, key=lambda one: apart(h[one], h[patch]))[:neighbours]
    rows, full, out = sorted(stays), h, []
    for index, block in enumerate(tower_of(model).blocks[layer:], start=layer):
        given = dict(seen[index][1])
        places, borders = given.pop("position_embeddings"), given.pop("cu_seqlens").tolist()
        given.pop("max_seqlen", None)
        y: dict[int, Tensor] = {}
        for start, end in pairwise(borders):
            own = [row for row in range(start, end) if index < layer + stabilise or row in stays]
            if not own:
                continue
            alone = dict(cu_seqlens=torch.tensor([0, len(own)]), position_embeddings=[one[own] for one in places])
            x = full[own] + block.attn(block.norm1(full[own]), **given, **alone)
            left = [place for place, row in enumerate(own) if row in stays]
            x = x[left] + block.mlp(block.norm2(x[left]))
            y |= {own[place]: value for place, value in zip(left, x, strict=True)}
        assert sorted(y) == rows
        full = restored(y, h, guides)
        out.append(full)
    return out, kept


@contextmanager
def leaving(model: Any, layer: int, states: list[Tensor]) -> Iterator[None]:
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
    model, inputs = model_of(name, build), family.make_inputs(**batch)
    grids, blocks = inputs[f"{modality}_grid_thw"], len(tower_of(model).blocks)
    every = [(layer, stabilise) for layer in range(1, blocks - 1) for stabilise in (0, 1, 7)]
    for layer, stabilise in every if name in DIFFERENT else every[:2]:
        states, kept = naive(model, inputs, grids, layer, stabilise, 3)
        with tokenprune.patched(model, "ipcv", keep=KEEP, layer=layer, stabilise=stabilise, neighbours=3):
            got = encode(model, inputs)[modality]
        with leaving(model, layer, states):
            want = encode(model, inputs)[modality]
        for mine, theirs in zip(tensors_of(got), tensors_of(want), strict=True):
            assert mine.shape == theirs.shape
            close(mine, theirs)
        stays = torch.cat(get_record(got).kept).nonzero().flatten().tolist()
        sizes = [h * w // UNIT for t, h, w in grids.tolist() for _ in range(t)]
        assert stays == [sum(sizes[:item]) + unit for item, own in enumerate(kept) for unit in own]
        whole, left = UNIT * sum(sizes), UNIT * len(stays)
        enter = [whole if index < layer + stabilise else left for index in range(blocks)]
        assert get_record(got).block_tokens == enter


@torch.no_grad()
def test_hidden_states_cover_all_patches(build) -> None:
    model, inputs = build(FAMILIES["qwen3_vl"]), FAMILIES["qwen3_vl"].make_inputs(images=(2, 1))
    grids = inputs["image_grid_thw"]
    with record_inputs(*tower_of(model).blocks) as seen:
        encode(model, inputs)
    for stabilise in (0, 1, 2):
        states, _ = naive(model, inputs, grids, 1, stabilise, 10)
        with tokenprune.patched(model, "ipcv", keep=KEEP, layer=1, stabilise=stabilise):
            got = tower_of(model)(inputs["pixel_values"], grid_thw=grids, output_hidden_states=True)
        want = [*seen[:2], *states]
        assert [len(x) for x in got.hidden_states] == [len(x) for x in want]
        for mine, theirs in zip(got.hidden_states, want, strict=True):
            close(mine, theirs)
        close(got.last_hidden_state, states[-1])


@pytest.mark.parametrize("after", ["divprune", "fastv", None])
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_later_method_cuts_restored_tokens(name: str, after: str | None, build) -> None:
    family = FAMILIES[name]
    model, inputs = model_of(name, build), drawn(family.make_inputs(images=(2, 1)))
    first = tokenprune.method("ipcv", layer=1, stabilise=1)
    methods, keep = ([first], [KEEP]) if after is None else ([first, after], [KEEP, 0.5])
    run = run_patched(model, inputs, methods, keep)
    stats = run.stats
    entered = [int(x) for x in stats.encoder_tokens_per_layer]
    whole = int(inputs["image_grid_thw"].prod(1).sum())
    assert entered[:2] == [whole] * 2 and all(0.3 * whole < x < 0.5 * whole for x in entered[2:])
    assert stats.visual_tokens_in == whole // UNIT
    assert [cut.method for cut in stats.cuts] == [after] * (after is not None)
    assert all(cut.site is not Site.IN_ENCODER for cut in stats.cuts)
    if after is None:
        assert stats.visual_tokens_out == whole // UNIT
    check_decoder(family, model, inputs, run)


def way_back(hidden: Tensor, stayed: list[int], guides: list[list[int]]) -> Restoration:
    """Return the guides of the dropped patches as indices into the kept patches."""
    gone = [row for row in range(len(hidden)) if row not in stayed]
    starts = torch.tensor([0, *map(len, guides)]).cumsum(0)[:-1]
    mask = torch.zeros(1, len(hidden), dtype=torch.bool)
    mask[0, stayed] = True
    flat = torch.tensor([one for near in guides for one in near])
    drop = Merge.from_kept(mask, [len(stayed)])
    return Restoration(drop, range(1, 3), 5, hidden, torch.tensor(stayed), torch.tensor(gone), flat, starts)


def test_dropped_patches_move_with_neighbours() -> None:
    """Not at all where they did not; by a constant where all moved by it; and with one guide, its copy, along."""
    h = torch.randint(-8, 8, (6, 3), generator=torch.Generator().manual_seed(0)).float()
    h[4] = h[1]
    back = way_back(h, [1, 3, 5], [[0, 1, 2], [1], [0]])
    assert torch.equal(back.restore(h[[1, 3, 5]]), h)
    assert torch.equal(back.restore(h[[1, 3, 5]] + 2), h + 2)
    moved = h[[1, 3, 5]] + torch.tensor([[3.0], [6.0], [0.0]])
    full = back.restore(moved)
    assert torch.equal(full[[1, 3, 5]], moved) and torch.equal(full[4], full[1])
    assert torch.equal(full[0], h[0] + 3) and torch.equal(full[2], h[2] + 6)
    assert torch.equal(back.restore(moved.half()), full.half()) and back.restore(moved.half()).dtype == torch.float16
    assert [back.is_due(index) for index in range(6)] == [True, True, False, False, False, True]
    units, left = Units.from_packed(3, 2, h.device).apply(Merge.from_kept(torch.tensor([[True, False, True]]), [2]), h)
    assert torch.equal(units.expand(left)[2:4], torch.zeros(2, 3))  # and without a way back nothing comes


def test_chunked_neighbours_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    gone, kept = x[:30], x[30:]
    method = tokenprune.method("ipcv", neighbours=4)
    want = [sorted(sorted(range(10), key=lambda j: apart(kept[j], one))[:4]) for one in gone]
    assert method.choose_guides(gone, kept).sort(dim=1).values.tolist() == want
    monkeypatch.setattr("tokenprune.methods.encoder.ipcv._PAIRS", 35)  # three rows
    assert method.choose_guides(gone, kept).sort(dim=1).values.tolist() == want
    assert method.choose_guides(gone, kept[:2]).shape == (30, 2) and method.choose_guides(gone[:0], kept).shape == (
        0,
        4,
    )


def test_cost_saves_tower_work_only(build) -> None:
    model, load = CostModel.from_config(build(FAMILIES["qwen2_vl"]).config), Load((96,), 24, 10)
    method = tokenprune.method("ipcv", layer=1)
    whole, less = (model.predict(load, [method], [Budget.from_keep(keep)]) for keep in (1.0, 0.25))
    assert less.tower < whole.tower and (less.decoder, less.tokens) == (whole.decoder, whole.tokens)
    assert less.tokens > model.predict(load, [tokenprune.method("towerdrop")], [Budget.from_keep(0.25)]).tokens


def test_invalid_setups_are_rejected(build) -> None:
    method = tokenprune.method("ipcv")
    assert "restores its tokens at the end of the tower, which needs transformers" in find_unserved_reason(method)
    model = build(FAMILIES["qwen2_vl"])  # of four blocks
    with pytest.raises(OptionError, match=r"with 5 blocks, but this tower has 4\. Pass layer=1 to 2"):
        tokenprune.patch(model, "ipcv")
    with pytest.raises(OptionError, match=r"has 2\. Use a method after the tower"):
        tokenprune.patch(build(FAMILIES["glm4v"]), "ipcv", layer=1)


def test_frames_are_complete_after_tower(build) -> None:
    """Methods that compare frames may follow ipcv, unlike other tower methods."""
    model, inputs = build(FAMILIES["qwen2_vl"]), FAMILIES["qwen2_vl"].make_inputs(images=(0, 0), video=True)
    with tokenprune.patched(model, [tokenprune.method("ipcv", layer=1), "prunevid"], keep=0.5, record=True):
        model(**inputs)
        assert {cut.method for cut in tokenprune.stats(model).cuts} == {"prunevid"}
    with pytest.raises(OptionError, match="drops some of the tokens before"):
        tokenprune.patch(model, ["towerdrop", "prunevid"], keep=0.5)
