# SPDX-License-Identifier: Apache-2.0
"""The numbers of docs/architecture.md come from the code, and CITATION.cff can be read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import tokenprune

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    pytest.importorskip("grimp", reason="import-linter is not installed")
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
    # What stands in a function counts, what is there for type checkers does not.
    assert made["folders"] == {
        "small_house": {"files": 2, "lines": 1, "within": 0, "out": 1, "into": 0},
        "small_house/high": {"files": 3, "lines": 4, "within": 2, "out": 1, "into": 1},
        "small_house/low": {"files": 3, "lines": 5, "within": 0, "out": 1, "into": 2},
    }
    assert made["circles of files"] == [["small_house.high.one", "small_house.high.two"]]
    assert made["circles of folders"] == [["small_house/high", "small_house/low"]]
    # Files of an open folder are rooms of their own.
    opened = house.measure(small, "small_house", ["small_house.low"])
    assert opened["circles of folders"] == []


def test_blanks_comments_and_docstrings_are_no_code(house: ModuleType) -> None:
    before = '"""Says\nmuch."""\n\n# a comment\nlong = """two\nlines"""\n\n\n'
    text = before + 'def one():\n    """Doc."""\n    return (\n        1\n    )  # why\n'
    assert house.code_lines(text) == 6


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


def test_the_page_has_a_row_for_every_folder_of_before(house: ModuleType) -> None:
    page, before = house.PAGE.read_text(), json.loads(house.BEFORE.read_text())
    assert page.count(house.BEGIN) == page.count(house.END) == 1 and before["commit"] in page
    assert all(f"| `{folder}` | {one['files']} → " in page for folder, one in before["folders"].items())


def test_a_folder_that_is_gone_or_new_has_a_dash(house: ModuleType) -> None:
    row = {"files": 1, "lines": 2, "within": 3, "out": 4, "into": 5}
    none = {"circles of files": [], "circles of folders": []}
    before = {"commit": "abc", "folders": {"old": row}, "circles of files": [["a", "b"]], "circles of folders": []}
    made = house.table(before, {"folders": {"new": row, "new/er": row}, **none})
    assert "| `old` | 1 → – | 2 → – | 3 → – | 4 → – | 5 → – |" in made
    assert "| all | 1 → 2 | 2 → 4 | 3 → 6 | 4 → 8 | 5 → 10 |" in made
    assert "Circles of files: 1 (2 in them) → none; of folders: none → none." in made


def test_the_citation_has_what_its_schema_requires() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["version"] == tokenprune.__version__
    assert all(author.keys() & {"name", "family-names"} for author in cited["authors"])
