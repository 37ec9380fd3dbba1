# SPDX-License-Identifier: Apache-2.0
"""A session computes what one prefill of the same stream computes, under a mask of what was gone when a query came."""

from __future__ import annotations

import pytest
import torch

from session_oracle import Recorded, images_of, recorded
from tokenprune.families import SUPPORTED
from zoo import FAMILIES

NAMES = [name for name in FAMILIES if SUPPORTED[name].sessions]
MEMORY = {"gemma3": 100}
POLICIES = ["window", "uniform", "random"]


def test_families_with_sessions_are_all_in_the_zoo() -> None:
    assert {name for name, family in SUPPORTED.items() if family.sessions} == set(NAMES)


def played(made: Recorded, frames: int = 12, block: int = 2, asked: bool = False, size: int = 0) -> Recorded:
    """Say, see and ask; the last is text, whose logits are compared."""
    images = images_of(made.family, frames, size=size)
    made.session.say([1, 20, 21, 22])
    for start in range(0, frames, block):
        made.see(images[start : start + block])
        if asked:
            answers = [made.session.ask([30, 31, 32], max_new_tokens=3, return_dict=True) for _ in range(2)]
            assert torch.equal(answers[0].logits, answers[1].logits)
        if start == 4:
            made.session.say([40, 41, 42, 43, 44])
    return made


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found - wanted).abs().max().item() <= 1e-5 * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_it_equals_one_prefill(name: str, build) -> None:
    made = played(recorded(FAMILIES[name], build(FAMILIES[name])))
    assert close(made.logits(), made.one_prefill(masked=False))
    assert made.session.stats.compressions == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_after_evictions_it_equals_one_prefill_under_a_mask(name: str, policy: str, build) -> None:
    memory = 2 * images_of(FAMILIES[name], 1)[0].count + 20
    made = played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=max(memory, 40), policy=policy), asked=True)
    found = made.logits()
    assert close(found, made.one_prefill())
    assert made.session.stats.compressions >= 3 and made.session.stats.visual <= max(memory, 40)
    # The test has teeth: with all of the stream the logits are others.
    assert (found - made.one_prefill(masked=False)).abs().max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_a_question_leaves_the_stream_bit_equal(name: str, build) -> None:
    memory = max(2 * images_of(FAMILIES[name], 1)[0].count + 20, 40)
    asked, silent = (
        played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=memory), asked=one) for one in (True, False)
    )
    assert torch.equal(asked.logits(), silent.logits())
    for one, other in zip(asked.session.held, silent.session.held, strict=True):
        assert torch.equal(one.index, other.index) and torch.equal(one.position, other.position)
