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


@pytest.fixture
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "dev/house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_imports_are_counted_once_for_each_pair_of_modules(house: ModuleType, tmp_path: Path) -> None:
    """Relative imports and those in functions count; those for type checking alone do not."""
    files = {
        "tokenprune/__init__.py": "",
        "tokenprune/a.py": "import torch\nfrom tokenprune.b import one, two\n\n\ndef f():\n    import tokenprune.b\n",
        "tokenprune/b.py": "from tokenprune import a\n",
        "tokenprune/room/__init__.py": "from . import c\n",
        "tokenprune/room/c.py": "from ..a import f\n\nif TYPE_CHECKING:\n    from tokenprune.b import one\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert house.measure(tmp_path) == {
        "folders": {
            "tokenprune": {"files": 3, "lines": 7, "within": 2, "out": 0, "into": 1},
            "tokenprune/room": {"files": 2, "lines": 5, "within": 1, "out": 1, "into": 0},
        },
        "modules_in_circles": 2,
    }


def test_the_page_has_a_table_of_every_folder_of_before(house: ModuleType) -> None:
    page, before = house.PAGE.read_text(), json.loads(house.BEFORE.read_text())
    assert all(f"| `{folder}` | {one['files']} → " in page for folder, one in before["folders"].items())
    assert house.filled(house.filled(page)) == house.filled(page)


def test_the_citation_has_what_its_schema_requires() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["version"] == tokenprune.__version__
    assert all(author.keys() & {"name", "family-names"} for author in cited["authors"])
