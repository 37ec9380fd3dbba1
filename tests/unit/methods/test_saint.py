# SPDX-License-Identifier: Apache-2.0
"""saint against naive loops over pairs of tokens, and in masked towers."""

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
from merging_models import tower_of as tile_tower_of
from module_calls import record_inputs, record_outputs
from oracle import close
from packed_towers import DIFFERENT, MODALITIES, NAMES, UNIT, check_kept_units, in_rows, tensors_of, tower_of
from tests.unit.methods.test_towerdrop import draw_noise
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


def compute_cosines(keys: Tensor) -> list[list[float]]:
    rows = keys.double().tolist()
    norm = [math.hypot(*x) or 1.0 for x in rows]
    return [
        [sum(p * q for p, q in zip(x, y, strict=True)) / (a * b) for y, b in zip(rows, norm, strict=True)]
        for x, a in zip(rows, norm, strict=True)
    ]


def naive_full_graph(keys: Tensor, num_kept: int, kept: list[int] | None = None) -> list[int]:
    """Return the kept tokens of keys (tokens, channels), dropped in rounds by their similarity to all kept tokens."""
    similarity = compute_cosines(keys)
    kept = list(range(len(keys))) if kept is None else kept
    while len(kept) > num_kept:
        # Rounded, so that the scores of the last two tokens are equal.
        score = {i: round(sum(similarity[i][j] for j in kept), 9) for i in kept}
        num_dropped = min(len(kept) - num_kept, max(1, len(kept) // 16))
        dropped = sorted(kept, key=lambda i: -score[i])[:num_dropped]
        kept = [i for i in kept if i not in dropped]
    return kept


def naive_bipartite(keys: Tensor, t: float, partners: int) -> list[int]:
    """Return the kept tokens with a threshold, which decides the count."""
    similarity, odd = compute_cosines(keys), range(1, len(keys), 2)
    score, candidates = {}, 0
    for i in range(0, len(keys), 2):
        valid = [similarity[i][j] for j in odd if similarity[i][j] >= t]
        candidates += len(valid) >= partners
        if valid:
            score[i] = len(valid) * math.exp(G * (sum(valid) / len(valid) - t))
        else:
            score[i] = sum(similarity[i][j] for j in odd) / max(1, len(odd))
    dropped = sorted(score, key=lambda i: -score[i])[:candidates]
    return [i for i in range(len(keys)) if i not in dropped]


def select(keys: Tensor, keep: float | int, protected: int = 0, **options: Any) -> list[list[int]]:
    """Return the tokens that the method keeps of each row of keys (batch, tokens, channels)."""
    count = keys.shape[1]
    plan = tokenprune.method("saint", layer=1, **options).plan(Budget.from_keep(keep), Tower(count, protected, 3, 3))
    assert plan[0] is None and plan[2] is None
    merge: Merge | None = None if plan[1] is None else plan[1](keys, None)
    if merge is None:
        return [list(range(count))] * len(keys)
    assert merge.is_drop
    num_kept = merge.num_kept or [merge.keep.shape[1]] * len(keys)
    return [row[:count_kept] for row, count_kept in zip(merge.keep.tolist(), num_kept, strict=True)]


@each("protected", [0, 1])
@each("count", [1, 2, 7, 40, 97])
def test_kept_tokens_match_pairwise_loop(count: int, protected: int) -> None:
    keys = draw_noise(3, count + protected, 6, seed=count)
    for keep in (2, 0.01, 0.1, 0.4, 0.9, 10**6):
        num_kept = min(count, keep) if isinstance(keep, int) else max(1, round(keep * count))
        for got, row in zip(select(keys, keep, protected), keys, strict=True):
            want = naive_full_graph(row[protected:], num_kept)
            assert got == list(range(protected)) + [protected + token for token in want] and len(want) == num_kept


@each("partners", [1, 3, 5])
@each("threshold", [-1.0, 0.0, 0.3, 0.7])
def test_threshold_matches_loop(threshold: float, partners: int) -> None:
    shares = set()
    for count in (1, 2, 9, 64):
        keys = draw_noise(4, count + 1, 4, seed=count) + torch.tensor([0, 1, 2, 4]).view(4, 1, 1)
        rows = select(keys, 10**6, 1, threshold=threshold, partners=partners)
        bounded = select(keys, 0.3, 1, threshold=threshold, partners=partners)
        for got, fewer, row in zip(rows, bounded, keys, strict=True):
            want, limit = naive_bipartite(row[1:], threshold, partners), max(1, round(0.3 * count))
            assert got == [0] + [1 + token for token in want]
            assert fewer == [0] + [1 + token for token in naive_full_graph(row[1:], limit, want)]
            shares.add(len(got) / count)
    assert len(shares) > 3


def test_properties_of_selection() -> None:
    keys = draw_noise(2, 40, 6)
    everything = [list(range(40))] * 2
    assert select(keys, 10**6) == select(keys, 10**6, threshold=1.1) == everything
    same = torch.ones(2, 40, 6)
    assert [len(row) for row in select(same, 7)] == [7, 7]
    # Of equal tokens, the first are dropped.
    assert select(same, 7) == select(torch.zeros(2, 40, 6), 7) == [list(range(33, 40))] * 2
    orthogonal = torch.cat([keys[..., :5].abs(), torch.zeros(2, 40, 1)], 2)
    orthogonal[:, 11] = torch.eye(6)[5]
    assert all(11 in row for row in select(orthogonal, 2))  # orthogonal to all others
    broken = keys.clone()
    broken[0, 3, 2] = torch.nan
    assert select(broken, 10)[1] == select(keys, 10)[1] and len(select(broken, 10)[0]) == 10
    assert select(keys.bfloat16().float() * 3, 10) == select(keys.bfloat16().float(), 10)  # lengths have no effect


def split_keys(output: Tensor, attention: Any) -> Tensor:
    """Return the keys in a projection's output, shape (patches, heads, head_dim)."""
    heads = output.view(len(output), -1, attention.head_dim)
    if not hasattr(attention, "qkv"):
        return heads
    queries = attention.num_heads
    return heads[:, queries : queries + (heads.shape[1] - queries) // 2]


def naive_kept(model: Any, inputs: Any, modality: str, layer: int) -> list[Tensor]:
    """Return the mask of kept units per image or video, from the unpatched tower's keys, frame by frame."""
    tower, grids = tower_of(model), inputs[f"{modality}_grid_thw"]
    attention = tower.blocks[layer].attn
    with record_outputs(attention.qkv if hasattr(attention, "qkv") else attention.k) as outputs:
        encode(model, {name: inputs[name] for name in (MODALITIES[modality], f"{modality}_grid_thw")})
    keys = split_keys(torch.cat(outputs), attention).mean(1).view(len(outputs[0]) // UNIT, -1)[in_rows(tower, grids)]
    kept, start = [], 0
    for t, h, w in grids.tolist():
        units, frames = h * w // UNIT, []
        for _ in range(t):
            mask = torch.zeros(units, dtype=torch.bool)
            mask[naive_full_graph(keys[start : start + units], max(1, round(KEEP * units)))] = True
            frames.append(mask)
            start += units
        kept.append(torch.cat(frames))
    return kept


def read_kept(output: Any) -> Tensor:
    return torch.cat(list(get_record(output).groups)) >= 0


@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_tower_matches_masked_tower(name: str, modality: str, build) -> None:
    """Dropped tokens skip later blocks and the MLP of the block that drops them."""
    family = MORE[name]
    if modality == "video" and not family.video:
        pytest.skip("no videos")
    model = build(family)
    inputs = family.make_inputs(**({"images": (2, 1)} if modality == "image" else {"images": (0, 0), "video": True}))
    blocks = tower_of(model).blocks
    for layer in range(len(blocks)) if name in DIFFERENT else (0,):
        kept = naive_kept(model, inputs, modality, layer)
        options = {} if layer == 0 else {"layer": layer}
        with tokenprune.patched(model, "saint", keep=KEEP, **options), record_inputs(blocks[layer].mlp) as states:
            got = encode(model, inputs)[modality]
        assert torch.equal(read_kept(got), torch.cat(kept)) and not read_kept(got).all()
        assert [len(x) for x in states] == [UNIT * int(read_kept(got).sum())]
        check_kept_units(model, inputs, modality, got, kept, layer + 1)


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_token_count_is_per_video(name: str, build) -> None:
    """Also if the tower receives frames one by one (GLM)."""
    model, inputs = build(MORE[name]), MORE[name].make_inputs(images=(0, 0), video=True)
    units = [h * w // UNIT for t, h, w in inputs["video_grid_thw"].tolist() for _ in range(t)]
    num_tokens = sum(units) // 2
    with tokenprune.patched(model, "saint", keep=num_tokens):
        kept = read_kept(encode(model, inputs)["video"])
    assert int(kept.sum()) == num_tokens * len(inputs["video_grid_thw"])


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_threshold_acts_on_each_image(name: str, build) -> None:
    model, inputs = build(MORE[name]), MORE[name].make_inputs(images=(2, 1), sizes=((8, 12), (2, 2), (6, 10)))
    with tokenprune.patched(model, "saint", keep=KEEP, threshold=0.1, partners=1):
        batch, pieces = encode(model, inputs)["image"], []
        pixels = inputs["pixel_values"].split(inputs["image_grid_thw"].prod(1).tolist())
        for image, grid in zip(pixels, inputs["image_grid_thw"], strict=True):
            pieces.append(encode(model, {"pixel_values": image, "image_grid_thw": grid[None]})["image"])
    kept = read_kept(batch)
    assert torch.equal(kept, torch.cat([read_kept(piece) for piece in pieces])) and not kept.all()
    for actual, single in zip(tensors_of(batch), zip(*map(tensors_of, pieces), strict=True), strict=True):
        close(actual[kept], torch.cat(single)[kept], 1e-6)


@pytest.mark.parametrize("name", TILES)
@torch.no_grad()
def test_tile_tower_matches_masked_tower(name: str, build) -> None:
    family = family_of(name)
    model = build(family)
    inputs, blocks = family.make_inputs(images=(2, 1)), layers_of(tile_tower_of(model))
    read = len(blocks) - (name == "llava")  # LLaVA does not read the last block
    for layer in range(read):
        attention = getattr(blocks[layer], "self_attn", None) or blocks[layer].attention
        last = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
        with record_outputs(last) as outputs:
            encode(model, inputs)
        (keys,), tokens = outputs, outputs[0].shape[1]
        keys = keys.unflatten(2, (-1, attention.head_dim)).mean(2)[:, tokens % 2 :]
        units = squares(model, keys.shape[1])
        kept = torch.zeros(len(keys), len(units), dtype=torch.bool)
        for row, unit_keys in zip(kept, keys[:, units].flatten(2), strict=True):
            row[naive_full_graph(unit_keys, round(KEEP * len(units)))] = True
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
    if not options and name not in ("internvl", "smolvlm"):  # their images have several tiles
        assert stats.visual_tokens_out == sum(round(KEEP * count) for row in inputs.counts for count in row)
    check_decoder(family, model, inputs, run)


def test_invalid_setups_are_rejected(build) -> None:
    assert "With threshold, the content decides the count" in find_unserved_reason(
        tokenprune.method("saint", threshold=0.7)
    )
    with pytest.raises(OptionError, match="layer=2 is not read: the model reads 2 blocks"):  # the last block
        tokenprune.patch(build(FAMILIES["llava"]), "saint", layer=2)
    with pytest.raises(UnsupportedSetupError, match="where the visual token of each patch is not known"):
        tokenprune.patch(build(MORE["lfm2_vl"]), "saint")
    plan = tokenprune.method("saint").plan(Budget.from_keep(0.5), Tower(1024, 0, 32, 32))
    assert [index for index, merge in enumerate(plan) if merge] == [4]
