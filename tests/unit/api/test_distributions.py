# SPDX-License-Identifier: Apache-2.0
"""Three distributions: the core works without the others and names the packages to install."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from tokenprune.cli import app, common

ROOT = Path(__file__).parents[3]
FOLDERS = {"tokenprune-vlm": ROOT, "tokenprune-bench": ROOT / "benchmarks", "tokenprune-demo": ROOT / "demo"}
MODULES = {"tokenprune-vlm": "tokenprune", "tokenprune-bench": "tokenprune_bench", "tokenprune-demo": "tokenprune_demo"}
BENCH, DEMO = "pip install tokenprune-bench", "pip install tokenprune-demo"
MAX_WHEEL_BYTES = 1_500_000  # maximum size of the core's wheel

# Hides packages that are found by path, by the finder of an editable install, or by entry points.
HIDE = """
import importlib.metadata, sys
hidden = set({hidden!r})
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])
sys.meta_path.insert(0, Hidden())
original = importlib.metadata.entry_points
def list_visible(**options):
    entries = original(**options)
    if options.get("group") != "tokenprune.commands":
        return entries
    return [entry for entry in entries if entry.value.partition(".")[0] not in hidden]
importlib.metadata.entry_points = list_visible
"""

# Runs each code separately in one process, because importing torch takes most of the time.
EACH = """
import contextlib, io, json, traceback
outcomes = []
for code in json.loads(sys.argv.pop()):
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code, {{"sys": sys}})
        except SystemExit as end:
            status = end.code or 0
        except Exception:
            status = 1
            traceback.print_exc()
    outcomes.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(outcomes))
"""


class Completed(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_without(hidden: list[str], *codes: str) -> list[Completed]:
    """Run codes in a new process without the hidden packages."""
    path = os.pathsep.join(str(folder) for folder in FOLDERS.values())
    done = subprocess.run(
        [sys.executable, "-c", (HIDE + EACH).format(hidden=hidden), json.dumps(codes)],
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [Completed(*outcome) for outcome in json.loads(done.stdout.splitlines()[-1])]


def build_command(*arguments: str) -> str:
    """Return code that runs a command."""
    return f"sys.argv = ['tokenprune', *{list(arguments)!r}]\nfrom tokenprune.cli import main\nmain()"


OTHER_PACKAGES = ["tokenprune_bench", "tokenprune_demo"]


def test_all_distributions_have_one_version() -> None:
    versions = {}
    for name, folder in FOLDERS.items():
        text = (folder / MODULES[name] / "__init__.py").read_text()
        versions[name] = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]
    (version,) = set(versions.values())
    for name in ("tokenprune-bench", "tokenprune-demo"):
        needed = tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())["project"]["dependencies"]
        assert [requirement for requirement in needed if requirement.startswith("tokenprune")] == [
            f"tokenprune-vlm=={version}"
        ]


def test_the_core_does_not_import_the_other_distributions() -> None:
    for path in (ROOT / "tokenprune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & set(OTHER_PACKAGES), path


COMMANDS = "app bench demo fit leaderboard profile recommend report show tune".split()
NAMES = ("recommend", "demo_model()", "plot", "method_info('fitprune').cls.fit")


def test_the_core_alone_lists_methods_and_says_what_to_install() -> None:
    names = [f"import tokenprune\ntokenprune.{name}" for name in NAMES]
    methods, usage, *others = run_without(
        OTHER_PACKAGES, build_command("methods"), build_command("--help"), *map(build_command, COMMANDS), *names
    )  # fmt: skip
    assert methods.returncode == 0 and "divprune" in methods.stdout and not methods.stderr
    assert usage.returncode == 0 and "methods" in usage.stdout.split() and "tune" not in usage.stdout.split()
    for name, done in zip(COMMANDS, others[: len(COMMANDS)], strict=True):
        assert done.returncode == 2 and done.stderr.startswith("error: "), (name, done)
        assert done.stderr.endswith(f"{BENCH}\n") and done.stderr.count("\n") == 1, (name, done)
    for name, done in zip(NAMES, others[len(COMMANDS) :], strict=True):
        last = done.stderr.splitlines()[-1]
        assert last.startswith("tokenprune.errors.MissingPackageError: ") and last.endswith(BENCH), (name, done)


def test_without_transformers_the_core_reduces_and_lists_methods() -> None:
    reduce = (
        "import numpy, tokenprune\n"
        "rows = numpy.random.default_rng(0).normal(size=(576, 8)).astype('float32')\n"
        "print(tokenprune.reduce(rows, 'pool', keep=0.25, grid=(24, 24)).features.shape)"
    )
    patch = "import torch, tokenprune\ntokenprune.patch(torch.nn.Linear(2, 2))"
    rules = "from tokenprune.testing import check_method\ncheck_method('divprune')"
    listed = build_command("methods", "--runs-on", "features")
    reduced, refused, checked, methods, families = run_without(
        ["transformers"], reduce, patch, rules, listed, build_command("families")
    )  # fmt: skip
    assert reduced.stdout == "(144, 8)\n", reduced.stderr
    assert refused.stderr.splitlines()[-1].endswith(": tokenprune.patch: pip install 'tokenprune-vlm[hf]'")
    assert not checked.returncode and not methods.returncode and not families.returncode
    assert "divprune" in methods.stdout and "fastv" not in methods.stdout and "scope" not in methods.stdout


def test_the_benchmark_without_the_demo_imports_and_asks_for_questions_before_it_loads_a_model(tmp_path: Path) -> None:
    imports = (
        "import pkgutil, importlib, tokenprune_bench\n"
        "for one in pkgutil.walk_packages(tokenprune_bench.__path__, 'tokenprune_bench.'):\n"
        "    if 'lmms_eval' in one.name or '.app.' in one.name: continue\n"
        "    importlib.import_module(one.name)\n"
        "print('all of it')"
    )
    bench = ("bench", "--model", "nowhere")
    tune = ("tune", "--max-drop", "1%", "--out", str(tmp_path / "x.json"))
    commands = [build_command(*bench), build_command(*bench, "--set", "views"), build_command(*tune)]
    # `fit` reports it before it loads the model.
    others = [build_command("demo"), build_command("profile"), build_command("fit", "fitprune", "--model", "absent")]
    others.append("import tokenprune\ntokenprune.demo_model()")
    *refused, imported = run_without(["tokenprune_demo"], *commands, *others, imports)
    for index, done in enumerate(refused):
        assert done.stderr.endswith(f"{'--model): ' * (index < len(commands))}{DEMO}\n"), done
        assert done.returncode == (2 if done is not refused[-1] else 1)
    assert imported.stdout == "all of it\n", imported.stderr


def test_a_broken_command_does_not_affect_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "nowhere_at_all:command", "tokenprune.commands")
    monkeypatch.setattr(common, "_find_entry_points", lambda: {"broken": entry})
    call = CliRunner().invoke
    assert call(app, ["--help"]).exit_code == 0 and call(app, ["families", "--help"]).exit_code == 0
    done = call(app, ["broken", "--any", "option"])
    assert done.exit_code == 2 and "`tokenprune broken` cannot be imported (nowhere_at_all:command)" in done.stderr
    assert "Did you mean 'broken'" in call(app, ["brokn"]).stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_a_source_distribution_builds_the_wheel(name: str, tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the package")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    (sdist,) = SdistBuilder(str(FOLDERS[name])).build(directory=str(tmp_path))
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    listed = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert not [path for path in listed["only-include"] if not (source / path).exists()]
    (wheel,) = WheelBuilder(str(source)).build(directory=str(tmp_path / "wheels"), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed:
        names = {name_in_wheel for name_in_wheel in packed.namelist() if ".dist-info/" not in name_in_wheel}
    module = FOLDERS[name] / MODULES[name]
    files = (path for path in module.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert names == {path.relative_to(FOLDERS[name]).as_posix() for path in files}
    assert name != "tokenprune-vlm" or Path(wheel).stat().st_size < MAX_WHEEL_BYTES
