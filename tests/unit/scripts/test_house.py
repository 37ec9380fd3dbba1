# SPDX-License-Identifier: Apache-2.0
"""Test the counts that docs/extend/architecture.md shows, and that CITATION.cff is valid."""

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
    counts = house.measure({"small_house": small})
    # Imports in functions count, imports for type checkers do not.
    assert counts["folders"] == {
        "small_house": {"files": 2, "lines": 1, "within": 0, "out": 1, "into": 0},
        "small_house/high": {"files": 3, "lines": 4, "within": 2, "out": 1, "into": 1},
        "small_house/low": {"files": 3, "lines": 5, "within": 0, "out": 1, "into": 2},
    }
    assert counts["circles of files"] == [["small_house.high.one", "small_house.high.two"]]
    assert counts["circles of folders"] == [["small_house/high", "small_house/low"]]
    assert counts["circles of files, types counted"] == [["small_house.high.one", "small_house.high.two"]]
    # Each file of an open folder is a separate room.
    opened = house.measure({"small_house": small}, ["small_house.low"])
    assert opened["circles of folders"] == []


def test_blank_lines_comments_and_docstrings_do_not_count(house: ModuleType) -> None:
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
    imports, typed_imports = house.imports_of(files), house.imports_of(files, for_types=True)
    imported = {
        imported_module.removeprefix("small_house.")
        for importer, imported_module in imports
        if importer == "small_house.high.three"
    }
    assert imported == {"low.plain", "high.one", "low.climber", "high.two", "low"}
    assert typed_imports - imports == {
        ("small_house.high.three", "small_house.api"),
        ("small_house.low.climber", "small_house.api"),
    }


def test_the_citation_has_what_its_schema_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["version"] == tokenprune.__version__
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])
