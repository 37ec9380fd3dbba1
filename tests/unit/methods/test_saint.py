# SPDX-License-Identifier: Apache-2.0
"""`saint` against loops over pairs that are written from the description of its authors' code, and in masked towers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from families import FAMILIES as MORE
from merging_models import layers_of
from merging_models import tower_of as rows_of
from module_calls import record_inputs, record_outputs
from oracle import close
from packed_towers import DIFFERENT, MODALITIES, NAMES, UNIT, check_kept_units, in_rows, tensors_of, tower_of
from tests.unit.methods.test_towerdrop import noise
from tile_towers import NAMES as TILES
from tile_towers import check_kept_tiles, family_of, squares
from tokenprune import Budget, OptionError, Site, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.kernels.merging import Merge
from tokenprune.selection import Tower
from tower_features import check_decoder, encode, run_patched
from zoo import FAMILIES

KEEP = 0.4
G = 10


def cosines(keys: Tensor) -> list[list[float]]:
    rows = keys.double().tolist()
    norm = [math.hypot(*x) or 1.0 for x in rows]
    return [
        [sum(p * q for p, q in zip(x, y, strict=True)) / (a * b) for y, b in zip(rows, norm, strict=True)]
        for x, a in zip(rows, norm, strict=True)
    ]


def full_graph(keys: Tensor, left: int, stays: list[int] | None = None) -> list[int]:
    """The tokens of `[n, D]` that stay, of all pairs, round by round."""
    alike = cosines(keys)
    stays = list(range(len(keys))) if stays is None else stays
    while len(stays) > left:
        score = {i: round(sum(alike[i][j] for j in stays), 9) for i in stays}  # of two alone both are alike
        leave = min(len(stays) - left, max(1, len(stays) // 16))
        gone = sorted(stays, key=lambda i: -score[i])[:leave]
        stays = [i for i in stays if i not in gone]
    return stays


def bipartite(keys: Tensor, t: float, partners: int) -> list[int]:
    """The tokens that stay where the content decides."""
    alike, odd = cosines(keys), range(1, len(keys), 2)
    score, candidates = {}, 0
    for i in range(0, len(keys), 2):
        valid = [alike[i][j] for j in odd if alike[i][j] >= t]
        candidates += len(valid) >= partners
        if valid:
            score[i] = len(valid) * math.exp(G * (sum(valid) / len(valid) - t))
        else:
            score[i] = sum(alike[i][j] for j in odd) / max(1, len(odd))
    gone = sorted(score, key=lambda i: -score[i])[:candidates]
    return [i for i in range(len(keys)) if i not in gone]


def match(keys: Tensor, keep: float | int, protected: int = 0, **options: Any) -> list[list[int]]:
    """The tokens that stay of each row `[B, n, D]`, by the method."""
    count = keys.shape[1]
    plan = tokenprune.method("saint", layer=1, **options).plan(Budget.from_keep(keep), Tower(count, protected, 3, 3))
    assert plan[0] is None and plan[2] is None
    merge: Merge | None = None if plan[1] is None else plan[1](keys, None)
    if merge is None:
        return [list(range(count))] * len(keys)
    assert merge.is_drop
    left = merge.num_kept or [merge.keep.shape[1]] * len(keys)
    return [row[:number] for row, number in zip(merge.keep.tolist(), left, strict=True)]


@each("protected", [0, 1])
@each("count", [1, 2, 7, 40, 97])
def test_kept_tokens_match_pairwise_loop(count: int, protected: int) -> None:
    keys = noise(3, count + protected, 6, seed=count)
    for keep in (2, 0.01, 0.1, 0.4, 0.9, 10**6):
        left = min(count, keep) if isinstance(keep, int) else max(1, round(keep * count))
        for got, row in zip(match(keys, keep, protected), keys, strict=True):
            want = full_graph(row[protected:], left)
            assert got == list(range(protected)) + [protected + one for one in want] and len(want) == left


@each("partners", [1, 3, 5])
@each("threshold", [-1.0, 0.0, 0.3, 0.7])
def test_threshold_matches_loop(threshold: float, partners: int) -> None:
    numbers = set()
    for count in (1, 2, 9, 64):
        keys = noise(4, count + 1, 4, seed=count) + torch.tensor([0, 1, 2, 4]).view(4, 1, 1)
        rows = match(keys, 10**6, 1, threshold=threshold, partners=partners)
        bounded = match(keys, 0.3, 1, threshold=threshold, partners=partners)
        for got, less, row in zip(rows, bounded, keys, strict=True):
            want, most = bipartite(row[1:], threshold, partners), max(1, round(0.3 * count))
            assert got == [0] + [1 + one for one in want]
            assert less == [0] + [1 + one for one in full_graph(row[1:], most, want)]
            numbers.add(len(got) / count)
    assert len(numbers) > 3


def test_properties_of_selection() -> None:
    keys = noise(2, 40, 6)
    everything = [list(range(40))] * 2
    assert match(keys, 10**6) == match(keys, 10**6, threshold=1.1) == everything
    same = torch.ones(2, 40, 6)
    assert [len(row) for row in match(same, 7)] == [7, 7]
    assert match(same, 7) == match(torch.zeros(2, 40, 6), 7) == [list(range(33, 40))] * 2  # of equals the first go
    alone = torch.cat([keys[..., :5].abs(), torch.zeros(2, 40, 1)], 2)
    alone[:, 11] = torch.eye(6)[5]
    assert all(11 in row for row in match(alone, 2))  # orthogonal to all others
    broken = keys.clone()
    broken[0, 3, 2] = torch.nan
    assert match(broken, 10)[1] == match(keys, 10)[1] and len(match(broken, 10)[0]) == 10
    assert match(keys.bfloat16().float() * 3, 10) == match(keys.bfloat16().float(), 10)  # by directions alone


def of_units(output: Tensor, attention: Any) -> Tensor:
    """The keys of a projection's output, `[patches, heads, Dh]`."""
    heads = output.view(len(output), -1, attention.head_dim)
    if not hasattr(attention, "qkv"):
        return heads
    queries = attention.num_heads
    return heads[:, queries : queries + (heads.shape[1] - queries) // 2]


def kept_of(model: Any, inputs: Any, modality: str, layer: int) -> list[Tensor]:
    """Return the units of each image or video that stay, by the unpatched tower, frame by frame."""
    tower, grids = tower_of(model), inputs[f"{modality}_grid_thw"]
    attention = tower.blocks[layer].attn
    with record_outputs(attention.qkv if hasattr(attention, "qkv") else attention.k) as seen:
        encode(model, {name: inputs[name] for name in (MODALITIES[modality], f"{modality}_grid_thw")})
    keys = of_units(torch.cat(seen), attention).mean(1).view(len(seen[0]) // UNIT, -1)[in_rows(tower, grids)]
    kept, start = [], 0
    for t, h, w in grids.tolist():
        units, frames = h * w // UNIT, []
        for _ in range(t):
            stays = torch.zeros(units, dtype=torch.bool)
            stays[full_graph(keys[start : start + units], max(1, round(KEEP * units)))] = True
            frames.append(stays)
            start += units
        kept.append(torch.cat(frames))
    return kept


def groups(output: Any) -> Tensor:
    return torch.cat(list(get_record(output).groups)) >= 0


@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_tower_matches_masked_tower(name: str, modality: str, build) -> None:
    """Later blocks do not see dropped tokens, and the MLP of the block itself skips them."""
    family = MORE[name]
    if modality == "video" and not family.video:
        pytest.skip("no videos")
    model = build(family)
    inputs = family.make_inputs(**({"images": (2, 1)} if modality == "image" else {"images": (0, 0), "video": True}))
    blocks = tower_of(model).blocks
    for layer in range(len(blocks)) if name in DIFFERENT else (0,):
        kept = kept_of(model, inputs, modality, layer)
        options = {} if layer == 0 else {"layer": layer}
        with tokenprune.patched(model, "saint", keep=KEEP, **options), record_inputs(blocks[layer].mlp) as states:
            got = encode(model, inputs)[modality]
        assert torch.equal(groups(got), torch.cat(kept)) and not groups(got).all()
        assert [len(x) for x in states] == [UNIT * int(groups(got).sum())]
        check_kept_units(model, inputs, modality, got, kept, layer + 1)


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_token_count_is_per_video(name: str, build) -> None:
    """Also if the tower receives frames one by one (GLM)."""
    model, inputs = build(MORE[name]), MORE[name].make_inputs(images=(0, 0), video=True)
    units = [h * w // UNIT for t, h, w in inputs["video_grid_thw"].tolist() for _ in range(t)]
    number = sum(units) // 2
    with tokenprune.patched(model, "saint", keep=number):
        kept = groups(encode(model, inputs)["video"])
    assert int(kept.sum()) == number * len(inputs["video_grid_thw"])


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_threshold_acts_on_each_image(name: str, build) -> None:
    model, inputs = build(MORE[name]), MORE[name].make_inputs(images=(2, 1), sizes=((8, 12), (2, 2), (6, 10)))
    with tokenprune.patched(model, "saint", keep=KEEP, threshold=0.1, partners=1):
        batch, pieces = encode(model, inputs)["image"], []
        pixels = inputs["pixel_values"].split(inputs["image_grid_thw"].prod(1).tolist())
        for image, grid in zip(pixels, inputs["image_grid_thw"], strict=True):
            pieces.append(encode(model, {"pixel_values": image, "image_grid_thw": grid[None]})["image"])
    kept = groups(batch)
    assert torch.equal(kept, torch.cat([groups(piece) for piece in pieces])) and not kept.all()
    for mine, alone in zip(tensors_of(batch), zip(*map(tensors_of, pieces), strict=True), strict=True):
        close(mine[kept], torch.cat(alone)[kept], 1e-6)


@pytest.mark.parametrize("name", TILES)
@torch.no_grad()
def test_tile_tower_matches_masked_tower(name: str, build) -> None:
    family = family_of(name)
    model = build(family)
    inputs, blocks = family.make_inputs(images=(2, 1)), layers_of(rows_of(model))
    read = len(blocks) - (name == "llava")  # of which nobody reads the last block
    for layer in range(read):
        attention = getattr(blocks[layer], "self_attn", None) or blocks[layer].attention
        last = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
        with record_outputs(last) as seen:
            encode(model, inputs)
        (keys,), tokens = seen, seen[0].shape[1]
        keys = keys.unflatten(2, (-1, attention.head_dim)).mean(2)[:, tokens % 2 :]
        units = squares(model, keys.shape[1])
        kept = torch.zeros(len(keys), len(units), dtype=torch.bool)
        for row, own in zip(kept, keys[:, units].flatten(2), strict=True):
            row[full_graph(own, round(KEEP * len(units)))] = True
        with tokenprune.patched(model, "saint", keep=KEEP, layer=layer, guard="off"):
            got = encode(model, inputs)["image"]
        check_kept_tiles(model, inputs, got, kept, units, tokens, layer + 1)


@pytest.mark.parametrize("options", [{}, {"threshold": 0.2, "partners": 1}], ids=["exact", "threshold"])
@pytest.mark.parametrize("name", [*TILES, "llava_next", "llava_onevision", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_decoder_matches_masked_decoder(name: str, options: dict[str, Any], build) -> None:
    family = family_of(name)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    run = run_patched(model, inputs, "saint", KEEP, steps=0, layer=0, guard="off", **options)
    stats, (cut,) = run.stats, run.stats.cuts
    assert (cut.site, cut.method, cut.sources) == (Site.IN_ENCODER, "saint", None)
    assert stats.visual_tokens_out < stats.visual_tokens_in
    if not options and name not in ("internvl", "smolvlm"):  # of which an image is several tiles
        assert stats.visual_tokens_out == sum(round(KEEP * count) for row in inputs.counts for count in row)
    check_decoder(family, model, inputs, run)


def test_invalid_setups_are_rejected(build) -> None:
    assert "With threshold, the content decides the count" in find_unserved_reason(
        tokenprune.method("saint", threshold=0.7)
    )
    with pytest.raises(OptionError, match="layer=2 is not read: the model reads 2 blocks"):  # not the last one
        tokenprune.patch(build(FAMILIES["llava"]), "saint", layer=2)
    with pytest.raises(UnsupportedSetupError, match="where the visual token of each patch is not known"):
        tokenprune.patch(build(MORE["lfm2_vl"]), "saint")
    plan = tokenprune.method("saint").plan(Budget.from_keep(0.5), Tower(1024, 0, 32, 32))
    assert [index for index, one in enumerate(plan) if one] == [4]
