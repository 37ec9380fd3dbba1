# SPDX-License-Identifier: Apache-2.0
"""pevlm's block attention against a dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tests.unit.engine.test_modes  # noqa: F401  (registers flash_stand_in)
import tokenprune
from block_settings import (
    BATCHES,
    SMALL,
    VIDEO_FAMILIES,
    WAYS,
    block_ids,
    blocked,
    real_of,
    visuals_of,
)
from module_calls import record_inputs
from oracle import close, generate_logits
from tokenprune.kernels.block_attention import PADDING, SINK, TAIL
from zoo import FAMILIES, VIDEO, Family


@pytest.fixture(params=VIDEO_FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_equals_a_dense_mask(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    ids, mask = block_ids(inputs), real_of(inputs)
    with blocked(family, model, ids):
        want = model(**inputs).logits[mask]
    assert (model(**inputs).logits[mask] - want).abs().max() > 0.1  # full attention gives other logits
    for use_back_end in WAYS:
        with tokenprune.patched(model, "pevlm", **SMALL), use_back_end():
            out = model(**inputs)
            stats = tokenprune.stats(model)
        close(out.logits[mask], want)
    length = inputs["input_ids"].shape[1]
    assert all(layer.keys.shape[-2] == length for layer in out.past_key_values.layers)
    assert stats.visual_tokens_in == stats.visual_tokens_out and stats.kv_bytes == stats.kv_bytes_full
    assert stats.attention_blocks == sum(len(set(row) - {PADDING, SINK, TAIL}) for row in ids.tolist())
    num_without_video = sum(VIDEO not in row for row in inputs["input_ids"].tolist())
    assert stats.notes == ["pevlm: full attention for a prompt, because it contains no video"] * num_without_video


@pytest.mark.parametrize("batch", ["one row", "left", "mixed"])
def test_generate(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    with tokenprune.patched(model, "pevlm", **SMALL):
        got, tokens, _ = generate_logits(model, inputs, 3)
    with blocked(family, model, block_ids(inputs)):
        close(got, generate_logits(model, inputs, 3, tokens=tokens)[0])


@pytest.mark.parametrize("families", ["qwen2_vl", "qwen3_vl"])
@torch.no_grad()
def test_batch_matches_single_rows(families: str, build) -> None:
    family = FAMILIES[families]
    model, inputs = build(family), family.make_inputs(video=(13, 7), images=(0, 0))
    with tokenprune.patched(model, "pevlm", **SMALL):
        batch_logits = model(**inputs).logits
        for row, mask in enumerate(real_of(inputs)):
            single = family.make_inputs(video=(13, 7), images=(0, 0), only=row)
            close(batch_logits[row, mask], model(**single).logits[0])


@torch.no_grad()
def test_rows_of_equal_length_are_computed_together(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(**BATCHES["left"])
    twice = {key: value.repeat(2, *[1] * (value.ndim - 1)) for key, value in inputs.items()}
    with tokenprune.patched(model, "pevlm", **SMALL):
        close(model(**twice).logits, model(**inputs).logits.repeat(2, 1, 1))


@pytest.mark.parametrize("batch", ["left", "mixed"])
def test_beams(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    beams = dict(max_new_tokens=3, num_beams=3, return_dict_in_generate=True, output_scores=True)
    with tokenprune.patched(model, "pevlm", **SMALL):
        got = model.generate(**inputs, **beams)
        assert tokenprune.stats(model).attention_blocks == 3 * 3 * (2 if batch == "left" else 1)
    with blocked(family, model, block_ids(inputs).repeat_interleave(3, 0)):
        want = model.generate(**inputs, **beams)
    assert torch.equal(got.sequences, want.sequences)
    close(got.sequences_scores, want.sequences_scores)


@torch.no_grad()
def test_one_block_or_a_large_sink_equals_full_attention(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    full = model(**inputs).logits
    with tokenprune.patched(model, "pevlm", sink_frames=2, block_frames=11, min_frames=1):
        got = model(**inputs).logits
        assert tokenprune.stats(model).attention_blocks == 1
        assert tokenprune.stats(model).prefill_flops_ratio == pytest.approx(1)
    close(got, full)
    with tokenprune.patched(model, "pevlm", sink_frames=13, min_frames=1):
        assert torch.equal(model(**inputs).logits, full)
        assert "sink contains all" in tokenprune.stats(model).notes[0]


@torch.no_grad()
def test_sink_and_first_block_equal_full_attention(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    ids = block_ids(inputs)[0]
    full = model(**inputs, output_hidden_states=True).hidden_states
    with tokenprune.patched(model, "pevlm", **SMALL):
        got = model(**inputs, output_hidden_states=True).hidden_states
    for layer, (actual, expected) in enumerate(zip(got, full, strict=True)):
        for part in (SINK, 1):
            close(actual[0, ids == part], expected[0, ids == part])
        # The tail attends to all blocks, so it differs one layer after their keys differ.
        for part, from_layer in ((2, 1), (TAIL, 2)):
            differs = (actual - expected)[0, ids == part].abs().amax()
            assert (differs > 1e-3) == (layer >= from_layer)


def swap_blocks(inputs: Any, ids: Tensor, a: int, b: int, frames: int) -> Any:
    """Return the prompt with blocks a and b of its video swapped, including the text between frames."""
    other = {key: value.clone() for key, value in inputs.items()}
    frame_blocks = [int(ids[first]) for first, _ in visuals_of(inputs, 0, frames)[0].frames]
    x, y = ([frame for frame, block in enumerate(frame_blocks) if block == block_id] for block_id in (a, b))
    order = list(range(frames))
    for i, j in zip(x, y, strict=True):
        order[i], order[j] = j, i
    pixels = other["pixel_values_videos"]
    if pixels.ndim == 5:
        other["pixel_values_videos"] = pixels[:, order]
    else:
        other["pixel_values_videos"] = pixels.unflatten(0, (frames, -1))[order].flatten(0, 1)
    other["input_ids"][0, ids == a], other["input_ids"][0, ids == b] = (
        inputs["input_ids"][0, ids == b],
        inputs["input_ids"][0, ids == a],
    )
    return other


@torch.no_grad()
def test_blocks_do_not_attend_to_each_other(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    ids = block_ids(inputs)[0]
    changed_inputs = {key: value.clone() for key, value in inputs.items()}
    pixels = changed_inputs["pixel_values_videos"]  # frames 6 to 9 are block 2
    frames = pixels[0] if pixels.ndim == 5 else pixels.unflatten(0, (13, -1))
    frames[6:10] = torch.randn_like(frames[6:10])
    with tokenprune.patched(model, "pevlm", **SMALL):
        original = model(**inputs, output_hidden_states=True).hidden_states
        changed = model(**changed_inputs, output_hidden_states=True).hidden_states
    for layer, (a, b) in enumerate(zip(original, changed, strict=True)):
        for part in (SINK, 1, 3):
            assert torch.equal(a[0, ids == part], b[0, ids == part])
        assert not torch.equal(a[0, ids == 2], b[0, ids == 2])
        assert (not torch.equal(a[0, ids == TAIL], b[0, ids == TAIL])) == (layer > 0)


@torch.no_grad()
def test_order_of_blocks_matters_only_with_sequential_positions(family: Family, build) -> None:
    """With reused positions, equal blocks can be swapped."""
    model, inputs = build(family), family.make_inputs(video=14, images=(0,))
    ids = block_ids(inputs, 14)[0]
    assert (ids == 1).sum() == (ids == 2).sum()
    changed_inputs = swap_blocks(inputs, ids, 1, 2, 14)
    for mode in ("reuse", "sequential"):
        with tokenprune.patched(model, "pevlm", **SMALL, position_mode=mode):
            original, changed = model(**inputs), model(**changed_inputs)
        for a, b in zip(original.past_key_values.layers, changed.past_key_values.layers, strict=True):
            if mode == "reuse":
                for kind in ("keys", "values"):
                    x, y = getattr(a, kind)[0], getattr(b, kind)[0]
                    close(x[:, ids == 1], y[:, ids == 2])
                    close(x[:, ids == 2], y[:, ids == 1])
                    close(x[:, ids == 3], y[:, ids == 3])
        differs = (original.logits - changed.logits)[0, ids == TAIL].abs().max()
        assert differs < 1e-3 if mode == "reuse" else differs > 0.1


def record_positions(family: Family, model: Any, inputs: Any, steps: int) -> list[Tensor | None]:
    """Record the positions passed to the rotary embedding in prefill and in each decode step."""
    rotary = model.get_submodule(family.decoder).rotary_emb
    with record_inputs(rotary, note=lambda args, kwargs: kwargs.get("position_ids", *args[1:2])) as positions:
        model.generate(**inputs, max_new_tokens=steps)
    return positions


@pytest.mark.parametrize("batch", ["left", "mixed"])
def test_positions(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    full = record_positions(family, model, inputs, 4)
    with tokenprune.patched(model, "pevlm", **SMALL):
        got = record_positions(family, model, inputs, 4)
    with tokenprune.patched(model, "pevlm", **SMALL, position_mode="reuse"):
        reuse = record_positions(family, model, inputs, 4)
    assert len(got) == 4 and all(torch.equal(a, b) for a, b in zip(got, full, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(reuse[1:], full[1:], strict=True))
    ids = block_ids(inputs)
    for row, row_ids in enumerate(ids):
        fixed = (row_ids <= 1) | (row_ids == TAIL)
        assert torch.equal(reuse[0][..., row, fixed], full[0][..., row, fixed])
        for block in range(2, 1 + int(row_ids[row_ids < TAIL].max())):
            block_positions, first_positions = (reuse[0][..., row, row_ids == block_id] for block_id in (block, 1))
            shared = min(block_positions.shape[-1], first_positions.shape[-1])
            assert torch.equal(block_positions[..., :shared], first_positions[..., :shared])
