# SPDX-License-Identifier: Apache-2.0
"""A memory in bytes: those of the cache stay within it, text included, and what is left is less than a token's."""

from __future__ import annotations

import pytest
import torch

import tokenprune
from session_oracle import close, collated, images_of, played, recorded
from tokenprune.errors import BudgetError
from zoo import FAMILIES


def storages(session: tokenprune.sessions.Session) -> int:
    """Return the bytes of all keys and values, counted tensor by tensor."""
    layers = session._stream.memory.cache.layers
    return sum(one.numel() * one.element_size() for layer in layers for one in (layer.keys, layer.values))


@pytest.mark.parametrize("name, most", [("llava", 160), ("qwen2_5_vl", 160), ("gemma3", 90)])
def test_bytes_stay_below_the_memory_whatever_is_seen_and_said(name: str, most: int, build) -> None:
    family = FAMILIES[name]
    made = recorded(family, build(family), memory=f"{most}KiB", policy="uniform")
    images = images_of(family, 1)
    for turn in range(12):
        made.see(images)
        made.session.say([30 + turn] * 3)
        stats = made.session.stats
        assert stats.kv_bytes == storages(made.session) <= most * 1024
        assert stats.text == 3 * (turn + 1) and stats.visual <= stats.memory
    assert stats.compressions > 1
    assert close(made.logits(), made.one_prefill())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_one_token_more_would_be_too_many(name: str, dtype: torch.dtype, build) -> None:
    family = FAMILIES[name]
    model = build(family) if dtype == torch.float32 else family.build().to(dtype)
    session = tokenprune.sessions.session(model, memory="150.5KiB", policy="uniform", horizon=10**6)
    session.say([5] * (session.stats.memory - 1))
    entries = session._stream.limits.entries
    assert session.stats.memory == 1 and session.stats.text == entries - 1
    assert entries > 60
    assert session.stats.kv_bytes == storages(session) <= 150.5 * 1024
    free = tokenprune.sessions.session(model, memory=10**6, policy="uniform", horizon=10**6).say([5] * entries)
    assert free.stats.kv_bytes <= 150.5 * 1024
    assert free.say([5]).stats.kv_bytes > 150.5 * 1024


def test_it_equals_the_same_number_of_tokens_while_nothing_is_said(build) -> None:
    family = FAMILIES["llava"]
    one, other = (recorded(family, build(family), memory=memory) for memory in ("100KiB", 100))
    for made in (one, other):
        for image in images_of(family, 8):
            made.see([image])
    assert one.session.stats == other.session.stats and one.session.stats.memory == 100
    assert torch.equal(one.logits(), other.logits())


def test_text_pushes_visual_tokens_out_and_is_refused_where_none_would_be_left(build) -> None:
    family = FAMILIES["llava"]
    made = recorded(family, build(family), memory="100KiB", policy=tokenprune.sessions.policy("window", sink=10))
    made.see(images_of(family, 2))
    assert made.session.stats.visual == 72
    made.session.say([20] * 30)
    assert made.session.stats.visual == int(0.75 * 70) and made.session.stats.text == 30
    before = made.session.stats
    with pytest.raises(BudgetError, match="memory='100KiB' has room for 10 visual tokens beside 90 text tokens"):
        made.session.say([20] * 60)
    with pytest.raises(BudgetError, match="72 tokens, and memory='100KiB' has room for 70"):
        made.see(images_of(family, 2))
    assert made.session.stats == before
    made.see(images_of(family, 1))


def test_a_memory_in_bytes_is_saved(build, tmp_path) -> None:
    family = FAMILIES["llava"]
    session = played(recorded(family, build(family), memory="110KiB")).session
    session.save(tmp_path / "s.safetensors")
    other = tokenprune.sessions.Session.load(tmp_path / "s.safetensors", build(family))
    assert other.stats == session.stats and other.stats.memory == 110 - 9
    image = images_of(family, 3)
    for one in (session, other):
        one.see(input_ids=[token for i in image for token in i.ids][:36], **collated(family, image[:1]))
    assert other.stats == session.stats
