# SPDX-License-Identifier: Apache-2.0
"""The numbers of docs/architecture.md: counted on a package made for it, and on the library."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("grimp", reason="import-linter is not installed")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "dev/house.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


FILES = {
    "__init__.py": "",
    "api.py": "from small_house.low import plain\n",
    "high/__init__.py": "",
    "high/one.py": "from small_house.high import two\nfrom small_house.low import plain\n",
    "high/two.py": "def late():\n    from small_house.high import one\n",
    "low/__init__.py": "",
    "low/plain.py": "import os\n",
    "low/climber.py": (
        "from typing import TYPE_CHECKING\nfrom small_house.high.two import late\n"
        "if TYPE_CHECKING:\n    from small_house import api\n"
    ),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "small_house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_files_lines_imports_and_circles_are_counted(house: ModuleType, small: Path) -> None:
    made = house.measure(small, "small_house")
    assert made["folders"] == {
        "small_house": {"files": 2, "lines": 1, "imports": 1},
        "small_house/high": {"files": 3, "lines": 4, "imports": 1},
        "small_house/low": {"files": 3, "lines": 5, "imports": 1},
    }
    assert (made["files"], made["lines"], made["longest"]) == (8, 10, 4)
    # What stands in a function counts, what is there for type checkers does not.
    assert made["imports"] == 5 and made["imports between folders"] == 3
    assert made["circles of files"] == [["small_house.high.one", "small_house.high.two"]]
    assert made["circles of folders"] == [["small_house/high", "small_house/low"]]


def test_imports_against_the_layers_are_found(house: ModuleType, small: Path) -> None:
    imports = house.imports_of(small, "small_house")
    climb = ("small_house.low.climber", "small_house.high.two")
    down = ("small_house.high.one", "small_house.low.plain")
    layers = {"type": "layers", "layers": ["small_house.api", "small_house.high", "small_house.low"]}
    assert house.upward(imports, [layers]) == [climb]
    inside = {"type": "layers", "containers": ["small_house"], "layers": ["(api)", "high | low"]}
    assert house.upward(imports, [inside]) == sorted([down, climb])
    inside["layers"] = ["api", "high : low"]
    assert house.upward(imports, [inside]) == []
    assert house.upward(imports, [{"type": "independence", "modules": []}]) == []


def test_the_page_has_room_for_the_tables_and_the_left_columns_are_committed(house: ModuleType) -> None:
    text = house.PAGE.read_text()
    assert text.count(house.BEGIN) == text.count(house.END) == 1
    before = json.loads(house.BEFORE.read_text())
    assert before["files"] == sum(row["files"] for row in before["folders"].values())
    made = house.table(before, house.measure(ROOT))
    assert "| `tokenprune/methods` |" in made and before["commit"] in made
    for line in made.split("\n\n"):
        assert len({row.count("|") for row in line.splitlines()}) == 1
