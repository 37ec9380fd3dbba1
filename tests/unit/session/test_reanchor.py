# SPDX-License-Identifier: Apache-2.0
"""Positions that move down at the horizon: keys are those of the new positions, and a common shift changes nothing."""

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

TURNING = ["llava", "qwen2_5_vl", "qwen3_vl", "internvl"]


def streamed(name: str, build, horizon: int, frames: int = 14, text: bool = False, **options) -> Recorded:
    family = FAMILIES[name]
    made = recorded(family, build(family), horizon=horizon, reanchor=True, **options)
    if text:
        made.session.say([1, 20, 21])
    for number, image in enumerate(images_of(family, frames)):
        made.see([image])
        if text and number % 2:
            made.session.say([30, 31])
        assert made.session.stats.next_position <= horizon + 1
    return made


def span(name: str) -> int:
    """Return by how many positions a frame moves the stream on."""
    made = recorded(FAMILIES[name], FAMILIES[name].build())
    made.see(images_of(FAMILIES[name], 1))
    return made.session.stats.next_position


def memory_of(name: str, frames: float) -> int:
    return int(frames * len(images_of(FAMILIES[name], 1)[0].ids))


@pytest.mark.parametrize("name", TURNING)
def test_where_all_moves_by_as_much_logits_stay(name: str, build) -> None:
    """Without a text or sink before the window there is no gap, so that a session without a horizon is the same."""
    options = {"memory": memory_of(name, 4), "policy": sessions.policy("window", sink=0)}
    near, far = (streamed(name, build, horizon, **options) for horizon in (7 * span(name) + 5, 10**6))
    assert near.session.stats.reanchored >= 2 and far.session.stats.reanchored == 0
    assert near.session.stats.next_position < far.session.stats.next_position
    assert close(near.logits(), far.logits())
    for one, other in zip(near.session.held, far.session.held, strict=True):
        assert torch.equal(one.index, other.index) and (other.position - one.position).unique().numel() == 1


class Keys:
    """Records the keys of each layer before they are turned, `[H, all seen, D]`."""

    def __init__(self, made: Recorded) -> None:
        self.layers = made.session._stream.adapter.decoder.layers
        self.found: list[list[torch.Tensor]] = [[] for _ in self.layers]
        self.handles = []
        for layer, found in zip(self.layers, self.found, strict=True):
            attention = layer.self_attn
            module = getattr(attention, "k_norm", None) or attention.k_proj
            width = attention.head_dim
            self.handles.append(
                module.register_forward_hook(
                    lambda module, args, out, found=found, width=width: found.append(
                        out[0].reshape(len(out[0]), -1, width).transpose(0, 1)
                    )
                )
            )

    def done(self) -> list[torch.Tensor]:
        for handle in self.handles:
            handle.remove()
        return [torch.cat(found, 1) for found in self.found]


@pytest.mark.parametrize("policy", ["window", "uniform", "infinipot_v"])
@pytest.mark.parametrize("name", TURNING)
def test_keys_are_those_of_the_positions_that_are_held(name: str, policy: str, build) -> None:
    family = FAMILIES[name]
    chosen = sessions.policy("window", sink=7) if policy == "window" else policy
    made = recorded(family, build(family), horizon=26 * span(name), reanchor=True, memory=memory_of(name, 3.3),
                    policy=chosen)  # fmt: skip
    keys = Keys(made)
    made.session.say([1, 20, 21])
    for number, image in enumerate(images_of(family, 40)):
        made.see([image])
        if number % 5 == 4:
            made.session.say([30, 31])
    assert made.session.stats.reanchored >= 1
    rotary = made.session._stream.adapter.decoder.rotary_emb
    for layer, held, seen in zip(made.session._stream.memory.cache.layers, made.session.held, keys.done(), strict=True):
        heads = layer.keys.shape[1]
        for head in range(heads):
            row = min(head, len(held.index) - 1)
            positions = held.position[:, row][:, None]
            cos, sin = rotary(seen, positions if len(positions) > 1 else positions[0])
            key = seen[head, held.index[row]]
            half = key.shape[-1] // 2
            turned = key * cos[0] + torch.cat([-key[:, half:], key[:, :half]], 1) * sin[0]
            # Angles of positions beyond 1,000 are exact to 1e-4 in float32.
            assert (layer.keys[0, head] - turned).abs().max() < 5e-4


def naive(frame: list[int], low: list[int], high: list[int]) -> list[int]:
    """Return by how much the entries of one head move if all gaps but that to the next token close."""
    closed, above, moved, last = 0, -1, [], None
    groups: list[list[int]] = []
    for place, one in enumerate(frame):
        if one < 0 or one != last:
            groups.append([])
        groups[-1].append(place)
        last = one
    for group in groups:
        closed += max(0, min(low[place] for place in group) - above - 1)
        above = max(above, *(high[place] for place in group))
        moved += [closed] * len(group)
    return moved


@pytest.mark.parametrize("policy", ["uniform", "infinipot_v"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_gaps_close_frame_by_frame_and_the_newest_move_with_the_next(name: str, policy: str, build) -> None:
    options = {"memory": memory_of(name, 3.3), "policy": policy, "text": True}
    session = streamed(name, build, 10**6, frames=40, **options).session
    before, stats = session.held, session.stats
    moved = []
    for held in before:
        for row in range(len(held.index)):
            low, high = held.position[:, row].amin(0).tolist(), held.position[:, row].amax(0).tolist()
            moved.append(naive(held.frame[row].tolist(), low, high))
    down = min(one[-1] for one in moved)
    assert down > 0
    session._stream.limits = dataclasses.replace(session._stream.limits, horizon=stats.next_position)
    session.say([50, 51, 52])
    assert session.stats.reanchored == 1 and session.stats.next_position == stats.next_position - down + 3
    rows = iter(moved)
    for held, old in zip(session.held, before, strict=True):
        for row in range(len(old.index)):
            closed = next(rows)
            wanted = torch.tensor([closed[-1] - one - down for one in closed])
            found = held.position[:, row, : len(wanted)] - old.position[:, row]
            assert torch.equal(found, wanted.expand_as(found))
            assert int(held.position.min()) >= 0


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_question_at_the_horizon_leaves_the_stream_bit_equal(name: str, build) -> None:
    made, other = (streamed(name, build, 9 * span(name) + 13, frames=9, memory=110, text=True) for _ in range(2))
    assert made.session.stats.reanchored == 0
    answers = [made.session.ask([30] * 10, max_new_tokens=3, return_dict=True) for _ in range(2)]
    assert torch.equal(answers[0].logits, answers[1].logits)
    assert made.session.stats.reanchored == 0 and torch.equal(made.logits([50]), other.logits([50]))


def test_a_moved_session_is_saved_and_forked(build, tmp_path) -> None:
    made = streamed("llava", build, 300, memory=120, text=True).session
    assert made.stats.reanchored
    made.save(tmp_path / "s.safetensors")
    other, fork = sessions.Session.load(tmp_path / "s.safetensors", build(FAMILIES["llava"])), made.fork()
    image = images_of(FAMILIES["llava"], 1)[0]
    for _ in range(6):
        for one in (made, other, fork):
            one.see(input_ids=image.ids, **FAMILIES["llava"].collate([[image]]))
    assert made.stats == other.stats == fork.stats
    found = [one.ask([30], max_new_tokens=2, return_dict=True).logits for one in (made, other, fork)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_text_that_fills_the_horizon_is_refused_with_the_session_as_it_was(build) -> None:
    made = recorded(FAMILIES["llava"], build(FAMILIES["llava"]), horizon=100, reanchor=True, policy="uniform")
    made.session.say([5] * 80)
    before = made.session.stats
    with pytest.raises(UnsupportedSetupError, match=r"position 115, .*leaves no room \(memory=\). Call reset"):
        made.see(images_of(FAMILIES["llava"], 1))
    assert made.session.stats == before
    made.session.say([5] * 15)


@pytest.mark.parametrize("policy", ["window", "uniform", "infinipot_v"])
@pytest.mark.parametrize("name", TURNING)
def test_of_a_memory_larger_than_the_positions_what_came_first_leaves(name: str, policy: str, build) -> None:
    family, chosen = FAMILIES[name], sessions.policy("window", sink=7) if policy == "window" else policy
    horizon = 5 * span(name)
    made = recorded(family, build(family), horizon=horizon, memory=10**6, policy=chosen)
    made.session.say([1, 20, 21])
    for image in images_of(family, 14):
        made.see([image])
        assert made.session.stats.next_position <= horizon + 1
    made.session.ask([30], max_new_tokens=2, return_dict=True)
    stats = made.session.stats
    assert stats.text == 3 and stats.reanchored >= 3 and stats.compressions >= 3
    for held in made.session.held:
        visual = held.frame[held.frame >= 0].view(len(held.frame), -1)
        late = visual[:, 7:] if policy == "window" else visual
        assert late.min() >= 8 and late.max() == 13
        if policy == "window":
            assert torch.equal(held.index[:, 3:10], torch.arange(3, 10).expand(len(visual), -1))


def shortened(name: str, positions: int):
    model = FAMILIES[name].build()
    model.config.text_config.max_position_embeddings = positions
    return model


@pytest.mark.parametrize("name", TURNING)
def test_a_session_goes_on_past_the_last_position_by_itself(name: str) -> None:
    """Over more images than the model has positions; what it answers is what an explicit reanchor=True does."""
    family, model = FAMILIES[name], shortened(name, 6 * span(name))
    options = {"memory": memory_of(name, 3.3), "policy": sessions.policy("window", sink=7)}
    answers = []
    for reanchor in ({}, {"reanchor": True}):
        session = sessions.session(model, **options, **reanchor).say([1, 20, 21])
        for number, image in enumerate(images_of(family, 20)):
            session.see(input_ids=image.ids, **family.collate([[image]]))
            if number in (3, 9, 19):
                answers.append(session.ask([30, 31], max_new_tokens=2, return_dict=True))
        assert session.stats.frames_seen == 20 and session.stats.reanchored >= 3
        assert session.stats.next_position <= 6 * span(name)
    for one, other in zip(answers[:3], answers[3:], strict=True):
        assert torch.equal(one.logits, other.logits) and torch.equal(one.ids, other.ids)
    kept = sessions.session(model, **options, reanchor=False)
    with pytest.raises(UnsupportedSetupError, match=r"positions cannot move down \(reanchor=False\). Call reset"):
        for image in images_of(family, 20):
            kept.see(input_ids=image.ids, **family.collate([[image]]))


@torch.no_grad()
def test_a_shipped_model_sees_more_images_than_it_has_positions() -> None:
    """Each of 256 tokens, of 2,048 positions; also where the memory is as large as that."""
    model, processor, images = (
        demo_model(),
        AutoProcessor.from_pretrained(DEMO),
        [photo(64, 64, seed) for seed in range(10)],
    )
    found = []
    for reanchor in (None, True):
        session = sessions.session(model, processor, memory=2048, policy="infinipot_v", reanchor=reanchor).see(images)
        assert (
            session.stats.tokens_seen > model.config.text_config.max_position_embeddings > session.stats.next_position
        )
        found.append(session.ask("what color is the circle?", max_new_tokens=3, return_dict=True))
    assert found[0].text == found[1].text != "" and torch.equal(found[0].logits, found[1].logits)


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
    # By default the session begins, and the last position is an error.
    session = sessions.session(shortened("gemma3", 100), memory=60, policy="uniform")
    with pytest.raises(UnsupportedSetupError, match="positions of 'gemma3' cannot be moved down"):
        for image in images_of(FAMILIES["gemma3"], 20):
            session.see(input_ids=image.ids, **FAMILIES["gemma3"].collate([[image]]))
    assert 0 < session.stats.frames_seen < 20
    session = sessions.session(llava, memory=100, horizon=20, reanchor=False)
    with pytest.raises(UnsupportedSetupError, match="reanchor=False"):
        session.say([5] * 30)
    with pytest.raises(OptionError, match="reanchor=1 must be True or False"):
        sessions.session(llava, memory=100, reanchor=1)
