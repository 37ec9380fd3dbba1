# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-method`: what it writes passes its own test, at every site, and nothing is written by halves."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import tokenprune
from each import each
from tokenprune import Site
from tokenprune.cli import app, scaffold
from tokenprune.errors import OptionError, RegistrationError
from tokenprune.methods import registry
from tokenprune_bench.results import UNPATCHED
from tokenprune_bench.two_pass import ESCALATE

SITES = [scaffold.spell_site(site) for site in Site]


@pytest.fixture
def clean() -> Iterator[None]:
    """Methods and modules that a test makes are gone after it."""
    methods, modules, path = dict(registry._METHODS), set(sys.modules), list(sys.path)
    yield
    registry._METHODS.clear()
    registry._METHODS.update(methods)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("tokenprune_", "test_")):
            del sys.modules[name]


def load(folder: Path) -> Any:
    """Import a written package as pip would install it, and its test; return the test's module."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    ((name, module),) = project["project"]["entry-points"][registry.ENTRY_POINT_GROUP].items()
    sys.path[:0] = [str(folder), str(folder / "tests")]
    assert [f"{module}.py"] == [one.name for one in folder.glob("*.py")] and [module] == project["tool"]["setuptools"][
        "py-modules"
    ]
    EntryPoint(name, module, registry.ENTRY_POINT_GROUP).load()
    return importlib.import_module(f"test_{name}")


def cases(test: Any) -> list[dict[str, Any]]:
    (mark,) = test.test_method_rules.pytestmark
    return mark.args[1]


@pytest.mark.parametrize("site", SITES)
def test_generated_test_passes(site: str, tmp_path: Path, clean: None) -> None:
    folder = scaffold.new_method("my_method", site, tmp_path / "made")
    test = load(folder)
    info = tokenprune.method_info("my_method")
    assert scaffold.spell_site(info.site) == site and info.cls.__name__ == "MyMethod" and info.options
    assert len(cases(test)) == 2
    for options in cases(test):
        test.test_method_rules(options)
        assert options.items() <= vars(info.cls(**options)).items()
    page = (folder / "README.md").read_text()
    assert page.startswith("# my_method\n") and site_words(site) in page
    for path in folder.rglob("*.*"):
        assert path.suffix == ".pyc" or "$" not in path.read_text(), path.name


def site_words(site: str) -> str:
    return Site(site.upper().replace("-", "_")).description


def test_generated_test_finds_broken_rules(tmp_path: Path, clean: None) -> None:
    folder = scaffold.new_method("broken", to=tmp_path / "made")
    file = folder / "tokenprune_broken.py"
    file.write_text(file.read_text().replace("return tokens.hidden", "return -tokens.keys"))
    test = load(folder)
    with pytest.raises(AssertionError, match="broken"):
        test.test_method_rules({})


def test_generated_method_prunes_a_model(tmp_path: Path, clean: None, build: Any) -> None:
    from zoo import FAMILIES

    load(scaffold.new_method("loud", "in-llm", tmp_path / "made"))
    model, inputs = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs()
    with tokenprune.patched(model, "loud", keep=0.25, layer=1):
        model(**inputs)
        assert tokenprune.stats(model).keep_ratio == pytest.approx(0.25)


@each(
    ("name", "told"),
    [
        ("divprune", "is taken by tokenprune.methods"),
        ("unpatched", "reserved name"),
        (
            "vlm",
            "tokenprune-vlm .* is installed|reserved name",
        ),  # the library's own distribution, where it is installed, else reserved
        *(
            (name, "is not a valid name")
            for name in ("", "My", "my-method", "1st", "my_", "_my", "a b", "../up", "é", "a\n")
        ),
    ],
)
def test_invalid_or_taken_name_is_rejected(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match=told):
        scaffold.new_method(name, to=tmp_path / "made")
    assert not any(tmp_path.iterdir())


def test_benchmark_names_are_reserved() -> None:
    assert {UNPATCHED, ESCALATE} < set(scaffold.RESERVED)


def test_installed_package_is_not_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "distribution", lambda name: SimpleNamespace(version=f"of {name}"))
    with pytest.raises(RegistrationError, match="tokenprune-my-method of tokenprune-my-method is installed"):
        scaffold.new_method("my_method", to=tmp_path / "made")


@pytest.mark.parametrize("name", ["pruner", "site", "none", "false", "ge", "tensor", "tower", "x1_y2"])
def test_class_name_does_not_shadow_imports(name: str, tmp_path: Path, clean: None) -> None:
    for site in ("pre-llm", "in-encoder"):
        folder = scaffold.new_method(name, site, tmp_path / site)
        compile((folder / f"tokenprune_{name}.py").read_text(), name, "exec")
    test = load(tmp_path / "in-encoder")
    test.test_method_rules({})


def test_failures_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for there in ("empty", "full"):
        (tmp_path / there).mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.rglob("*"))
    for there in ("empty", "full", "nowhere", "full/notes.txt"):
        with pytest.raises(OptionError, match="already exists"):
            scaffold.new_method("my_method", to=tmp_path / there)
    with pytest.raises(OptionError, match=r"the folder .*gone does not exist"):
        scaffold.new_method("my_method", to=tmp_path / "gone/made")
    with pytest.raises(OptionError, match=r"'moon' is unknown. Use one of pre-encoder, in-encoder"):
        scaffold.new_method("my_method", "moon", tmp_path / "made")

    written = []

    def full(self: Path, text: str, **_: Any) -> None:
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OptionError, match=r"cannot write .*made: No space left on device"):
        scaffold.new_method("my_method", to=tmp_path / "made")
    assert len(written) == 3 and sorted(tmp_path.rglob("*")) == before


def test_command_prints_files_and_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new-method", "my_method", "--site", "IN_LLM"])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "tokenprune-my-method"
    for path in ("pyproject.toml", "README.md", "tokenprune_my_method.py", "tests/test_my_method.py"):
        assert (folder / path).is_file() and f"written: tokenprune-my-method/{path}\n" in done.stdout
    assert "cd tokenprune-my-method && python -m pytest" in done.stdout
    again = CliRunner().invoke(app, ["new-method", "my_method"])
    assert again.exit_code == 2 and "error: tokenprune-my-method already exists" in again.stderr
    assert set(SITES) <= set(re.findall(r"[\w-]+", CliRunner().invoke(app, ["new-method", "--help"]).stdout))
