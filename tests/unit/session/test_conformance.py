# SPDX-License-Identifier: Apache-2.0
"""`check_policy`: our policies keep the rules of all policies, and what breaks one is named."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import tokenprune
from each import each
from tokenprune.errors import UnknownPolicyError
from tokenprune.testing import ConformanceError, check_policy

OPTIONS = {
    "window": [{"sink": 0}, {"sink": 3}],
    "uniform": [{"reservoir": True}],
    "infinipot_v": [{"tar": 0.0}, {"tar": 1.0, "recent": 1.0}],
    "streammem": [{"heads": "mean"}, {"proxy": (1, 2)}],
}


@pytest.mark.parametrize("name", tokenprune.sessions.available_policies())
def test_ours_keep_the_rules(name: str) -> None:
    check_policy(name)
    check_policy(type(tokenprune.sessions.policy(name)))
    for options in OPTIONS.get(name, []):
        check_policy(tokenprune.sessions.policy(name, **options))


@dataclass(frozen=True)
class Newest(tokenprune.sessions.Policy):
    """Keep what came last."""

    name = "newest"

    def select(self, view, keep):
        return torch.arange(view.count - keep, view.count)


calls = []


def with_state(self, view, keep):
    calls.append(1)
    return torch.arange(keep) + (len(calls) % 2) * (view.count - keep)


def in_place(self, view, keep):
    view.keys.mul_(2)
    return torch.arange(keep)


def one_head_too_many(self, view, keep):
    return torch.arange(keep).expand(3, -1)


def frames_of_all_heads(self, view, keep):
    """Take the first head's frames for all: right until heads hold others, of which some are then missing."""
    late = view.frame[0] >= view.frame[0, -keep]
    return late.nonzero()[:, 0]


BROKEN = {
    "must return torch.int64": lambda self, view, keep: torch.arange(keep + 1),
    "returned torch.float32": lambda self, view, keep: torch.arange(float(keep)),
    "ascending": lambda self, view, keep: torch.arange(keep).flip(0),
    "unique indices of its view": lambda self, view, keep: torch.arange(keep) + view.count,
    "called again": with_state,
    "use only view.generator": lambda self, view, keep: torch.randperm(view.count)[:keep].sort().values,
    "it modifies its input keys": in_place,
    r"returned torch.int64 \(3, ": one_head_too_many,
    r"returned torch.int64 \(5,\), and must return torch.int64 \(1,\)": frames_of_all_heads,
    "raises TypeError": lambda self, view, keep: view.proxy_attention[0],
    "with 30 entries": lambda self, view, keep: view.values.isfinite().all(-1)[0].nonzero()[:keep, 0],
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_choice_that_breaks_a_rule_is_named(says: str, monkeypatch) -> None:
    check_policy(Newest)
    monkeypatch.setattr(Newest, "select", BROKEN[says])
    with pytest.raises(ConformanceError, match=f"^newest.*{says}"):
        check_policy(Newest())


@dataclass(frozen=True)
class NoDocstring(Newest):
    name = "silent"


class Unfrozen(Newest):
    """Keep what came last."""


@dataclass(frozen=True)
class Needy(Newest):
    """Need what there is not."""

    needs = frozenset({"hidden"})


@dataclass(frozen=True)
class Nameless(Newest):
    """Have no name."""

    name = ""


@dataclass(frozen=True)
class Pinning(Newest):
    """Pin less than nothing."""

    pinned = -1


@dataclass(frozen=True)
class WithoutDefault(tokenprune.sessions.Policy):
    """Have an option without a default."""

    size: int


@each(
    "policy, says",
    [
        (NoDocstring, "docstring"),
        (Unfrozen, "frozen=True"),
        (Needy, r"it needs \['hidden'\], but only 'proxy_attention' is available"),
        (Nameless, "name is missing"),
        (Pinning, "pinned=-1"),
        (WithoutDefault, "Give every option a default"),
        (3, "neither a registered name"),
    ],
)
def test_a_class_that_breaks_a_rule_is_named(policy, says: str) -> None:
    with pytest.raises(ConformanceError, match=says):
        check_policy(policy)


def test_an_unknown_name_is_ours() -> None:
    with pytest.raises(UnknownPolicyError):
        check_policy("nothing")


def test_the_view_has_a_proxy_where_it_is_needed() -> None:
    seen = []

    @dataclass(frozen=True)
    class Reads(Newest):
        """Look at the proxy."""

        needs = frozenset({"proxy_attention"})

        def select(self, view, keep):
            seen.append(tuple(view.proxy_attention.shape) == (6, view.count))
            return super().select(view, keep)

    check_policy(Reads)
    assert all(seen) and len(seen) > 20
    assert dataclasses.is_dataclass(Reads)
