# SPDX-License-Identifier: Apache-2.0
"""Sessions of a patched model: the method selects tokens in each block, and the policy among the selected tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tokenprune
from each import each
from session_oracle import NAMES, Recorded, close, collated, images_of, played, recorded
from tokenprune.budgets import Budget
from tokenprune.errors import ConfigError, UnsupportedSetupError
from tokenprune.integrations.hf.cache.reduced_cache import get_reduction
from zoo import FAMILIES

PATCHED = [name for name in NAMES if name != "gemma3"]


@pytest.fixture
def patched(build) -> Iterator[Any]:
    """Return a function that patches a family's model until the end of the test."""
    models = []

    def patch(name: str, method: str = "divprune", keep: Any = 0.5, **options: Any) -> Any:
        models.append(tokenprune.patch(build(FAMILIES[name]), method, keep=keep, **options))
        return models[-1]

    yield patch
    for model in models:
        if tokenprune.is_patched(model):
            tokenprune.unpatch(model)


def prefill_unpatched(recording: Recorded) -> torch.Tensor:
    """Return the logits of one prefill by the unpatched model under the recorded masks."""
    tokenprune.unpatch(recording.model)
    return recording.one_prefill()


def select_in_single_call(model: Any, recording: Recorded, images: list) -> list[int]:
    """Return the tokens that the patched model keeps of a block in a separate call."""
    ids = torch.tensor([[token for image in images for token in image.ids]])
    output = model(input_ids=ids, use_cache=True, **collated(recording.family, images))
    return get_reduction(output.past_key_values).slots[0][1][0].tolist()


@each("name", PATCHED)
@each("policy, memory", [("window", 10**6), ("uniform", 60), ("infinipot_v", 60)])
def test_it_equals_one_prefill_without_what_was_pruned_and_evicted(name: str, policy: str, memory: int, patched):
    images = images_of(FAMILIES[name], 2)
    memory = max(memory, sum(len(image.ids) for image in images))
    recording = played(recorded(FAMILIES[name], patched(name), memory=memory, policy=policy), asked=True)
    stats = recording.session.stats
    blocks = [forward for forward in recording.forwards if forward.inputs]
    count = blocks[0].ids.shape[1]
    pruned = sum(image.count - round(image.count / 2) for image in images)
    assert all(len(forward.entered) == count - pruned for forward in blocks)
    assert stats.tokens_seen == 6 * count + 9 and stats.text == 9
    assert stats.visual == 6 * (count - pruned) if memory == 10**6 else stats.compressions > 1
    assert not hasattr(recording.session._stream.memory.cache, "tokenprune_reduction")
    logits = recording.logits()
    assert close(logits, prefill_unpatched(recording))
    assert (logits - recording.one_prefill(masked=False)).abs().max() > 0.01


@pytest.mark.parametrize("method", ["divprune", "visionzip", "uniform"])
def test_blocks_are_pruned_independently(method: str, patched) -> None:
    model = patched("llava", method, 0.25)
    recording = recorded(FAMILIES["llava"], model, memory=100, policy="uniform")
    images = images_of(FAMILIES["llava"], 6)
    for start in range(0, 6, 2):
        recording.see(images[start : start + 2])
        assert recording.forwards[-1].entered.tolist() == select_in_single_call(
            model, recording, images[start : start + 2]
        )


def test_all_tokens_kept_is_the_session_of_the_unpatched_model(patched, build) -> None:
    unpruned = played(recorded(FAMILIES["qwen2_5_vl"], patched("qwen2_5_vl", keep=1.0), memory=110))
    logits = unpruned.logits()
    tokenprune.unpatch(unpruned.model)
    plain = played(recorded(FAMILIES["qwen2_5_vl"], build(FAMILIES["qwen2_5_vl"]), memory=110))
    assert torch.equal(logits, plain.logits())


def test_proxy_reanchoring_and_save(patched, tmp_path) -> None:
    family = FAMILIES["llava"]
    policy = tokenprune.sessions.policy("streammem", proxy=(30, 31))
    model = patched("llava")
    recording = recorded(family, model, memory=80, policy=policy, horizon=700, reanchor=True)
    for image in images_of(family, 30):
        recording.see([image])
    session = recording.session
    assert session.stats.compressions > 5 and session.stats.reanchored >= 1 and session.stats.visual <= 80
    session.save(tmp_path / "s.safetensors")
    other = tokenprune.sessions.Session.load(tmp_path / "s.safetensors", model)
    logits = [
        each_session.ask([30], max_new_tokens=2, return_dict=True).logits
        for each_session in (session, other, session.fork())
    ]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    tokenprune.unpatch(model)
    with pytest.raises(ConfigError, match=r"a model with tokenprune: divprune\(\), keep=0.5.*not none"):
        tokenprune.sessions.Session.load(tmp_path / "s.safetensors", model)


def test_a_failed_block_leaves_the_cache_an_ordinary_one(patched, monkeypatch) -> None:
    model = patched("llava")
    recording = recorded(FAMILIES["llava"], model, memory=100)
    images = images_of(FAMILIES["llava"], 2)
    recording.see(images)
    answer = recording.session.ask([30], max_new_tokens=2, return_dict=True).logits
    before = recording.session.stats
    monkeypatch.setattr(model.lm_head, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recording.see(images)
    monkeypatch.undo()
    assert get_reduction(recording.session._stream.memory.cache) is None
    assert recording.session.stats == before
    assert torch.equal(recording.session.ask([30], max_new_tokens=2, return_dict=True).logits, answer)


@pytest.mark.parametrize(
    "name, method, keep, options, message",
    [
        ("llava", "fastv", 0.5, {"layer": 1}, "fastv acts in the language model"),
        ("llava", "restore", 0.5, {"calibrate": True}, "restore weighs attention"),
        ("llava", "divprune", Budget.by_age(0.5, ((0, 1.0), (1, 0.5))), {}, "depends on all images of a prompt"),
        ("llava", "divprune", Budget(0.5, per="prompt"), {}, "depends on all images of a prompt"),
        ("llava", "cdpruner", 0.5, {}, "cdpruner reads the question"),
        ("llava", "divprune", 0.5, {"feature_cache": 10**6}, "feature_cache= keeps the features"),
        ("llava", "divprune", 0.5, {"guard": "warn"}, "guard='off'"),
        ("gemma3", "divprune", 0.5, {}, "token type masks of 'gemma3'"),
    ],
)
def test_other_patches_are_refused_by_name(name: str, method: str, keep, options: dict, message: str, patched) -> None:
    with pytest.raises(UnsupportedSetupError, match=rf"{message}.*tokenprune.unpatch\(model\) first"):
        tokenprune.sessions.session(patched(name, method, keep, **options), memory=100)


def test_a_patch_that_changed_since_is_refused(patched) -> None:
    model = patched("llava")
    recording = recorded(FAMILIES["llava"], model, memory=100)
    tokenprune.patch(model, "divprune", keep=0.25, replace=True)
    with pytest.raises(UnsupportedSetupError, match=r"keep=0.5.* and the patch is now .*keep=0.25"):
        recording.session.say([5])
    tokenprune.unpatch(model)
    with pytest.raises(UnsupportedSetupError, match=r"the patch is now none\. Restore it"):
        recording.session.say([5])
    tokenprune.patch(model, "divprune", keep=0.5)
    recording.session.say([5])
