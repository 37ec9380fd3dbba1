# SPDX-License-Identifier: Apache-2.0
"""Positions move down at the horizon: keys match the new positions, and a common shift preserves the logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoProcessor

from processors import DEMO, demo_model, photo
from session_oracle import Recorded, close, images_of, recorded
from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.hf import sessions
from zoo import FAMILIES

ROTARY = ["llava", "qwen2_5_vl", "qwen3_vl", "internvl"]


def play_stream(name: str, build, horizon: int, frames: int = 14, text: bool = False, **options) -> Recorded:
    family = FAMILIES[name]
    recording = recorded(family, build(family), horizon=horizon, reanchor=True, **options)
    if text:
        recording.session.say([1, 20, 21])
    for index, image in enumerate(images_of(family, frames)):
        recording.see([image])
        if text and index % 2:
            recording.session.say([30, 31])
        assert recording.session.stats.next_position <= horizon + 1
    return recording


def measure_span(name: str) -> int:
    """Return the number of positions that a frame takes."""
    recording = recorded(FAMILIES[name], FAMILIES[name].build())
    recording.see(images_of(FAMILIES[name], 1))
    return recording.session.stats.next_position


def count_memory(name: str, frames: float) -> int:
    return int(frames * len(images_of(FAMILIES[name], 1)[0].ids))


@pytest.mark.parametrize("name", ROTARY)
def test_common_shift_preserves_the_logits(name: str, build) -> None:
    """Without text or sink before the window all gaps are closed, so a session without horizon is equal."""
    options = {"memory": count_memory(name, 4), "policy": sessions.policy("window", sink=0)}
    moved, unmoved = (play_stream(name, build, horizon, **options) for horizon in (7 * measure_span(name) + 5, 10**6))
    assert moved.session.stats.reanchored >= 2 and unmoved.session.stats.reanchored == 0
    assert moved.session.stats.next_position < unmoved.session.stats.next_position
    assert close(moved.logits(), unmoved.logits())
    for actual, expected in zip(moved.session.held, unmoved.session.held, strict=True):
        assert torch.equal(actual.index, expected.index) and (expected.position - actual.position).unique().numel() == 1


class KeyRecorder:
    """Records the unrotated keys of each layer, `[H, all tokens, D]`."""

    def __init__(self, recording: Recorded) -> None:
        self.layers = recording.session._stream.adapter.decoder.layers
        self.recorded: list[list[torch.Tensor]] = [[] for _ in self.layers]
        self.handles = []
        for layer, layer_keys in zip(self.layers, self.recorded, strict=True):
            attention = layer.self_attn
            module = getattr(attention, "k_norm", None) or attention.k_proj
            width = attention.head_dim
            self.handles.append(
                module.register_forward_hook(
                    lambda module, args, out, layer_keys=layer_keys, width=width: layer_keys.append(
                        out[0].reshape(len(out[0]), -1, width).transpose(0, 1)
                    )
                )
            )

    def stop(self) -> list[torch.Tensor]:
        for handle in self.handles:
            handle.remove()
        return [torch.cat(layer_keys, 1) for layer_keys in self.recorded]


@pytest.mark.parametrize("policy", ["window", "uniform", "infinipot_v"])
@pytest.mark.parametrize("name", ROTARY)
def test_keys_match_the_held_positions(name: str, policy: str, build) -> None:
    family = FAMILIES[name]
    chosen_policy = sessions.policy("window", sink=7) if policy == "window" else policy
    recording = recorded(
        family,
        build(family),
        horizon=26 * measure_span(name),
        reanchor=True,
        memory=count_memory(name, 3.3),
        policy=chosen_policy,
    )
    recorder = KeyRecorder(recording)
    recording.session.say([1, 20, 21])
    for index, image in enumerate(images_of(family, 40)):
        recording.see([image])
        if index % 5 == 4:
            recording.session.say([30, 31])
    assert recording.session.stats.reanchored >= 1
    rotary = recording.session._stream.adapter.decoder.rotary_emb
    for layer, held, unrotated in zip(
        recording.session._stream.memory.cache.layers, recording.session.held, recorder.stop(), strict=True
    ):
        heads = layer.keys.shape[1]
        for head in range(heads):
            row = min(head, len(held.index) - 1)
            positions = held.position[:, row][:, None]
            cos, sin = rotary(unrotated, positions if len(positions) > 1 else positions[0])
            key = unrotated[head, held.index[row]]
            half = key.shape[-1] // 2
            expected = key * cos[0] + torch.cat([-key[:, half:], key[:, :half]], 1) * sin[0]
            # Angles of positions beyond 1,000 are exact to 1e-4 in float32.
            assert (layer.keys[0, head] - expected).abs().max() < 5e-4


def count_closed_gaps(frame: list[int], low: list[int], high: list[int]) -> list[int]:
    """Return the shift of each entry of a head if all gaps except the last gap close."""
    closed, above, moved, last = 0, -1, [], None
    groups: list[list[int]] = []
    for index, frame_index in enumerate(frame):
        if frame_index < 0 or frame_index != last:
            groups.append([])
        groups[-1].append(index)
        last = frame_index
    for group in groups:
        closed += max(0, min(low[index] for index in group) - above - 1)
        above = max(above, *(high[index] for index in group))
        moved += [closed] * len(group)
    return moved


@pytest.mark.parametrize("policy", ["uniform", "infinipot_v"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_gaps_close_frame_by_frame_and_the_newest_move_with_the_next(name: str, policy: str, build) -> None:
    options = {"memory": count_memory(name, 3.3), "policy": policy, "text": True}
    session = play_stream(name, build, 10**6, frames=40, **options).session
    before, stats = session.held, session.stats
    moved = []
    for held in before:
        for row in range(len(held.index)):
            low, high = held.position[:, row].amin(0).tolist(), held.position[:, row].amax(0).tolist()
            moved.append(count_closed_gaps(held.frame[row].tolist(), low, high))
    down = min(distances[-1] for distances in moved)
    assert down > 0
    session._stream.limits = dataclasses.replace(session._stream.limits, horizon=stats.next_position)
    session.say([50, 51, 52])
    assert session.stats.reanchored == 1 and session.stats.next_position == stats.next_position - down + 3
    rows = iter(moved)
    for held, old in zip(session.held, before, strict=True):
        for row in range(len(old.index)):
            shifts = next(rows)
            expected = torch.tensor([shifts[-1] - distances - down for distances in shifts])
            actual = held.position[:, row, : len(expected)] - old.position[:, row]
            assert torch.equal(actual, expected.expand_as(actual))
            assert int(held.position.min()) >= 0


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_question_at_the_horizon_leaves_the_stream_bit_equal(name: str, build) -> None:
    asked, silent = (
        play_stream(name, build, 9 * measure_span(name) + 13, frames=9, memory=110, text=True) for _ in range(2)
    )
    assert asked.session.stats.reanchored == 0
    answers = [asked.session.ask([30] * 10, max_new_tokens=3, return_dict=True) for _ in range(2)]
    assert torch.equal(answers[0].logits, answers[1].logits)
    assert asked.session.stats.reanchored == 0 and torch.equal(asked.logits([50]), silent.logits([50]))


def test_a_moved_session_is_saved_and_forked(build, tmp_path) -> None:
    session = play_stream("llava", build, 300, memory=120, text=True).session
    assert session.stats.reanchored
    session.save(tmp_path / "s.safetensors")
    other, fork = sessions.Session.load(tmp_path / "s.safetensors", build(FAMILIES["llava"])), session.fork()
    image = images_of(FAMILIES["llava"], 1)[0]
    for _ in range(6):
        for each_session in (session, other, fork):
            each_session.see(input_ids=image.ids, **FAMILIES["llava"].collate([[image]]))
    assert session.stats == other.stats == fork.stats
    logits = [
        each_session.ask([30], max_new_tokens=2, return_dict=True).logits for each_session in (session, other, fork)
    ]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_text_that_fills_the_horizon_is_refused_with_the_session_as_it_was(build) -> None:
    recording = recorded(FAMILIES["llava"], build(FAMILIES["llava"]), horizon=100, reanchor=True, policy="uniform")
    recording.session.say([5] * 80)
    before = recording.session.stats
    with pytest.raises(UnsupportedSetupError, match=r"position 115, .*leaves no room \(memory=\). Call reset"):
        recording.see(images_of(FAMILIES["llava"], 1))
    assert recording.session.stats == before
    recording.session.say([5] * 15)


@pytest.mark.parametrize("policy", ["window", "uniform", "infinipot_v"])
@pytest.mark.parametrize("name", ROTARY)
def test_memory_larger_than_the_positions_evicts_first_entries(name: str, policy: str, build) -> None:
    family, chosen_policy = FAMILIES[name], sessions.policy("window", sink=7) if policy == "window" else policy
    horizon = 5 * measure_span(name)
    recording = recorded(family, build(family), horizon=horizon, memory=10**6, policy=chosen_policy)
    recording.session.say([1, 20, 21])
    for image in images_of(family, 14):
        recording.see([image])
        assert recording.session.stats.next_position <= horizon + 1
    recording.session.ask([30], max_new_tokens=2, return_dict=True)
    stats = recording.session.stats
    assert stats.text == 3 and stats.reanchored >= 3 and stats.compressions >= 3
    for held in recording.session.held:
        visual = held.frame[held.frame >= 0].view(len(held.frame), -1)
        late = visual[:, 7:] if policy == "window" else visual
        assert late.min() >= 8 and late.max() == 13
        if policy == "window":
            assert torch.equal(held.index[:, 3:10], torch.arange(3, 10).expand(len(visual), -1))


def build_with_positions(name: str, positions: int):
    model = FAMILIES[name].build()
    model.config.text_config.max_position_embeddings = positions
    return model


@pytest.mark.parametrize("name", ROTARY)
def test_a_session_goes_on_past_the_last_position_by_itself(name: str) -> None:
    """A session with more images than positions equals a session with reanchor=True."""
    family, model = FAMILIES[name], build_with_positions(name, 6 * measure_span(name))
    options = {"memory": count_memory(name, 3.3), "policy": sessions.policy("window", sink=7)}
    answers = []
    for reanchor in ({}, {"reanchor": True}):
        session = sessions.session(model, **options, **reanchor).say([1, 20, 21])
        for index, image in enumerate(images_of(family, 20)):
            session.see(input_ids=image.ids, **family.collate([[image]]))
            if index in (3, 9, 19):
                answers.append(session.ask([30, 31], max_new_tokens=2, return_dict=True))
        assert session.stats.frames_seen == 20 and session.stats.reanchored >= 3
        assert session.stats.next_position <= 6 * measure_span(name)
    for default, explicit in zip(answers[:3], answers[3:], strict=True):
        assert torch.equal(default.logits, explicit.logits) and torch.equal(default.ids, explicit.ids)
    without_reanchor = sessions.session(model, **options, reanchor=False)
    with pytest.raises(UnsupportedSetupError, match=r"positions cannot move down \(reanchor=False\). Call reset"):
        for image in images_of(family, 20):
            without_reanchor.see(input_ids=image.ids, **family.collate([[image]]))


@torch.no_grad()
def test_a_shipped_model_sees_more_images_than_it_has_positions() -> None:
    """Each image has 256 tokens, and the model and the memory have 2,048."""
    model, processor, images = (
        demo_model(),
        AutoProcessor.from_pretrained(DEMO),
        [photo(64, 64, seed) for seed in range(10)],
    )
    answers = []
    for reanchor in (None, True):
        session = sessions.session(model, processor, memory=2048, policy="infinipot_v", reanchor=reanchor).see(images)
        assert (
            session.stats.tokens_seen > model.config.text_config.max_position_embeddings > session.stats.next_position
        )
        answers.append(session.ask("what color is the circle?", max_new_tokens=3, return_dict=True))
    assert answers[0].text == answers[1].text != "" and torch.equal(answers[0].logits, answers[1].logits)


def test_positions_that_cannot_be_moved_are_refused_by_name(build) -> None:
    gemma, llava = build(FAMILIES["gemma3"]), FAMILIES["llava"].build()
    with pytest.raises(UnsupportedModelError, match="positions of 'gemma3' cannot be moved down"):
        sessions.session(gemma, memory=100, policy="uniform", reanchor=True)
    rotary = llava.model.language_model.rotary_emb
    for name, value in (("attention_scaling", 1.2), ("rope_type", "dynamic"), ("inv_freq", rotary.inv_freq[:2])):
        old = getattr(rotary, name)
        setattr(rotary, name, value)
        with pytest.raises(UnsupportedModelError, match="Leave out reanchor=True"):
            sessions.session(llava, memory=100, reanchor=True)
        setattr(rotary, name, old)
    sessions.session(llava, memory=100, reanchor=True)
    # By default the session starts, and raises at the last position.
    session = sessions.session(build_with_positions("gemma3", 100), memory=60, policy="uniform")
    with pytest.raises(UnsupportedSetupError, match="positions of 'gemma3' cannot be moved down"):
        for image in images_of(FAMILIES["gemma3"], 20):
            session.see(input_ids=image.ids, **FAMILIES["gemma3"].collate([[image]]))
    assert 0 < session.stats.frames_seen < 20
    session = sessions.session(llava, memory=100, horizon=20, reanchor=False)
    with pytest.raises(UnsupportedSetupError, match="reanchor=False"):
        session.say([5] * 30)
    with pytest.raises(OptionError, match="reanchor=1 must be True or False"):
        sessions.session(llava, memory=100, reanchor=1)
