# SPDX-License-Identifier: Apache-2.0
"""Check that the table of mutations fits the code, and that a failing test counts as a caught mutation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def test_each_text_occurs_once_in_its_package_and_its_tests_exist(mutations: ModuleType) -> None:
    problems = {
        mutation.name: problem for mutation in mutations.table() if (problem := mutation.problem(ROOT)) is not None
    }
    assert not problems, f"follow the code in dev/mutations.toml: {problems}"


def test_the_record_is_of_the_table(mutations: ModuleType) -> None:
    table = mutations.table()
    names = [mutation.name for mutation in table]
    record = json.loads(mutations.RECORD.read_text())
    assert len(set(names)) == len(names) >= 60
    assert list(record) == [name for name in names if name in record], "run dev/mutations.py"
    assert all(mutation.old != mutation.new for mutation in table)
    assert sum(test is not None for test in record.values()) >= 0.9 * len(record)


@pytest.fixture(scope="module")
def mutations(script: Any) -> ModuleType:
    return script("mutations")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "small/one.py").write_text("def double(x):\n    return 2 * x\n\n\ndef sign(x):\n    return x > 0\n")
    test = "from small.one import double, sign\n\n\ndef test_double():\n    assert double(3) == 6 and sign(3)\n"
    (tmp_path / "test_one.py").write_text(test)
    return tmp_path


def test_a_missing_or_repeated_text_is_a_problem(mutations: ModuleType, small: Path) -> None:
    def problem(old: str, test: str = "test_one.py") -> str | None:
        return mutations.Mutation("one", "small", old, "", [test]).problem(small)

    assert problem("2 * x") is None
    assert "occurs 0 times in small" in problem("3 * x")
    assert "occurs 2 times" in problem("return")
    assert "no test_two.py" in problem("2 * x", "test_two.py")


def test_a_mutation_is_caught_or_survives_and_is_taken_back(small: Path) -> None:
    """The check needs another process, since this process has already imported the mutated module."""
    program = """if True:
        import sys
        from pathlib import Path
        import mutations
        for old, new in (("2 * x", "3 * x"), ("x > 0", "x >= 0")):
            mutation = mutations.Mutation("one", "small", old, new, ["test_one.py"])
            print(mutations.tried(mutation, Path(sys.argv[1]), "test_one.py::test_double"))
    """
    before = (small / "small/one.py").read_text()
    result = subprocess.run(
        [sys.executable, "-c", program, str(small)], cwd=ROOT / "dev", capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split() == ["test_one.py::test_double", "None"], result.stderr
    assert (small / "small/one.py").read_text() == before
