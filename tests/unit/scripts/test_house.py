# SPDX-License-Identifier: Apache-2.0
"""The numbers that the site shows in docs/extend/architecture.md are counted right, and CITATION.cff can be read."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import yaml

import tokenprune

ROOT = Path(__file__).parents[3]


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
    made = house.measure({"small_house": small})
    # What stands in a function counts, what is there for type checkers does not.
    assert made["folders"] == {
        "small_house": {"files": 2, "lines": 1, "within": 0, "out": 1, "into": 0},
        "small_house/high": {"files": 3, "lines": 4, "within": 2, "out": 1, "into": 1},
        "small_house/low": {"files": 3, "lines": 5, "within": 0, "out": 1, "into": 2},
    }
    assert made["circles of files"] == [["small_house.high.one", "small_house.high.two"]]
    assert made["circles of folders"] == [["small_house/high", "small_house/low"]]
    assert made["circles of files, types counted"] == [["small_house.high.one", "small_house.high.two"]]
    # Files of an open folder are rooms of their own.
    opened = house.measure({"small_house": small}, ["small_house.low"])
    assert opened["circles of folders"] == []


def test_blanks_comments_and_docstrings_are_no_code(house: ModuleType) -> None:
    before = '"""Says\nmuch."""\n\n# a comment\nlong = """two\nlines"""\n\n\n'
    text = before + 'def one():\n    """Doc."""\n    return (\n        1\n    )  # why\n'
    assert house.code_lines(text) == 6


def test_imports_against_the_layers_are_found(house: ModuleType, small: Path) -> None:
    imports = house.imports_of(house.files_of({"small_house": small}))
    climb = ("small_house.low.climber", "small_house.high.two")
    down = ("small_house.high.one", "small_house.low.plain")
    layers = {"type": "layers", "layers": ["small_house.api", "small_house.high", "small_house.low"]}
    assert house.upward(imports, [layers]) == [climb]
    inside = {"type": "layers", "containers": ["small_house"], "layers": ["(api)", "high | low"]}
    assert house.upward(imports, [inside]) == sorted([down, climb])
    inside["layers"] = ["api", "high : low"]
    assert house.upward(imports, [inside]) == []
    assert house.upward(imports, [{"type": "independence", "modules": []}]) == []


def test_imports_are_read_from_every_way_to_write_them(house: ModuleType, small: Path) -> None:
    (small / "small_house/high/three.py").write_text(
        "import small_house.low.plain as it, os\nfrom . import one\nfrom ..low import climber\nfrom .two import late\n"
        "import typing\nif typing.TYPE_CHECKING:\n    import small_house.api\nelse:\n    from small_house import low\n"
    )
    files = house.files_of({"small_house": small})
    found, all_found = house.imports_of(files), house.imports_of(files, for_types=True)
    own = {other.removeprefix("small_house.") for one, other in found if one == "small_house.high.three"}
    assert own == {"low.plain", "high.one", "low.climber", "high.two", "low"}
    assert all_found - found == {
        ("small_house.high.three", "small_house.api"),
        ("small_house.low.climber", "small_house.api"),
    }


def test_the_citation_has_what_its_schema_requires() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["version"] == tokenprune.__version__
    assert all(author.keys() & {"name", "family-names"} for author in cited["authors"])
