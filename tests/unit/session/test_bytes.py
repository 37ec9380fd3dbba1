# SPDX-License-Identifier: Apache-2.0
"""A memory in bytes limits the cache, text included, to within a token."""

from __future__ import annotations

import pytest
import torch

import tokenprune
from session_oracle import close, collated, images_of, played, recorded
from tokenprune.errors import BudgetError
from zoo import FAMILIES


def count_bytes(session: tokenprune.sessions.Session) -> int:
    """Return the bytes of all keys and values."""
    layers = session._stream.memory.cache.layers
    return sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("name, max_kib", [("llava", 160), ("qwen2_5_vl", 160), ("gemma3", 90)])
def test_bytes_stay_below_the_memory(name: str, max_kib: int, build) -> None:
    family = FAMILIES[name]
    recording = recorded(family, build(family), memory=f"{max_kib}KiB", policy="uniform")
    images = images_of(family, 1)
    for turn in range(12):
        recording.see(images)
        recording.session.say([30 + turn] * 3)
        stats = recording.session.stats
        assert stats.kv_bytes == count_bytes(recording.session) <= max_kib * 1024
        assert stats.text == 3 * (turn + 1) and stats.visual <= stats.memory
    assert stats.compressions > 1
    assert close(recording.logits(), recording.one_prefill())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_one_more_token_exceeds_the_memory(name: str, dtype: torch.dtype, build) -> None:
    family = FAMILIES[name]
    model = build(family) if dtype == torch.float32 else family.build().to(dtype)
    session = tokenprune.sessions.session(model, memory="150.5KiB", policy="uniform", horizon=10**6)
    session.say([5] * (session.stats.memory - 1))
    entries = session._stream.limits.entries
    assert session.stats.memory == 1 and session.stats.text == entries - 1
    assert entries > 60
    assert session.stats.kv_bytes == count_bytes(session) <= 150.5 * 1024
    unlimited = tokenprune.sessions.session(model, memory=10**6, policy="uniform", horizon=10**6).say([5] * entries)
    assert unlimited.stats.kv_bytes <= 150.5 * 1024
    assert unlimited.say([5]).stats.kv_bytes > 150.5 * 1024


def test_bytes_without_text_equal_a_memory_in_tokens(build) -> None:
    family = FAMILIES["llava"]
    in_bytes, in_tokens = (recorded(family, build(family), memory=memory) for memory in ("100KiB", 100))
    for recording in (in_bytes, in_tokens):
        for image in images_of(family, 8):
            recording.see([image])
    assert in_bytes.session.stats == in_tokens.session.stats and in_bytes.session.stats.memory == 100
    assert torch.equal(in_bytes.logits(), in_tokens.logits())


def test_text_evicts_visual_tokens_until_none_would_remain(build) -> None:
    family = FAMILIES["llava"]
    recording = recorded(family, build(family), memory="100KiB", policy=tokenprune.sessions.policy("window", sink=10))
    recording.see(images_of(family, 2))
    assert recording.session.stats.visual == 72
    recording.session.say([20] * 30)
    assert recording.session.stats.visual == int(0.75 * 70) and recording.session.stats.text == 30
    before = recording.session.stats
    with pytest.raises(BudgetError, match="memory='100KiB' has room for 10 visual tokens beside 90 text tokens"):
        recording.session.say([20] * 60)
    with pytest.raises(BudgetError, match="72 tokens, and memory='100KiB' has room for 70"):
        recording.see(images_of(family, 2))
    assert recording.session.stats == before
    recording.see(images_of(family, 1))


def test_a_memory_in_bytes_is_saved(build, tmp_path) -> None:
    family = FAMILIES["llava"]
    session = played(recorded(family, build(family), memory="110KiB")).session
    session.save(tmp_path / "s.safetensors")
    other = tokenprune.sessions.Session.load(tmp_path / "s.safetensors", build(family))
    assert other.stats == session.stats and other.stats.memory == 110 - 9
    image = images_of(family, 3)
    for each_session in (session, other):
        each_session.see(input_ids=[token for i in image for token in i.ids][:36], **collated(family, image[:1]))
    assert other.stats == session.stats
