# SPDX-License-Identifier: Apache-2.0
"""Bad input to sessions raises our errors with advice, and leaves the session unchanged."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import tokenprune
from each import each
from families import FAMILIES
from session_oracle import collated, images_of
from tokenprune.errors import (
    BudgetError,
    OptionError,
    SessionError,
    UnknownPolicyError,
    UnsupportedModelError,
    UnsupportedSetupError,
)
from tokenprune.integrations.hf.sessions.policies import registry as policies
from tokenprune.integrations.hf.sessions.prompts import as_frames
from zoo import IMAGE

LLAVA = FAMILIES["llava"]


@pytest.fixture
def session(build) -> tokenprune.sessions.Session:
    empty = tokenprune.sessions.session(build(LLAVA), memory=100)
    return empty.say([1, 20]).see(**make_block(2))


def make_block(frames: int) -> dict:
    images = images_of(LLAVA, frames)
    return {"input_ids": [token for image in images for token in image.ids], **collated(LLAVA, images)}


def get_state(session: tokenprune.sessions.Session) -> tuple:
    entries = [(entry.index.tolist(), entry.frame.tolist()) for entry in session.held]
    layers = session._stream.memory.cache.layers
    return session.stats, entries, [(layer.keys.clone(), layer.values.clone()) for layer in layers]


def is_unchanged(session: tokenprune.sessions.Session, before: tuple) -> bool:
    after = get_state(session)
    return after[:2] == before[:2] and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(after[2], before[2], strict=True)
    )


@each(
    "options, error, message",
    [
        ({"memory": 0}, BudgetError, "memory=0 must be a number of visual tokens"),
        ({"memory": 1.5}, BudgetError, "memory=1.5"),
        ({"memory": True}, BudgetError, "memory=True"),
        ({"memory": "2GB"}, BudgetError, "memory='2GB' must be .* or bytes as in '64MiB'"),
        ({"memory": "-1MiB"}, BudgetError, "memory='-1MiB' must be"),
        ({"memory": "9" * 400 + "GiB"}, BudgetError, "must be"),
        ({"memory": "0.5KiB"}, BudgetError, "is 512 bytes: one token takes 1024 of this model's cache$"),
        ({"memory": "50KiB"}, BudgetError, "room for 50 visual tokens; a compression keeps 37"),
        ({"memory": 50}, BudgetError, "pins 64, so that no new token would be kept. Raise memory= to 87 "),
        ({"memory": 100, "target": 0}, BudgetError, "target=0"),
        ({"memory": 100, "target": 1.1}, BudgetError, "target=1.1"),
        ({"memory": 100, "target": float("nan")}, BudgetError, "target=nan"),
        ({"memory": 100, "block": 0}, OptionError, "block=0"),
        ({"memory": 100, "horizon": -1}, OptionError, "horizon=-1"),
        ({"memory": 100, "seed": "x"}, OptionError, "seed='x'"),
        ({"memory": 100, "policy": "windw"}, UnknownPolicyError, "did you mean 'window'"),
        ({"memory": 100, "policy": 3}, OptionError, "policy=3 must be a name"),
    ],
)
def test_invalid_settings_are_refused(options: dict, error: type, message: str, build) -> None:
    with pytest.raises(error, match=message):
        tokenprune.sessions.session(build(LLAVA), **options)


@pytest.mark.parametrize(
    "make_input, error, message",
    [
        (lambda: {}, SessionError, "There are no frames"),
        (lambda: {"frames": []}, SessionError, "There are no frames"),
        (lambda: {"input_ids": [20, 21]}, SessionError, "no image or video placeholder"),
        (lambda: make_block(1) | {"input_ids": []}, SessionError, "not one row"),
        (lambda: make_block(1) | {"input_ids": [[IMAGE], [IMAGE]]}, SessionError, "a batch of 1"),
        (lambda: {"pixel_values": make_block(1)["pixel_values"]}, SessionError, "not one row"),
        (lambda: make_block(1) | {"pixel_values": torch.full((1, 3, 24, 24), torch.nan)}, SessionError, "NaN"),
        (lambda: make_block(3), BudgetError, "108 tokens, and memory=100 has room for 100"),
        (
            lambda: make_block(1) | {"input_ids": [IMAGE] * 35},
            SessionError,
            "The model does not accept this block: .*tokens: 35",
        ),
        (lambda: {"frames": object()}, SessionError, "Frames of type object are not supported"),
    ],
)
def test_invalid_frames_leave_the_session_unchanged(make_input, error: type, message: str, session) -> None:
    before = get_state(session)
    with pytest.raises(error, match=message):
        session.see(**make_input())
    assert is_unchanged(session, before)
    session.see(**make_block(1))
    assert session.stats.frames_seen == 3


def test_a_failure_in_the_second_block_takes_back_the_first(session, monkeypatch) -> None:
    before, see, calls = get_state(session), session._stream.see, []
    two_frames = make_block(2)
    two_frames["input_ids"] = torch.tensor([two_frames["input_ids"]])  # a batch of one row, as processors return

    def fail_second(ids, inputs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room")
        return see(ids, inputs)

    monkeypatch.setattr(session._stream, "see", fail_second)
    monkeypatch.setattr(type(session), "_writer", None)
    monkeypatch.setattr(
        "tokenprune.integrations.hf.sessions.api.iter_blocks", lambda *args: iter([two_frames, two_frames])
    )
    monkeypatch.setattr("tokenprune.integrations.hf.sessions.api.as_frames", lambda frames: frames)
    with pytest.raises(MemoryError):
        session.see([1])
    assert len(calls) == 2 and is_unchanged(session, before)


def test_a_failure_between_two_layers_is_taken_back(session, build) -> None:
    before = get_state(session)

    def fail(module, args):
        raise RuntimeError("halfway")

    with build(LLAVA).model.language_model.layers[2].register_forward_pre_hook(fail):
        for call in (
            lambda: session.see(**make_block(1)),
            lambda: session.say([5]),
            lambda: session.ask([5], return_dict=True),
        ):
            with pytest.raises((RuntimeError, SessionError)):
                call()
            assert is_unchanged(session, before)


@each(
    "options, message",
    [
        ({"num_beams": 2}, "num_beams=2 is not supported by a session"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"past_key_values": object()}, "past_key_values is set by the session"),
        ({"position_ids": object()}, "position_ids is set by the session"),
        ({"use_cache": False}, "use_cache=False"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_unsupported_generate_options_are_refused(options: dict, message: str, session) -> None:
    before = get_state(session)
    with pytest.raises(OptionError, match=message):
        session.ask([30], return_dict=True, **options)
    assert is_unchanged(session, before)


def test_words_need_a_processor(session) -> None:
    for call in (lambda: session.say("hello"), lambda: session.ask("why?", return_dict=True), lambda: session.see([])):
        with pytest.raises(SessionError):
            call()
    with pytest.raises(SessionError, match="pass return_dict=True"):
        session.ask([30])
    with pytest.raises(SessionError, match="placeholder"):
        session.say([IMAGE])


def test_a_question_before_anything_was_said_is_answered(build) -> None:
    model = build(LLAVA)
    session = tokenprune.sessions.session(model, memory=100)
    answer = session.ask([1, 30, 31], max_new_tokens=3, return_dict=True)
    assert torch.equal(answer.ids, model.generate(torch.tensor([[1, 30, 31]]), max_new_tokens=3)[0, 3:])
    assert session.stats.tokens_seen == session.stats.kv_bytes == 0
    session.see(**make_block(1))


def test_a_second_thread_is_refused_and_the_first_goes_on(session, build) -> None:
    entered, resume, errors = threading.Event(), threading.Event(), []

    def wait(module, args):
        entered.set()
        resume.wait(20)

    handle = build(LLAVA).model.language_model.layers[0].register_forward_pre_hook(wait)
    first = threading.Thread(target=lambda: session.see(**make_block(1)))
    try:
        first.start()
        assert entered.wait(20)
        for call in (lambda: session.say([5]), lambda: session.see(**make_block(1)), session.reset):
            with pytest.raises(SessionError, match="Another call of this session"):
                call()
            errors.append(1)
    finally:
        resume.set()
        first.join()
        handle.remove()
    assert len(errors) == 3 and session.stats.frames_seen == 3
    session.say([5])


def test_a_model_that_is_patched_meanwhile_is_refused(session, build) -> None:
    model = build(LLAVA)
    with tokenprune.patched(model, "divprune", keep=0.5):
        before = get_state(session)
        with pytest.raises(
            UnsupportedSetupError, match="began on a model with no patch, and the patch is now tokenprune"
        ):
            session.see(**make_block(1))
        assert is_unchanged(session, before)
    session.see(**make_block(1))


def test_a_model_that_changed_since_is_refused(session, build) -> None:
    model = build(LLAVA)
    model.train()
    try:
        with pytest.raises(UnsupportedSetupError, match="training"):
            session.say([5])
    finally:
        model.eval()
    model.double()
    try:
        with pytest.raises(UnsupportedSetupError, match="float32 on cpu when the session began"):
            session.say([5])
    finally:
        model.float()
    session.say([5])


@each("target", [0.75, 0.7, 1.0])
@pytest.mark.parametrize("name", tokenprune.sessions.available_policies())
def test_minimum_memory_matches_the_error_and_the_page(name: str, target: float, build) -> None:
    """The memory must hold a block, and after a compression more entries than the policy pins."""
    policy = tokenprune.sessions.policy(name, **({"proxy": [20]} if name == "streammem" else {}))
    block_tokens = len(make_block(1)["input_ids"])

    def fits(memory: int) -> bool:
        try:
            tokenprune.sessions.session(build(LLAVA), memory=memory, policy=policy, target=target).see(**make_block(1))
        except BudgetError as error:
            assert memory < block_tokens or f"Raise memory= to {min_memory} visual tokens" in str(error)
            return False
        return True

    min_memory = next(memory for memory in range(1, 200) if max(1, int(memory * target)) > policy.pinned)
    if policy.pinned and target == 0.75:
        page = " ".join((Path(__file__).parents[3] / "docs/guides/chats.md").read_text().split())
        assert f"with `{name}` at least {min_memory} tokens, more than `sink / target`" in page
    assert [fits(max(min_memory, block_tokens) + more) for more in (-1, 0)] == [False, True]


@each(
    "name, options, error, message",
    [
        ("smolvlm", {"memory": 100}, UnsupportedModelError, "smolvlm.*llava"),  # sessions are not tested
        ("idefics3", {"memory": 100}, UnsupportedModelError, "idefics3.*llava"),
        ("qwen3_5", {"memory": 100}, UnsupportedModelError, "cannot drop entries from the"),  # layers with a state
        ("lfm2_vl", {"memory": 100}, UnsupportedModelError, "cannot drop entries from the"),
        ("gemma3", {"memory": 20, "policy": "uniform"}, BudgetError, "keeps 15 visual tokens, fewer than the 16"),
    ],
)
def test_models_without_sessions_are_refused_by_name(
    name: str, options: dict, error: type, message: str, build
) -> None:
    with pytest.raises(error, match=message):
        tokenprune.sessions.session(build(FAMILIES[name]), **options)


def test_a_position_past_the_horizon_is_refused(build) -> None:
    session = tokenprune.sessions.session(build(LLAVA), memory=100, horizon=90, reanchor=False)
    session.say([1, 20]).see(**make_block(2))
    before = get_state(session)
    with pytest.raises(UnsupportedSetupError, match=r"position 109, the last position is 90.*reset\(\)"):
        session.see(**make_block(1))
    with pytest.raises(UnsupportedSetupError, match="horizon"):
        session.ask([30], max_new_tokens=64, return_dict=True)
    assert is_unchanged(session, before)
    assert session.ask([30], max_new_tokens=8, return_dict=True).ids.shape == (8,)
    assert session.reset().see(**make_block(2)).stats.frames_seen == 2
    by_config = tokenprune.sessions.session(build(LLAVA), memory=100, reanchor=False)
    for _ in range(7):
        by_config.see(**make_block(2))
    with pytest.raises(UnsupportedSetupError, match="last position is 511"):
        by_config.see(**make_block(2))


@pytest.mark.parametrize(
    "choice, message",
    [
        (lambda view, keep: torch.arange(keep - 1), "returned torch.int64"),
        (lambda view, keep: torch.arange(keep).float(), "returned torch.float32"),
        (lambda view, keep: list(range(keep)), "returned list"),
        (lambda view, keep: torch.arange(keep).flip(0), "ascending"),
        (lambda view, keep: torch.zeros(keep, dtype=torch.long), "ascending"),
        (lambda view, keep: torch.arange(keep) + view.count, "ascending"),
        (lambda view, keep: torch.arange(keep).expand(3, -1), "returned torch.int64"),
    ],
)
def test_a_policy_that_chooses_otherwise_is_named(choice, message: str, build, monkeypatch) -> None:
    monkeypatch.setattr(policies, "_POLICIES", dict(policies._POLICIES))

    @tokenprune.sessions.register_policy("crooked")
    @dataclass(frozen=True)
    class Crooked(tokenprune.sessions.Policy):
        """Return the indices of a test case."""

        def select(self, view, keep):
            return choice(view, keep)

    session = tokenprune.sessions.session(build(LLAVA), memory=100, policy=Crooked()).see(**make_block(2))
    before = get_state(session)
    with pytest.raises(SessionError, match=f"crooked.*{message}"):
        session.see(**make_block(2))
    assert is_unchanged(session, before)


def test_frames_come_as_images_lists_arrays_and_tensors() -> None:
    video = np.random.default_rng(0).integers(0, 256, (2, 6, 8, 3), dtype=np.uint8)
    first, second = as_frames(video)
    assert first.size == (8, 6) and np.array_equal(np.asarray(second), video[1])
    for equal_frames in ([first, second], torch.tensor(video).permute(0, 3, 1, 2), video / 255, [video[0], video[1]]):
        assert [np.asarray(image).tolist() for image in as_frames(equal_frames)] == video.tolist()
    assert len(as_frames(first)) == len(as_frames(video[0])) == 1
    for frames, message in (
        (np.zeros((4, 8, 8)), "is not a video"),
        (np.zeros((2, 0, 8, 3), np.uint8), "A frame of 8x0 pixels is empty"),
        (np.full((2, 8, 8, 3), np.nan), "NaN"),
        (np.full((2, 8, 8, 3), 255.0), r"\[0, 1\]"),
        (np.zeros((2, 8, 8, 3), np.int64), "int64"),
        ("frame.png", "Frames of type str"),
        (None, "Frames of type NoneType"),
    ):
        with pytest.raises(SessionError, match=message):
            as_frames(frames)
