# SPDX-License-Identifier: Apache-2.0
"""A session computes what one prefill of the same stream computes, under a mask of what was gone when a query came."""

from __future__ import annotations

import copy

import pytest
import torch

from each import each
from session_oracle import NAMES, close, images_of, played, recorded
from tokenprune.models.families.tested import SESSIONS
from zoo import FAMILIES

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
