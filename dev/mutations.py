# SPDX-License-Identifier: Apache-2.0
"""Check that the named tests catch each mutation of mutations.toml.

python dev/mutations.py                        # all mutations; writes dev/mutations.json
python dev/mutations.py --only masks budget    # mutations whose names begin with these; writes no file

Each mutation is applied in a temporary copy of the checkout. Its tests (default selection) run there until the first
failure; the test that caught it last time runs first. Tests of `tests/vllm` need vLLM; without it the record of their
mutations stays. The script exits with 1 if a mutation that was caught before survives, or if its text is missing from
the code. Run the full suite before: a test that fails without a mutation would count as a catch.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
TIMEOUT = 600  # seconds; a test that hangs counts as a catch
_turn = itertools.count(1)


@dataclass(frozen=True)
class Mutation:
    """A text of a package, its replacement, and the test files that should catch it.

    Attributes:
        name: Unique. It begins with the area.
        within: File or folder that contains `old` exactly once. A folder permits renamed modules.
        old: Text.
        new: Replacement.
        tests: Test files.
    """

    name: str
    within: str
    old: str
    new: str
    tests: list[str]

    @property
    def needs_vllm(self) -> bool:
        return any(test.startswith("tests/vllm/") for test in self.tests)

    def places(self, root: Path) -> list[Path]:
        """Return the file of each occurrence of `old`. Exactly one is expected."""
        within = root / self.within
        files = sorted(within.rglob("*.py")) if within.is_dir() else [within] if within.is_file() else []
        return [file for file in files for _ in range(file.read_text(encoding="utf-8").count(self.old))]

    def problem(self, root: Path) -> str | None:
        """Return the reason that the mutation cannot be applied, or None."""
        if (count := len(self.places(root))) != 1:
            return f"its text occurs {count} times in {self.within}, not once: adapt it to the code, or remove it"
        missing = [test for test in self.tests if not (root / test).is_file()]
        return f"there is no {', '.join(missing)}" if missing else None


def table() -> list[Mutation]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**row) for row in rows]


def copied(target: Path) -> Path:
    """Copy the tracked files and new files of the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def write(file: Path, text: str) -> None:
    """Write with a unique time: Python compares bytecode with the source by seconds and size."""
    file.write_text(text, encoding="utf-8")
    moment = 10**9 + next(_turn)
    os.utime(file, (moment, moment))


class First:
    """A plugin of pytest that runs one test first: the test that failed first last time."""

    def __init__(self, test: str | None) -> None:
        self.test = (test or "").partition("[")[0]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid.partition("[")[0] != self.test)


def tried(mutation: Mutation, copy: Path, before: str | None) -> str | None:
    """Return the first test that catches a mutation, or None. `before` is the test that caught it last time."""
    (file,) = mutation.places(copy)
    text = file.read_text(encoding="utf-8")
    write(file, text.replace(mutation.old, mutation.new))
    try:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
        status, output = in_child(copy, [*settings(mutation), *mutation.tests, *options], First(before))
    finally:
        write(file, text)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    failure = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if code == 4:  # pytest could not import a conftest.py
        return "the import of conftest.py"
    if code not in (1, 2) or failure is None:
        sys.exit(f"{mutation.name}: pytest ended with {code}\n{output[-2000:]}")
    return failure[1]


def settings(*mutations: Mutation) -> list[str]:
    return ["-c", "tests/vllm/pytest.ini"] if any(mutation.needs_vllm for mutation in mutations) else []


def in_child(copy: Path, arguments: list[str], *plugins: object) -> tuple[int, str]:
    """Run pytest in a fork of this process with the packages of `copy`. Return its status and its output."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if not child:
            signal.alarm(TIMEOUT)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.chdir(copy)
            paths = [str(copy / name) for name in (".", "benchmarks", "demo")]
            ours = {str(ROOT / name) for name in (".", "dev", "benchmarks", "demo")}
            sys.path[:] = paths + [path for path in sys.path if path not in ours]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            ended = pytest.main(arguments, list(plugins))
            sys.stdout.flush()  # os._exit drops buffered output
            os._exit(ended)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return status, output.read()


class Imported:
    """A plugin of pytest that writes the names of imported modules of other packages to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_collection_finish(self) -> None:
        files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
        names = [name for name, file in files.items() if "site-packages" in file and "pytest" not in file]
        self.file.write_text("\n".join(names), encoding="utf-8")


def prepare(mutations: list[Mutation], copy: Path) -> None:
    """Import the modules of other packages that the tests of `mutations` use, once for all."""
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    imported = Imported(copy / "imported.txt")
    files = sorted({test for mutation in mutations for test in mutation.tests})
    status, output = in_child(
        copy, [*settings(*mutations), *files, "--collect-only", "-q", "-p", "no:cacheprovider"], imported
    )
    if status:
        sys.exit(f"without a mutation the tests cannot be collected\n{output[-2000:]}")
    for name in imported.file.read_text(encoding="utf-8").splitlines():
        with suppress(Exception):
            importlib.import_module(name)


def results(mutations: list[Mutation], record: dict[str, str | None]) -> Iterator[tuple[Mutation, str | None]]:
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder).resolve())
        if mutations:
            prepare(mutations, copy)
        for mutation in mutations:
            start = time.perf_counter()
            by = tried(mutation, copy, record.get(mutation.name))
            said = "survived" if by is None else f"caught by {by}"
            print(f"{mutation.name}: {said} ({time.perf_counter() - start:.0f} s)", flush=True)
            yield mutation, by


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names; the record is not changed")
    only = tuple(parser.parse_args().only)
    selected = [mutation for mutation in table() if mutation.name.startswith(only)]
    lost = {mutation.name: why for mutation in selected if (why := mutation.problem(ROOT)) is not None}
    for name, why in lost.items():
        print(f"{name}: NOT TRIED, {why}")
    vllm = find_spec("vllm") is not None
    apart = [mutation.name for mutation in selected if mutation.needs_vllm != vllm]
    if apart:
        print(f"left for the environment {'without' if vllm else 'of'} vLLM: {', '.join(apart)}")
    record: dict[str, str | None] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    now = {
        mutation.name: by
        for mutation, by in results(
            [mutation_left for mutation_left in selected if mutation_left.name not in {*lost, *apart}], record
        )
    }
    worse = [name for name, by in now.items() if by is None and record.get(name) is not None]
    print(f"{sum(by is not None for by in now.values())} of {len(now)} caught; caught before, and not now: {worse}")
    if only == ("",):
        known = record | now
        kept = {mutation.name: known[mutation.name] for mutation in selected if mutation.name in known}
        RECORD.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return int(bool(worse or lost))


if __name__ == "__main__":
    sys.exit(main())
