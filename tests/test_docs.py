# SPDX-License-Identifier: Apache-2.0
"""README and guides say what the code does."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import tokenprune
from tokenprune import registry
from zoo import FAMILIES

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generator():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "dev/readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current() -> None:
    """`python dev/readme.py` would change nothing."""
    for page, text in generator().generated().items():
        assert page.read_text() == text, page.name


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(guide: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", guide.read_text()):
        assert (guide.parent / target).exists(), target


def test_the_quickstart_names_exist() -> None:
    for name in re.findall(r"tokenprune\.([A-Za-z_]+)", (ROOT / "README.md").read_text()):
        assert hasattr(tokenprune, name), name


def test_the_example_method_of_the_guide_works(build, tmp_path, monkeypatch) -> None:
    """The code of add-a-method.md, as a reader would paste it."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/add-a-method.md").read_text(), re.DOTALL)[1]
    code = re.sub(r"^ {3}", "", code, flags=re.MULTILINE)
    try:
        (tmp_path / "loudest.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.import_module("loudest")
        model, inputs = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs()
        with tokenprune.patched(model, "loudest", keep=0.25):
            model(**inputs)
            assert tokenprune.stats(model).keep_ratio == pytest.approx(0.25)
    finally:
        registry._METHODS.pop("loudest", None)
        sys.modules.pop("loudest", None)
