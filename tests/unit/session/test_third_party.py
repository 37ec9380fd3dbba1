# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-method --site session`: the package that it writes works, and its policy holds a session's memory."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tokenprune
from session_oracle import close, played, recorded
from tokenprune.cli import app, scaffold
from tokenprune.errors import ConformanceError, RegistrationError
from tokenprune.integrations.hf.sessions.policies import registry as policies
from tokenprune.methods import registry
from zoo import FAMILIES


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Policies and modules that a test makes are gone after it."""
    tokenprune.sessions.available_policies()
    monkeypatch.setattr(policies, "_POLICIES", dict(policies._POLICIES))
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("tokenprune_", "test_")):
            del sys.modules[name]


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the registry find a written package by its entry point, as if pip had installed it; return its test."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    ((name, module),) = project["project"]["entry-points"][policies.ENTRY_POINT_GROUP].items()
    sys.path[:0] = [str(folder), str(folder / "tests")]
    point = EntryPoint(name, module, policies.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(policies, "_loaded", False)
    assert name in tokenprune.sessions.available_policies()
    return importlib.import_module(f"test_{name}")


def test_a_package_passes_its_own_test_and_holds_a_session(tmp_path: Path, monkeypatch, clean: None, build) -> None:
    folder = scaffold.new_method("my_policy", "session", tmp_path / "made")
    test = load(folder, monkeypatch)
    (mark,) = test.test_policy_rules.pytestmark
    assert mark.args[1] == [{}, {"order": 1}]
    for options in mark.args[1]:
        test.test_policy_rules(options)
        assert tokenprune.sessions.policy("my_policy", **options).order == options.get("order", 2)
    for path in (one for one in folder.rglob("*") if one.is_file() and one.suffix != ".pyc"):
        assert "$" not in path.read_text(), path.name
    made = played(recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=110, policy="my_policy"))
    assert made.session.stats.compressions > 3 and close(made.logits(), made.one_prefill())


def test_a_rule_that_is_broken_fails_the_written_test(tmp_path: Path, monkeypatch, clean: None) -> None:
    folder = scaffold.new_method("broken", "session", tmp_path / "made")
    file = folder / "tokenprune_broken.py"
    file.write_text(file.read_text().replace(".sort(1).values", ""))
    test = load(folder, monkeypatch)
    with pytest.raises(ConformanceError, match=r"broken.*ascending"):
        test.test_policy_rules({})


@pytest.mark.parametrize("name", ["policy", "tensor", "clsvar", "window_2"])
def test_a_class_does_not_shadow_what_it_uses(name: str, tmp_path: Path, monkeypatch, clean: None) -> None:
    load(scaffold.new_method(name, "SESSION", tmp_path / "made"), monkeypatch).test_policy_rules({})


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
    done = CliRunner().invoke(app, ["new-method", "my_policy", "--site", "session"])
    assert done.exit_code == 0, done.output
    assert 'policy="my_policy")' in done.stdout and "bench" not in done.stdout
    assert (tmp_path / "tokenprune-my-policy/tests/test_my_policy.py").is_file()
