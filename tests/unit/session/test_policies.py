# SPDX-License-Identifier: Apache-2.0
"""Policies of sessions: the registry, the rule of each policy, `check_policy`, and policies of other packages."""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tokenprune
from each import each
from policy_views import view_of
from session_oracle import close, played, recorded
from tokenprune.cli import app, scaffold
from tokenprune.errors import OptionError, RegistrationError, UnknownPolicyError
from tokenprune.integrations.hf.sessions.policies import registry as policies
from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
from tokenprune.methods import registry
from tokenprune.testing import ConformanceError, check_policy
from zoo import FAMILIES

SIZES = given(frames=st.integers(2, 12), cells=st.integers(1, 9), share=st.floats(0.05, 0.95), seed=st.integers(0, 9))


@pytest.mark.parametrize("name", tokenprune.sessions.available_policies())
@SIZES
def test_a_policy_keeps_exactly_that_many_ascending_and_has_no_state(name, frames, cells, share, seed) -> None:
    view = view_of(frames, cells, seed=seed)
    keep = max(1, int(view.count * share))
    policy = tokenprune.sessions.policy(name)
    chosen = policy.select(view, keep)
    assert chosen.dtype == torch.long and chosen.shape[-1] == keep
    assert chosen.ndim == 1 or (not policy.shared and chosen.shape == (2, keep))
    assert (chosen.diff() > 0).all() and chosen.min() >= 0 and chosen.max() < view.count
    assert torch.equal(policy.select(view_of(frames, cells, seed=seed), keep), chosen)


@given(count=st.integers(2, 80), share=st.floats(0.05, 0.95), sink=st.integers(0, 90))
def test_window_is_sink_and_the_latest(count: int, share: float, sink: int) -> None:
    keep = max(1, int(count * share))
    early = min(sink, keep)
    expected = [*range(early), *range(count - (keep - early), count)]
    assert tokenprune.sessions.policy("window", sink=sink).select(view_of(count, 1), keep).tolist() == expected


@given(count=st.integers(2, 80), share=st.floats(0.05, 0.95))
def test_uniform_is_spread_evenly(count: int, share: float) -> None:
    keep = max(1, int(count * share))
    chosen = tokenprune.sessions.policy("uniform").select(view_of(count, 1), keep).tolist()
    expected = [index * (count - 1) / max(1, keep - 1) for index in range(keep)]
    assert all(abs(actual - ideal) <= 0.5 for actual, ideal in zip(chosen, expected, strict=True))


def test_random_depends_on_seed_and_step_alone() -> None:
    def draw(**options) -> list[int]:
        return tokenprune.sessions.policy("random").select(view_of(9, 5, **options), 20).tolist()

    assert draw() == draw(seed=5)
    assert draw() != draw(step=1) and draw() != draw(session_seed=1)


def murmur(value: int) -> int:
    value = ((value ^ value >> 16) * 0x85EBCA6B) % 2**32
    value = ((value ^ value >> 13) * 0xC2B2AE35) % 2**32
    return value ^ value >> 16


def test_reservoir_keeps_the_smallest_hashes() -> None:
    reservoir, kept, all_indices = tokenprune.sessions.policy("uniform", reservoir=True), [], []
    for first in range(0, 40, 4):
        view = view_of(4, 5, first=first)
        new = view.index[0].tolist()
        all_indices, kept = all_indices + new, kept + new
        index = torch.tensor([kept])
        keys = torch.zeros(1, len(kept), 8)
        chosen = reservoir.select(PolicyView(keys, keys, index, index, index, index[None], 0, 1, 0, 0), 15)
        kept = index[0, chosen].tolist()
        assert kept == sorted(sorted(all_indices, key=murmur)[:15])


def test_a_name_that_is_almost_right_is_offered() -> None:
    with pytest.raises(UnknownPolicyError, match="did you mean 'window'"):
        tokenprune.sessions.policy("windows")
    with pytest.raises(UnknownPolicyError, match="the nearest are"):
        tokenprune.sessions.policy("zzzz")
    with pytest.raises(OptionError, match=r"window has no option 'sinks': did you mean 'sink'"):
        tokenprune.sessions.policy("window", sinks=3)
    with pytest.raises(OptionError, match=r"window: sink=-1 must be an int >= 0"):
        tokenprune.sessions.policy("window", sink=-1)


def test_a_third_party_registers_its_own(restored_registries) -> None:
    @tokenprune.sessions.register_policy("newest")
    @dataclass(frozen=True)
    class Newest(tokenprune.sessions.Policy):
        """Keep the latest entries."""

    assert "newest" in tokenprune.sessions.available_policies()
    assert tokenprune.sessions.policy("newest") == Newest() and repr(Newest()) == "newest()"


@pytest.mark.parametrize("problem", ["a lower-case identifier", "taken by", "frozen", "docstring", "derive from"])
def test_invalid_policies_are_not_registered(problem: str, restored_registries) -> None:
    @dataclass(frozen=True)
    class Good(Policy):
        """Keep no entries."""

    @dataclass(frozen=True)
    class Silent(Policy):
        pass

    class Unfrozen(Policy):
        """Not a dataclass."""

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
    """Each tenth of a long stream keeps about a tenth of the entries."""
    index = torch.arange(10_000)[None]
    keys = torch.zeros(1, 10_000, 1)
    held = tokenprune.sessions.policy("uniform", reservoir=True).select(
        PolicyView(keys, keys, index, index, index, index[None], 0, 1, 0, random.Random(0).randrange(99)), 1_000
    )
    assert all(60 <= count <= 140 for count in torch.histc(held.float(), 10, 0, 10_000).tolist())


OPTIONS = {
    "window": [{"sink": 0}, {"sink": 3}],
    "uniform": [{"reservoir": True}],
    "infinipot_v": [{"tar": 0.0}, {"tar": 1.0, "recent": 1.0}],
    "streammem": [{"heads": "mean"}, {"proxy": (1, 2)}],
}


@pytest.mark.parametrize("name", tokenprune.sessions.available_policies())
def test_shipped_policies_pass_the_check(name: str) -> None:
    check_policy(name)
    check_policy(type(tokenprune.sessions.policy(name)))
    for options in OPTIONS.get(name, []):
        check_policy(tokenprune.sessions.policy(name, **options))
    with pytest.raises(UnknownPolicyError):
        check_policy("nothing")


@dataclass(frozen=True)
class Newest(tokenprune.sessions.Policy):
    """Keep the latest entries."""

    name = "newest"

    def select(self, view, keep):
        return torch.arange(view.count - keep, view.count)


calls = []


def select_with_state(self, view, keep):
    calls.append(1)
    return torch.arange(keep) + (len(calls) % 2) * (view.count - keep)


def modify_in_place(self, view, keep):
    view.keys.mul_(2)
    return torch.arange(keep)


def select_three_heads(self, view, keep):
    return torch.arange(keep).expand(3, -1)


def select_by_first_head(self, view, keep):
    """Select by the first head's frames, which fails once heads hold different frames."""
    late = view.frame[0] >= view.frame[0, -keep]
    return late.nonzero()[:, 0]


BROKEN = {
    "must return torch.int64": lambda self, view, keep: torch.arange(keep + 1),
    "returned torch.float32": lambda self, view, keep: torch.arange(float(keep)),
    "ascending": lambda self, view, keep: torch.arange(keep).flip(0),
    "unique indices of its view": lambda self, view, keep: torch.arange(keep) + view.count,
    "called again": select_with_state,
    "use only view.generator": lambda self, view, keep: torch.randperm(view.count)[:keep].sort().values,
    "it modifies its input keys": modify_in_place,
    r"returned torch.int64 \(3, ": select_three_heads,
    r"returned torch.int64 \(5,\), and must return torch.int64 \(1,\)": select_by_first_head,
    "raises TypeError": lambda self, view, keep: view.proxy_attention[0],
    "with 30 entries": lambda self, view, keep: view.values.isfinite().all(-1)[0].nonzero()[:keep, 0],
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_choice_that_breaks_a_rule_is_named(message: str, monkeypatch) -> None:
    check_policy(Newest)
    monkeypatch.setattr(Newest, "select", BROKEN[message])
    with pytest.raises(ConformanceError, match=f"^newest.*{message}"):
        check_policy(Newest())


@dataclass(frozen=True)
class NoDocstring(Newest):
    name = "silent"


class Unfrozen(Newest):
    """Keep the latest entries."""


@dataclass(frozen=True)
class Needy(Newest):
    """Need an unknown observable."""

    needs = frozenset({"hidden"})


@dataclass(frozen=True)
class Nameless(Newest):
    """Lack a name."""

    name = ""


@dataclass(frozen=True)
class Pinning(Newest):
    """Pin a negative number."""

    pinned = -1


@dataclass(frozen=True)
class WithoutDefault(tokenprune.sessions.Policy):
    """Lack the default of an option."""

    size: int


@each(
    "policy, message",
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
def test_a_class_that_breaks_a_rule_is_named(policy, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_policy(policy)


def test_the_view_has_a_proxy_where_it_is_needed() -> None:
    has_shape = []

    @dataclass(frozen=True)
    class Reads(Newest):
        """Read the proxy."""

        needs = frozenset({"proxy_attention"})

        def select(self, view, keep):
            has_shape.append(tuple(view.proxy_attention.shape) == (6, view.count))
            return super().select(view, keep)

    check_policy(Reads)
    assert all(has_shape) and len(has_shape) > 20
    assert dataclasses.is_dataclass(Reads)


def load_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a generated package by its entry point, as if installed, and return its test module."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    ((name, module),) = project["project"]["entry-points"][policies.ENTRY_POINT_GROUP].items()
    sys.path[:0] = [str(folder), str(folder / "tests")]
    point = EntryPoint(name, module, policies.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(policies, "_loaded", False)
    assert name in tokenprune.sessions.available_policies()
    return importlib.import_module(f"test_{name}")


def test_a_package_passes_its_own_test_and_holds_a_session(
    tmp_path: Path, monkeypatch, restored_imports, build
) -> None:
    folder = scaffold.new_method("my_policy", "session", tmp_path / "made")
    test = load_package(folder, monkeypatch)
    (mark,) = test.test_policy_rules.pytestmark
    assert mark.args[1] == [{}, {"order": 1}]
    for options in mark.args[1]:
        test.test_policy_rules(options)
        assert tokenprune.sessions.policy("my_policy", **options).order == options.get("order", 2)
    for path in (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"):
        assert "$" not in path.read_text(), path.name
    recording = played(recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=110, policy="my_policy"))
    assert recording.session.stats.compressions > 3 and close(recording.logits(), recording.one_prefill())


def test_a_rule_that_is_broken_fails_the_written_test(tmp_path: Path, monkeypatch, restored_imports) -> None:
    folder = scaffold.new_method("broken", "session", tmp_path / "made")
    file = folder / "tokenprune_broken.py"
    file.write_text(file.read_text().replace(".sort(1).values", ""))
    test = load_package(folder, monkeypatch)
    with pytest.raises(ConformanceError, match=r"broken.*ascending"):
        test.test_policy_rules({})


@pytest.mark.parametrize("name", ["policy", "tensor", "clsvar", "window_2"])
def test_a_class_does_not_shadow_what_it_uses(name: str, tmp_path: Path, monkeypatch, restored_imports) -> None:
    load_package(scaffold.new_method(name, "SESSION", tmp_path / "made"), monkeypatch).test_policy_rules({})


def test_the_name_of_a_policy_is_taken_and_that_of_a_method_not(tmp_path: Path) -> None:
    with pytest.raises(
        RegistrationError, match=r"'window' is taken by tokenprune.integrations.hf.sessions.policies.window"
    ):
        scaffold.new_method("window", "session", tmp_path / "made")
    scaffold.new_method("divprune", "session", tmp_path / "made")
    with pytest.raises(RegistrationError, match=r"is taken by tokenprune\.methods"):
        scaffold.new_method("divprune", to=tmp_path / "other")


def test_the_command_says_how_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["new-method", "my_policy", "--site", "session"])
    assert result.exit_code == 0, result.output
    assert 'policy="my_policy")' in result.stdout and "bench" not in result.stdout
    assert (tmp_path / "tokenprune-my-policy/tests/test_my_policy.py").is_file()
