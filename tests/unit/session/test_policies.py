# SPDX-License-Identifier: Apache-2.0
"""Policies of sessions: the registry, and each policy against its rule, written with lists."""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tokenprune
from policy_views import view_of
from tokenprune.errors import OptionError, RegistrationError, UnknownPolicyError
from tokenprune.integrations.hf.sessions.policies import registry as policies
from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
from tokenprune.methods import registry

SIZES = given(frames=st.integers(2, 12), cells=st.integers(1, 9), share=st.floats(0.05, 0.95), seed=st.integers(0, 9))


@pytest.mark.parametrize("name", tokenprune.sessions.available_policies())
@SIZES
def test_a_policy_keeps_exactly_that_many_ascending_and_has_no_state(name, frames, cells, share, seed) -> None:
    view = view_of(frames, cells, seed=seed)
    keep = max(1, int(view.count * share))
    one = tokenprune.sessions.policy(name)
    chosen = one.select(view, keep)
    assert chosen.dtype == torch.long and chosen.shape[-1] == keep
    assert chosen.ndim == 1 or (not one.shared and chosen.shape == (2, keep))
    assert (chosen.diff() > 0).all() and chosen.min() >= 0 and chosen.max() < view.count
    assert torch.equal(one.select(view_of(frames, cells, seed=seed), keep), chosen)


@given(count=st.integers(2, 80), share=st.floats(0.05, 0.95), sink=st.integers(0, 90))
def test_window_is_sink_and_the_latest(count: int, share: float, sink: int) -> None:
    keep = max(1, int(count * share))
    early = min(sink, keep)
    wanted = [*range(early), *range(count - (keep - early), count)]
    assert tokenprune.sessions.policy("window", sink=sink).select(view_of(count, 1), keep).tolist() == wanted


@given(count=st.integers(2, 80), share=st.floats(0.05, 0.95))
def test_uniform_is_spread_evenly(count: int, share: float) -> None:
    keep = max(1, int(count * share))
    chosen = tokenprune.sessions.policy("uniform").select(view_of(count, 1), keep).tolist()
    wanted = [place * (count - 1) / max(1, keep - 1) for place in range(keep)]
    assert all(abs(one - other) <= 0.5 for one, other in zip(chosen, wanted, strict=True))


def test_random_depends_on_seed_and_step_alone() -> None:
    def draw(**options) -> list[int]:
        return tokenprune.sessions.policy("random").select(view_of(9, 5, **options), 20).tolist()

    assert draw() == draw(seed=5)
    assert draw() != draw(step=1) and draw() != draw(session_seed=1)


def murmur(number: int) -> int:
    number = ((number ^ number >> 16) * 0x85EBCA6B) % 2**32
    number = ((number ^ number >> 13) * 0xC2B2AE35) % 2**32
    return number ^ number >> 16


def test_a_reservoir_holds_the_least_hashes_of_all_that_was_seen() -> None:
    reservoir, held, seen = tokenprune.sessions.policy("uniform", reservoir=True), [], []
    for first in range(0, 40, 4):
        view = view_of(4, 5, first=first)
        new = view.index[0].tolist()
        seen, held = seen + new, held + new
        now = torch.tensor([held])
        keys = torch.zeros(1, len(held), 8)
        chosen = reservoir.select(PolicyView(keys, keys, now, now, now, now[None], 0, 1, 0, 0), 15)
        held = now[0, chosen].tolist()
        assert held == sorted(sorted(seen, key=murmur)[:15])


def test_a_name_that_is_almost_right_is_offered() -> None:
    with pytest.raises(UnknownPolicyError, match="did you mean 'window'"):
        tokenprune.sessions.policy("windows")
    with pytest.raises(UnknownPolicyError, match="the nearest are"):
        tokenprune.sessions.policy("zzzz")
    with pytest.raises(OptionError, match=r"window has no option 'sinks': did you mean 'sink'"):
        tokenprune.sessions.policy("window", sinks=3)
    with pytest.raises(OptionError, match=r"window: sink=-1 must be an int >= 0"):
        tokenprune.sessions.policy("window", sink=-1)


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenprune.sessions.available_policies()
    monkeypatch.setattr(policies, "_POLICIES", dict(policies._POLICIES))


def test_a_third_party_registers_its_own(empty_registry) -> None:
    @tokenprune.sessions.register_policy("newest")
    @dataclass(frozen=True)
    class Newest(tokenprune.sessions.Policy):
        """Keep the latest."""

    assert "newest" in tokenprune.sessions.available_policies()
    assert tokenprune.sessions.policy("newest") == Newest() and repr(Newest()) == "newest()"


@pytest.mark.parametrize("problem", ["a lower-case identifier", "taken by", "frozen", "docstring", "derive from"])
def test_what_cannot_be_registered_is_refused(problem: str, empty_registry) -> None:
    @dataclass(frozen=True)
    class Good(Policy):
        """Keep nothing."""

    @dataclass(frozen=True)
    class Silent(Policy):
        pass

    class Unfrozen(Policy):
        """No dataclass of its own."""

    name, cls = {
        "a lower-case identifier": ("My Policy", Good),
        "taken by": ("window", Good),
        "frozen": ("fresh", Unfrozen),
        "docstring": ("fresh", Silent),
        "derive from": ("fresh", int),
    }[problem]
    with pytest.raises(RegistrationError, match=problem):
        tokenprune.sessions.register_policy(name)(cls)


def test_a_broken_package_leaves_its_policies_unknown(monkeypatch, caplog) -> None:
    broken = EntryPoint("broken", "no_such_module:x", policies.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken] if group == broken.group else [])
    monkeypatch.setattr(policies, "_loaded", False)
    assert "window" in tokenprune.sessions.available_policies()
    assert "policies of the entry point 'broken'" in caplog.text


def test_hashes_are_spread() -> None:
    """Of many tokens that were seen, each tenth of the stream has about a tenth of those held."""
    index = torch.arange(10_000)[None]
    keys = torch.zeros(1, 10_000, 1)
    held = tokenprune.sessions.policy("uniform", reservoir=True).select(
        PolicyView(keys, keys, index, index, index, index[None], 0, 1, 0, random.Random(0).randrange(99)), 1_000
    )
    assert all(60 <= count <= 140 for count in torch.histc(held.float(), 10, 0, 10_000).tolist())
