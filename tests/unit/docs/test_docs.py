# SPDX-License-Identifier: Apache-2.0
"""README and guides agree with the code."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

import tokenprune
from each import each
from tokenprune.methods import registry
from tokenprune.models.decoder_shape import DecoderShape
from zoo import FAMILIES

ROOT = Path(__file__).parents[3]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generator(name: str = "readme"):
    """Return a script of dev as a module. Scripts import each other."""
    if str(ROOT / "dev") not in sys.path:
        sys.path.append(str(ROOT / "dev"))
    spec = importlib.util.spec_from_file_location(name, ROOT / f"dev/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current() -> None:
    """`python dev/readme.py` changes no file."""
    for page, text in generator().generated().items():
        assert page.read_text() == text, page.name


@each("name", tokenprune.available_methods())
def test_every_method_has_a_page(name: str) -> None:
    path = ROOT / f"docs/methods/{name}.md"
    assert path.exists(), f"write docs/methods/{name}.md: a title, and when to use the method"
    text = path.read_text()
    assert text.startswith("# ") and len(text.split()) > 50
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(code, path.name, "exec")


def test_generated_method_pages_are_current() -> None:
    docs = generator("docs")
    assert all(path.read_text() == text for path, text in docs.generate().items()), "run python dev/docs.py"
    assert {path.stem for path in docs.pages()} == set(tokenprune.available_methods())


@each("guide", GUIDES)
def test_links_of_pages_exist(guide: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", guide.read_text()):
        assert (guide.parent / target).exists(), target


@each("guide", GUIDES)
def test_python_files_named_on_a_page_exist(guide: Path) -> None:
    """Paths start at the root or inside a source folder. loudest.py is a file of the reader."""
    for name in set(re.findall(r"`(?:python )?([\w/]+\.py)\b", guide.read_text())):
        folders = ("dev", "tokenprune", "benchmarks", "demo", "tests/unit", "tests/vllm", "tests/lmms")
        exists = (ROOT / name).is_file() or any(any((ROOT / folder).rglob(name)) for folder in folders)
        assert exists or name.endswith("loudest.py"), name


def test_the_install_page_lists_every_extra() -> None:
    extras = {}
    for folder in (".", "./benchmarks", "./demo"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras |= {f"{folder}[{name}]": packages for name, packages in project.get("optional-dependencies", {}).items()}
    rows = re.findall(r"^\| `(\S+\[[\w-]+\])` \| (.*?) \|", (ROOT / "docs/start/install.md").read_text(), re.MULTILINE)
    assert dict(rows).keys() == extras.keys() and len(rows) == len(dict(rows))
    for extra, packages_text in rows:
        if extra != ".[dev]":  # the test and site tools have many packages
            packages = {re.match(r"[\w-]+", requirement)[0] for requirement in extras[extra]}
            for package in packages_text.lower().split(", "):
                assert package in packages, f"{extra} adds no {package}"


def test_the_quickstart_names_exist() -> None:
    for name in re.findall(r"tokenprune\.([A-Za-z_]+)", (ROOT / "README.md").read_text()):
        assert name == "json" or hasattr(tokenprune, name), name  # tokenprune.json is a file


def test_the_example_method_of_the_guide_works(build, tmp_path, monkeypatch) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/extend/add-a-method.md").read_text(), re.DOTALL)[1]
    code = re.sub(r"^ {4}", "", code, flags=re.MULTILINE)
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


def test_the_shares_of_virtual_unmerging_follow_the_closed_form() -> None:
    """The table of docs/results/methods.md: the size of LLaVA-1.5-7B's decoder, 64 text tokens, a quarter kept."""
    shape = DecoderShape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128)
    page = (ROOT / "docs/results/methods.md").read_text()
    for visual in (576, 2880):
        unpruned, pruned = 64 + visual, 64 + visual // 4
        unpruned_flops = shape.layer_flops(unpruned)
        unmerged = shape.layer_flops(pruned, attention=(unpruned / pruned) ** 2) / unpruned_flops
        row = f"| {visual} | a quarter | {unmerged:.0%} | {shape.layer_flops(pruned) / unpruned_flops:.0%} |"
        assert row.replace("%", " %") in page
