# SPDX-License-Identifier: Apache-2.0
"""The stream of a session equals one prefill under a mask of evicted entries.

Also tested: positions, wrappers, bytes, `remember`, and other users of the model.
"""

from __future__ import annotations

import copy

import pytest
import torch

from each import each
from session_oracle import NAMES, close, images_of, played, recorded
from tokenprune.integrations.hf import sessions
from tokenprune.models.families.tested import SESSIONS
from zoo import FAMILIES, IMAGE, VIDEO, InputImage

WITH_VIDEOS = [name for name in NAMES if FAMILIES[name].video is not None]
MROPE = [name for name in NAMES if name.startswith("qwen")]


def make_blocks(name: str) -> list[list[InputImage]]:
    """Return blocks of images and videos, with an upright image next to another image."""
    family, g = FAMILIES[name], torch.Generator().manual_seed(5)
    upright = family.image((12, 8), g, 2)
    videos = [family.video(g, frames) for frames in (2, None, 4)]
    return [[family.image(family.sizes[0], g, 2)], [videos[0]], [upright, family.image(family.sizes[0], g, 2)],
            [videos[1]], [upright], [videos[2]]]  # fmt: skip


@pytest.mark.parametrize("name", MROPE)
def test_positions_by_block_are_those_of_the_whole(name: str, build) -> None:
    recording = recorded(FAMILIES[name], build(FAMILIES[name]))
    for block in make_blocks(name):
        recording.see(block)
        recording.session.say([20, 21])
    ids = torch.cat([forward.ids for forward in recording.forwards], 1)
    blocks = make_blocks(name)
    grids = {
        key: torch.cat([image.pixels[key] for block in blocks for image in block if key in image.pixels])
        for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        if any(key in image.pixels for block in blocks for image in block)
    }
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    positions, _ = recording.model.model.get_rope_index(ids, mm_token_type_ids=types, **grids)
    assert torch.equal(positions, torch.cat([forward.positions for forward in recording.forwards], -1))
    assert torch.equal(recording.session.held[0].position[:, 0], positions[:, 0])


@pytest.mark.parametrize("name", WITH_VIDEOS)
@pytest.mark.parametrize("memory", [10**6, 60])
def test_a_stream_of_clips_equals_one_prefill(name: str, memory: int, build) -> None:
    family, g = FAMILIES[name], torch.Generator().manual_seed(5)
    recording = recorded(family, build(family), memory=memory, policy="uniform")
    recording.session.say([1, 20])
    for _ in range(6):
        recording.see([family.video(g, 4)])
    assert recording.session.stats.frames_seen == 24
    assert (recording.session.stats.compressions > 1) == (memory == 60)
    assert close(recording.logits(), recording.one_prefill())


@pytest.mark.parametrize("name", NAMES)
def test_each_token_of_a_block_has_its_frame_and_cell(name: str, build) -> None:
    family = FAMILIES[name]
    recording, images = recorded(family, build(family)), images_of(FAMILIES[name], 3)
    recording.see(images)
    recording.see(images)  # frame indices continue
    images, held = images * 2, recording.session.held[0]
    wrapped = [token for image in images for token in image.ids]
    frames = [index for index, image in enumerate(images) for _ in image.ids]
    cells: list[int] = []
    for image in images:
        count = iter(range(image.count))
        cells += [next(count) if token == IMAGE else -1 for token in image.ids]
    assert len(wrapped) == held.frame.shape[1]
    assert held.frame[0].tolist() == frames and held.cell[0].tolist() == cells


def test_wrappers_are_evicted_with_their_frames(build) -> None:
    """For a thousand frames of one visual token and two wrapper tokens, the memory is not exceeded."""
    family, g = FAMILIES["qwen2_5_vl"], torch.Generator().manual_seed(0)
    session = sessions.session(build(family), memory=60, policy=sessions.policy("window", sink=8), horizon=10**6)
    session.say([1, 20])
    for _ in range(50):
        images = [family.image((2, 2), g, 2) for _ in range(20)]
        session.see(
            input_ids=[token for image in images for token in image.ids],
            pixel_values=torch.cat([image.pixels["pixel_values"] for image in images]),
            image_grid_thw=torch.cat([image.pixels["image_grid_thw"] for image in images]),
        )
        stats = session.stats
        assert stats.visual <= 60 and stats.text == 2
    assert stats.frames_seen == 1000 and stats.tokens_seen == 3002
    assert {*session.held[0].frame[0].tolist()} >= {-1, 0, 999}


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_bytes_are_flat(name: str, build) -> None:
    family = FAMILIES[name]
    recording = recorded(family, build(family), memory=200, policy="window")
    memory, images, sizes, peaks = recording.session._stream.memory, images_of(family, 4), [], []
    for _ in range(30):
        recording.see(images)
        layers = memory.cache.layers
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for layer in layers for t in (layer.keys, layer.values)}  # fmt: skip
        storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in memory.tables}
        if memory.visual == recording.session._stream.limits.target(0):  # directly after a compression
            sizes.append(sum(storages.values()))
        peaks.append(recording.session.stats.kv_bytes_peak)
    assert len(sizes) > 5 and len(set(sizes[1:])) == 1
    assert len(set(peaks[10:])) == 1


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_remembered_answer_equals_said_tokens(name: str, build) -> None:
    asked, told = (played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=120)) for _ in range(2))
    answer = asked.session.ask([30, 31], max_new_tokens=4, remember=True, return_dict=True)
    told.session.say([30, 31]).say(answer.ids)
    assert torch.equal(asked.logits(), told.logits())
    assert asked.session.stats.text == told.session.stats.text


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_answer_equals_a_loop_over_tokens(name: str, build) -> None:
    recording = played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=120, policy="uniform"))
    answer = recording.session.ask([30, 31, 32], max_new_tokens=5, return_dict=True)
    ids = [30, 31, 32]
    for token, logits in zip(answer.ids.tolist(), answer.logits, strict=True):
        expected = recording.logits(ids)
        assert close(logits, expected) and int(expected.argmax()) == token
        ids = [token]
    assert answer.text is None


def test_sessions_and_a_plain_generate_on_one_model_do_not_mix(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, images = build(family), images_of(FAMILIES["qwen2_5_vl"], 6)
    single = recorded(family, model, memory=150)
    for start in range(0, 6, 2):
        single.see(images[start : start + 2])
    first, second = recorded(family, model, memory=150), recorded(family, model, memory=10**5, policy="random")
    inputs = family.make_inputs(rows=1)
    plain = model.generate(**inputs, max_new_tokens=3)
    for start in range(0, 6, 2):
        first.see(images[start : start + 2])
        second.see(images[4 - start : 6 - start])
        assert torch.equal(model.generate(**inputs, max_new_tokens=3), plain)
    assert torch.equal(first.logits(), single.logits())


def test_repetition_penalty_reads_the_stream(build) -> None:
    session = sessions.session(build(FAMILIES["llava"]), memory=10**5)
    tokens = [1, 20, 21]
    session.say(tokens)
    for _ in range(30):  # until the most likely token is already in the stream
        token = int(session.ask([30], max_new_tokens=1, return_dict=True).ids[0])
        if token in tokens:
            break
        session.say([token])
        tokens.append(token)
    assert token in tokens
    other = session.ask([30], max_new_tokens=1, return_dict=True, repetition_penalty=1e6)
    assert int(other.ids[0]) not in [*tokens, 30]


def test_a_closed_session_holds_nothing(build) -> None:
    recording = recorded(FAMILIES["llava"], build(FAMILIES["llava"]))
    with recording.session as session:
        recording.see(images_of(recording.family, 2))
        assert session.stats.kv_bytes > 0
    assert session.stats.kv_bytes == session.stats.tokens_seen == 0
    assert session.stats.oldest_frame is None


POLICIES = ["window", "uniform", "random"]


def test_families_with_sessions_are_all_in_the_zoo() -> None:
    assert set(NAMES) == SESSIONS


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_it_equals_one_prefill(name: str, build) -> None:
    recording = played(recorded(FAMILIES[name], build(FAMILIES[name])))
    assert close(recording.logits(), recording.one_prefill(masked=False))
    assert recording.session.stats.compressions == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_after_evictions_it_equals_one_prefill_under_a_mask(name: str, policy: str, build) -> None:
    memory = 2 * images_of(FAMILIES[name], 1)[0].count + 20
    recording = played(
        recorded(FAMILIES[name], build(FAMILIES[name]), memory=max(memory, 90), policy=policy), asked=True
    )
    logits = recording.logits()
    assert close(logits, recording.one_prefill())
    assert recording.session.stats.compressions >= 3 and recording.session.stats.visual <= max(memory, 90)
    # Text is never evicted: 4 and 5 tokens, and the last 3.
    assert recording.session.stats.text == 12
    assert all(bool(((held.frame < 0).sum(1) == 12).all()) for held in recording.session.held)
    # Logits with the whole stream differ.
    assert (logits - recording.one_prefill(masked=False)).abs().max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_a_question_leaves_the_stream_bit_equal(name: str, build) -> None:
    memory = max(2 * images_of(FAMILIES[name], 1)[0].count + 20, 90)
    asked, silent = (
        played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=memory), asked=has_questions)
        for has_questions in (True, False)
    )
    assert torch.equal(asked.logits(), silent.logits())
    for entries, other in zip(asked.session.held, silent.session.held, strict=True):
        assert torch.equal(entries.index, other.index) and torch.equal(entries.position, other.position)


@each("memory", [10**6, 124])
@each("dtype", [torch.bfloat16, torch.float16])
@each("name", NAMES)
def test_half_precision_is_as_near_to_float32_as_one_prefill_in_it(name: str, dtype: torch.dtype, memory: int) -> None:
    half = FAMILIES[name].build("sdpa").to(dtype)
    half_session, exact = (
        played(recorded(FAMILIES[name], model, memory=memory)) for model in (half, copy.deepcopy(half).float())
    )
    actual, expected = half_session.logits().float(), exact.logits()
    prefill_error = (half_session.one_prefill(masked=memory < 10**6).float() - expected).abs().max()
    assert 0 < (actual - expected).abs().max() <= 3 * prefill_error < 3
    assert all(
        torch.equal(a.index, b.index) for a, b in zip(half_session.session.held, exact.session.held, strict=True)
    )
