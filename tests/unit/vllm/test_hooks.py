# SPDX-License-Identifier: Apache-2.0
"""What the plugin builds on is there in versions of vLLM that were read and not run, and the script that reads them."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tokenprune.errors import UnsupportedSetupError
from tokenprune.families import SERVED
from tokenprune.integrations.vllm import compat

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "dev"))
    import vllm_hooks

    yield vllm_hooks
    del sys.modules["vllm_hooks"]


@pytest.mark.parametrize("version", compat.READ)
def test_versions_that_were_read_have_every_hook(script: Any, version: str) -> None:
    """After a change of hooks: `dev/check vllm-hooks` reads them anew."""
    has = json.loads((script.KEPT / f"{version}.json").read_text())
    assert has["vllm"] == version
    assert script.lacks(has, script.hooks(), list(SERVED)) == []
    assert set(has["hooks"]) == set(script.hooks()) >= set(script.REPLACED)


def test_the_extra_ends_with_the_newest_version_that_was_read() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    (wanted,) = [Requirement(one) for one in extra if one.startswith("vllm")]
    versions = [*map(Version, (compat.TESTED, *compat.READ))]
    assert all(version in wanted.specifier for version in versions)
    assert [one.version for one in wanted.specifier if one.operator == "<="] == [str(max(versions))]
    read = {path.stem for path in (ROOT / "dev/vllm_hooks").glob("*.json")}
    assert read == set(compat.READ)


@pytest.mark.parametrize(
    ("version", "allowed", "says"),
    [
        (compat.TESTED, False, None),
        (f"{compat.TESTED}+cu130", False, None),
        (compat.READ[-1], False, "the sources were read, and nothing has run"),
        ("0.34.0", True, "this is 0.34.0, which TOKENPRUNE_UNTESTED=1 allows"),
    ],
)
def test_versions_that_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, allowed: bool, says: str | None
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.setenv("TOKENPRUNE_UNTESTED", "1" if allowed else "0")
    compat.check_version()
    assert [says in one for one in caplog.messages] == [True] * (says is not None)


@pytest.mark.parametrize("version", ["0.34.0", "0.33.1", "0.32.1.dev3+gabc", "0.31.0", "unknown"])
def test_versions_that_nobody_read_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.delenv("TOKENPRUNE_UNTESTED", raising=False)
    named = re.escape(version.partition("+")[0])
    with pytest.raises(UnsupportedSetupError, match=rf"this is {named}, .* TOKENPRUNE_UNTESTED=1"):
        compat.check_version()


MADE = {
    "vllm-0.99.0+cpu.dist-info/METADATA": "",
    "vllm/__init__.py": """
from .inner import Outer
from .inner.deep import helper as renamed
from torch import Tensor
""",
    "vllm/inner/__init__.py": """
try:
    from .deep import Outer
except ImportError:
    Outer = None
if True:
    LIMIT = 3
""",
    "vllm/inner/deep.py": """
from ..base import Above, Plain
class Outer(Above[int], Plain):
    own: int
    def method(self, first, *rest, second=1, **more): ...
    @property
    def told(self): ...
class Made(Plain):
    def __init__(self, given): ...
def helper(a, /, b): ...
""",
    "vllm/base.py": """
class Plain:
    below: ClassVar[int] = 1
    early: str
    def inherited(self, x): ...
class Above(Generic[T]): ...
""",
    "vllm/model_executor/models/registry.py": """
_A = {"One": ("one", "One")}
_B = {"Two": ("two", "Two"), **_A}
_C = {"x": 1}
""",
}
WANTED = {
    "vllm:Outer.method": ["self", "first", "second", "*rest", "**more"],
    "vllm:Outer.inherited": ["self", "x"],
    "vllm:Outer": ["early", "own"],
    "vllm.inner.deep:Made": ["given"],
    "vllm:renamed": ["a", "b"],
    "vllm.inner:LIMIT": None,
    "vllm:Outer.early": None,
    "vllm:Outer.told": ["self"],
    "vllm:Tensor": None,
}


@pytest.fixture(params=["folder", "wheel"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Sources of a vLLM that is not there."""
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "vllm-0.99.0.whl", "w") as wheel:
            for name, text in MADE.items():
                wheel.writestr(name, text)
        return tmp_path / "vllm-0.99.0.whl"
    for name, text in MADE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_definitions_are_found_where_they_are_imported_and_inherited_from(script: Any, made: Path) -> None:
    gone = ["vllm:Outer.gone", "vllm:Gone", "vllm.gone:Outer", "vllm:renamed.inner"]
    has = script.read(made, dict.fromkeys([*WANTED, *gone], ""))
    assert has == {"vllm": "0.99.0", "hooks": dict(sorted(WANTED.items())), "architectures": ["One", "Two"]}


def test_what_is_lacking_is_named(script: Any, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = script.read(made, dict.fromkeys(WANTED, ""))
    wanted = {"vllm:Outer.method": "self first rest", "vllm:renamed": "b c", "vllm:Gone": "", "vllm:Outer.early": "a"}
    monkeypatch.setattr(script, "REPLACED", {})
    assert script.lacks(has, wanted, ["One", "Three"]) == [
        "no vllm:Gone",
        "vllm:renamed takes no c",
        "vllm:Outer.early takes no a",
        "no model Three",
    ]
    own = "tokenprune.serve.in_llm.scheduler:WholeImages"
    replaced = {"vllm:Outer.inherited": f"{own}._cut_back", "vllm:Outer.told": f"{own}._cut_back"}
    monkeypatch.setattr(script, "REPLACED", replaced)
    assert script.lacks(has, {}, []) == []  # ours has stars
    narrow = "tokenprune.integrations.vllm.compat:require_hooks"
    monkeypatch.setattr(script, "REPLACED", {"vllm:renamed": narrow})
    assert script.lacks(has, {}, []) == [f"vllm:renamed takes a, b, and {narrow} does not"]


def test_what_is_no_vllm_is_said(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no vLLM"):
        script.read(tmp_path, {})
