# SPDX-License-Identifier: Apache-2.0
"""The stream of a session equals one prefill of it, under a mask of what was evicted. Positions, wrappers, bytes,
`remember`, and other users of the same model."""

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


def shown(name: str) -> list[list[InputImage]]:
    """Blocks of images and videos, an upright one and one that lies among them."""
    family, g = FAMILIES[name], torch.Generator().manual_seed(5)
    upright = family.image((12, 8), g, 2)
    videos = [family.video(g, frames) for frames in (2, None, 4)]
    return [[family.image(family.sizes[0], g, 2)], [videos[0]], [upright, family.image(family.sizes[0], g, 2)],
            [videos[1]], [upright], [videos[2]]]  # fmt: skip


@pytest.mark.parametrize("name", MROPE)
def test_positions_by_block_are_those_of_the_whole(name: str, build) -> None:
    made = recorded(FAMILIES[name], build(FAMILIES[name]))
    for block in shown(name):
        made.see(block)
        made.session.say([20, 21])
    ids = torch.cat([one.ids for one in made.forwards], 1)
    blocks = shown(name)
    grids = {
        key: torch.cat([image.pixels[key] for block in blocks for image in block if key in image.pixels])
        for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        if any(key in image.pixels for block in blocks for image in block)
    }
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    whole, _ = made.model.model.get_rope_index(ids, mm_token_type_ids=types, **grids)
    assert torch.equal(whole, torch.cat([one.positions for one in made.forwards], -1))
    assert torch.equal(made.session.held[0].position[:, 0], whole[:, 0])


@pytest.mark.parametrize("name", WITH_VIDEOS)
@pytest.mark.parametrize("memory", [10**6, 60])
def test_a_stream_of_clips_equals_one_prefill(name: str, memory: int, build) -> None:
    family, g = FAMILIES[name], torch.Generator().manual_seed(5)
    made = recorded(family, build(family), memory=memory, policy="uniform")
    made.session.say([1, 20])
    for _ in range(6):
        made.see([family.video(g, 4)])
    assert made.session.stats.frames_seen == 24
    assert (made.session.stats.compressions > 1) == (memory == 60)
    assert close(made.logits(), made.one_prefill())


@pytest.mark.parametrize("name", NAMES)
def test_each_token_of_a_block_has_its_frame_and_cell(name: str, build) -> None:
    family = FAMILIES[name]
    made, images = recorded(family, build(family)), images_of(FAMILIES[name], 3)
    made.see(images)
    made.see(images)  # frames count on
    images, held = images * 2, made.session.held[0]
    wrapped = [token for image in images for token in image.ids]
    frames = [number for number, image in enumerate(images) for _ in image.ids]
    cells: list[int] = []
    for image in images:
        count = iter(range(image.count))
        cells += [next(count) if token == IMAGE else -1 for token in image.ids]
    assert len(wrapped) == held.frame.shape[1]
    assert held.frame[0].tolist() == frames and held.cell[0].tolist() == cells


def test_wrappers_leave_with_their_frames(build) -> None:
    """A thousand frames of one visual token each, between two others: held are no more than the memory."""
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
    made = recorded(family, build(family), memory=200, policy="window")
    memory, images, sizes, peaks = made.session._stream.memory, images_of(family, 4), [], []
    for _ in range(30):
        made.see(images)
        layers = memory.cache.layers
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for layer in layers for t in (layer.keys, layer.values)}  # fmt: skip
        storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in memory.tables}
        if memory.visual == made.session._stream.limits.target(0):  # right after a compression
            sizes.append(sum(storages.values()))
        peaks.append(made.session.stats.kv_bytes_peak)
    assert len(sizes) > 5 and len(set(sizes[1:])) == 1
    assert len(set(peaks[10:])) == 1


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_remembered_turns_are_what_was_said(name: str, build) -> None:
    one, two = (played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=120)) for _ in range(2))
    found = one.session.ask([30, 31], max_new_tokens=4, remember=True, return_dict=True)
    two.session.say([30, 31]).say(found.ids)
    assert torch.equal(one.logits(), two.logits())
    assert one.session.stats.text == two.session.stats.text


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_an_answer_is_that_of_a_loop_of_one_token_each(name: str, build) -> None:
    made = played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=120, policy="uniform"))
    answer = made.session.ask([30, 31, 32], max_new_tokens=5, return_dict=True)
    ids = [30, 31, 32]
    for token, logits in zip(answer.ids.tolist(), answer.logits, strict=True):
        own = made.logits(ids)
        assert close(logits, own) and int(own.argmax()) == token
        ids = [token]
    assert answer.text is None


def test_sessions_and_a_plain_generate_on_one_model_do_not_mix(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, images = build(family), images_of(FAMILIES["qwen2_5_vl"], 6)
    alone = recorded(family, model, memory=150)
    for start in range(0, 6, 2):
        alone.see(images[start : start + 2])
    one, other = recorded(family, model, memory=150), recorded(family, model, memory=10**5, policy="random")
    inputs = family.make_inputs(rows=1)
    plain = model.generate(**inputs, max_new_tokens=3)
    for start in range(0, 6, 2):
        one.see(images[start : start + 2])
        other.see(images[4 - start : 6 - start])
        assert torch.equal(model.generate(**inputs, max_new_tokens=3), plain)
    assert torch.equal(one.logits(), alone.logits())


def test_penalties_for_repetition_read_what_was_said(build) -> None:
    session = sessions.session(build(FAMILIES["llava"]), memory=10**5)
    said = [1, 20, 21]
    session.say(said)
    for _ in range(30):  # until what is likeliest was said before
        likely = int(session.ask([30], max_new_tokens=1, return_dict=True).ids[0])
        if likely in said:
            break
        session.say([likely])
        said.append(likely)
    assert likely in said
    other = session.ask([30], max_new_tokens=1, return_dict=True, repetition_penalty=1e6)
    assert int(other.ids[0]) not in [*said, 30]


def test_a_closed_session_holds_nothing(build) -> None:
    made = recorded(FAMILIES["llava"], build(FAMILIES["llava"]))
    with made.session as session:
        made.see(images_of(made.family, 2))
        assert session.stats.kv_bytes > 0
    assert session.stats.kv_bytes == session.stats.tokens_seen == 0
    assert session.stats.oldest_frame is None


POLICIES = ["window", "uniform", "random"]


def test_families_with_sessions_are_all_in_the_zoo() -> None:
    assert set(NAMES) == SESSIONS


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_it_equals_one_prefill(name: str, build) -> None:
    made = played(recorded(FAMILIES[name], build(FAMILIES[name])))
    assert close(made.logits(), made.one_prefill(masked=False))
    assert made.session.stats.compressions == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_after_evictions_it_equals_one_prefill_under_a_mask(name: str, policy: str, build) -> None:
    memory = 2 * images_of(FAMILIES[name], 1)[0].count + 20
    made = played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=max(memory, 90), policy=policy), asked=True)
    found = made.logits()
    assert close(found, made.one_prefill())
    assert made.session.stats.compressions >= 3 and made.session.stats.visual <= max(memory, 90)
    # Text stays: 4 and 5 tokens, and the last 3.
    assert made.session.stats.text == 12
    assert all(bool(((held.frame < 0).sum(1) == 12).all()) for held in made.session.held)
    # The test has teeth: with all of the stream the logits are others.
    assert (found - made.one_prefill(masked=False)).abs().max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_a_question_leaves_the_stream_bit_equal(name: str, build) -> None:
    memory = max(2 * images_of(FAMILIES[name], 1)[0].count + 20, 90)
    asked, silent = (
        played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=memory), asked=one) for one in (True, False)
    )
    assert torch.equal(asked.logits(), silent.logits())
    for one, other in zip(asked.session.held, silent.session.held, strict=True):
        assert torch.equal(one.index, other.index) and torch.equal(one.position, other.position)


@each("memory", [10**6, 124])
@each("dtype", [torch.bfloat16, torch.float16])
@each("name", NAMES)
def test_half_precision_is_as_near_to_float32_as_one_prefill_in_it(name: str, dtype: torch.dtype, memory: int) -> None:
    half = FAMILIES[name].build("sdpa").to(dtype)
    one, exact = (
        played(recorded(FAMILIES[name], model, memory=memory)) for model in (half, copy.deepcopy(half).float())
    )
    found, wanted = one.logits().float(), exact.logits()
    by_prefill = (one.one_prefill(masked=memory < 10**6).float() - wanted).abs().max()
    assert 0 < (found - wanted).abs().max() <= 3 * by_prefill < 3
    assert all(torch.equal(a.index, b.index) for a, b in zip(one.session.held, exact.session.held, strict=True))
