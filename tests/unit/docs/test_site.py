# SPDX-License-Identifier: Apache-2.0
"""The documentation site lists every page and every public name, and notebooks are committed without outputs.

`make docs` builds the site with strict links, `dev/check notebooks` executes the notebooks; both are part of `.ci/run`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tokenprune
from each import each
from tests.unit.docs.test_docs import generator
from tokenprune import _MODULES as MODULES
from tokenprune.models.families import REFUSED_IN_VLLM, SERVED
from tokenprune_bench import calibration

ROOT = Path(__file__).parents[3]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def pages(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the mkdocs navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(part)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import dev/mkdocs_hooks.py. mkdocs is not installed in this environment."""
    monkeypatch.setitem(sys.modules, "mkdocs", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mkdocs.structure", types.SimpleNamespace())
    files = types.SimpleNamespace(File=object, Files=object)
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", files)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return generator("mkdocs_hooks")


def test_every_page_is_in_the_navigation_or_linked_from_its_overview() -> None:
    listed = list(pages(SITE["nav"]))
    assert len(listed) == len(set(listed))
    written = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in listed if "/" in page and Path(page) not in written]
    for page in [*written, *(path.relative_to(ROOT / "docs") for path in NOTEBOOKS)]:
        if page.as_posix() in listed or page.parts[0] == "methods":  # dev/docs.py generates the overview of methods
            continue
        overview = ROOT / "docs" / page.parent / "README.md"
        assert f"]({page.name})" in overview.read_text(), page


def test_the_site_loads_no_external_files() -> None:
    """No external fonts, scripts or styles. mkdocs' strict mode checks the files in docs/."""
    assert SITE["theme"]["font"] is False
    assert not [url for url in (*SITE.get("extra_css", ()), *SITE.get("extra_javascript", ())) if "//" in str(url)]


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    documented = re.findall(r"^::: (tokenprune\S+)$", text, re.MULTILINE)
    homes = {name: tokenprune._MODULE_OF[name] for name in tokenprune.__all__ if name != "__version__"}
    modules = {getattr(tokenprune, name).__name__: getattr(tokenprune, name) for name in MODULES}
    # Names of public modules and of other distributions are documented under their own module.
    public = {
        f"{'tokenprune' if home.startswith('tokenprune.') and home not in modules else home}.{name}"
        for name, home in homes.items()
    }
    public |= {f"{path}.{name}" for path, module in modules.items() for name in module.__all__}
    public |= {f"tokenprune_bench.calibration.{name}" for name in calibration.__all__}
    assert public <= set(documented)
    assert len(documented) == len(set(documented))


@each("path", sorted((ROOT / "docs").rglob("*.md")))
def test_lists_and_tables_follow_an_empty_line(path: Path) -> None:
    """GitHub renders such lists, but the Markdown of the site shows text. Fences in lists need four spaces."""
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^(?![-*|#\s]|\d+\. ).+\n(?=(?:[-*]|\d+\.) |\|)", text, re.MULTILINE)
    assert not re.findall(r"^ {1,3}```", path.read_text(), re.MULTILINE)


@each("path", NOTEBOOKS)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    text = path.read_text()
    assert generator("notebooks").stripped(text) == text, "run python dev/notebooks.py"
    assert not re.search(r"/(home|root|tmp|work|Users)/|[A-Z]:\\\\", text)
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (path.parent / target).exists(), target


def test_the_page_of_a_notebook_shows_stored_outputs(hooks: Any) -> None:
    notebook_outputs = generator("notebook_outputs")
    kept = [path for path in NOTEBOOKS if (notebook_outputs.OUTPUTS / path.stem).is_dir()]
    assert [path.stem for path in kept] == ["tour"]
    for path in kept:
        folder, cells = notebook_outputs.OUTPUTS / path.stem, json.loads(path.read_text())["cells"]
        text = hooks.as_markdown(path)
        assert (folder / "code.sha256").read_text() == notebook_outputs.digest(cells), (
            f"python dev/notebook_outputs.py {path.stem}"
        )
        outputs = {file for file in folder.iterdir() if file.suffix != ".sha256"}
        code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
        assert len(outputs) > 9 and {file.stem for file in outputs} <= set(code)
        for file in outputs:
            after = text[text.index(code[file.stem]) + len(code[file.stem]) :].split("```python")[0]
            expected = f"](../images/{path.stem}/{file.name})" if file.suffix == ".webp" else file.read_text()
            assert expected in after, file.name


def linked_files(hooks: Any) -> set[str]:
    """Return the files of the repository that pages link to, by their URI in the site."""
    sources = [*hooks.PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    return {hooks.uri_of(to) for source in sources for to in hooks.links(source, (ROOT / source).read_text()).values()}


def test_no_page_links_to_markdown_outside_the_navigation(hooks: Any) -> None:
    """The site would build such a file as a page with broken links, and `make docs` would fail."""
    linked = linked_files(hooks)
    assert len(linked) > 50
    assert not [uri for uri in linked if uri.startswith("files/") and uri.endswith((".md", ".ipynb"))]


def build_page(hooks: Any, uri: str, text: str) -> str:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=uri))
    return hooks.on_page_markdown(text, page=page, config={}, files=None)


def test_a_method_page_includes_generated_parts(hooks: Any) -> None:
    """The hook finds the module of a method by its name, in any folder."""
    for name in tokenprune.available_methods():
        assert hooks.module_of(name) == tokenprune.method_info(name).cls.__module__
    page = build_page(hooks, "methods/dart.md", "# DART, a method\n\nWhat it does.\n\nText of ours.\n")
    parts = ("# DART, a method\n", "What it does.", "![Tokens that dart keeps", "| `dart` | 95.2 |", "Text of ours.")
    parts += ("## At a glance", "| source | arXiv", "| `pivot_image` | `4` | an int >= 1 | Number of visual pivots.")
    parts += ("## Reference", "::: tokenprune.methods.in_llm.dart")
    offsets = [page.index(part) for part in parts]
    assert offsets == sorted(offsets) and page.count("| `exact` |") == 1


def test_markers_are_replaced_by_generated_tables(hooks: Any) -> None:
    page = build_page(hooks, "methods/README.md", (ROOT / "docs/methods/README.md").read_text())
    _, _, page = page.partition("<!-- measured:end -->")
    assert all(page.count(f"| [`{name}`]({name}.md) |") == 1 for name in tokenprune.available_methods())
    page = build_page(hooks, "extend/add-a-method.md", (ROOT / "docs/extend/add-a-method.md").read_text())
    observables = set(tokenprune.selection.available_observables()) - {"hidden", "normed"}
    assert all(page.count(f"\n| `{name}` |") == 1 for name in observables)
    assert "| **all of tokenprune** |" in build_page(hooks, "extend/architecture.md", "# A\n\n<!-- made: house -->\n")
    served = build_page(hooks, "serving/reference.md", (ROOT / "docs/serving/reference.md").read_text())
    assert all(served.count(f"| `{name}` |") == 1 for name in SERVED)
    assert all(f"`{name}`" in served and f"| {reason} |" in served for name, reason in REFUSED_IN_VLLM.items())
    with pytest.raises(KeyError, match="nothing"):
        build_page(hooks, "start/questions.md", "<!-- made: nothing -->")


def test_news_precede_the_changelog(hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    log = "# Changelog\n\n## [0.1.0]\n\n- Old.\n"
    assert hooks.with_news(log) == log
    (tmp_path / "dev/news").mkdir(parents=True)
    for name, text in {"README": "no line", "b": "- **B** ([page](../../docs/b.md)).\n", "a": "- **A**.\n"}.items():
        (tmp_path / f"dev/news/{name}.md").write_text(text)
    news = "## Since then\n\n- **A**.\n- **B** ([page](docs/b.md)).\n"
    assert hooks.with_news(log) == log.replace("## [0.1.0]", f"{news}\n## [0.1.0]")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "dev/news").glob("[!R]*.md")) or [None], ids=lambda path: path.stem if path else "none"
)
def test_a_line_of_the_changelog_is_one_bullet(path: Path | None) -> None:
    if path is None:
        pytest.skip("no change waits for a release")
    text = path.read_text()
    assert re.fullmatch(r"- .+(\n  .+)*\n", text)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), target


def test_every_marker_is_used_once(hooks: Any) -> None:
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    markers = [name for text in texts for name in hooks.MARKER.findall(text)]
    assert sorted(markers) == sorted(hooks.MADE)


def test_the_index_lists_each_method_once() -> None:
    docs = generator("docs")
    text = f"{docs.index()}\n{docs.comparison()}\n"
    assert sorted(re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE)) == tokenprune.available_methods()
    assert not re.search(r"^\|---.*\n(?!\|)", text, re.MULTILINE)


def test_pages_are_generated_without_torch() -> None:
    """The environment of the site has an empty stand-in for torch."""
    code = (
        "import sys; sys.modules['torch'] = type(sys)('torch'); sys.path.insert(0, 'dev'); import docs, figure_sites; "
    )
    code += "made = docs.index() + docs.comparison() + docs.observables(); "
    code += "made += ''.join(docs.head(page.stem) for page in docs.pages())"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_stripping_a_notebook_removes_only_outputs_and_counts() -> None:
    markdown = {"cell_type": "markdown", "id": "a", "metadata": {"tags": ["x"]}, "source": ["# Title"]}
    code = {"cell_type": "code", "execution_count": 3, "id": "b", "metadata": {"execution": {"begin": "now"}}}
    code |= {"outputs": [{"output_type": "stream", "name": "stdout", "text": ["1"]}], "source": ["print(1)"]}
    metadata = {"kernelspec": {"name": "my-venv"}, "language_info": {"name": "python", "version": "3.11.7"}}
    notebook = {"cells": [markdown, code], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    stripped = json.loads(generator("notebooks").stripped(json.dumps(notebook)))
    prose, code = stripped["cells"]
    assert prose["source"] == ["# Title"]
    assert (code["outputs"], code["execution_count"], code["source"]) == ([], None, ["print(1)"])
    assert not code["metadata"] and stripped["metadata"]["kernelspec"]["name"] == "python3"
    assert "3.11.7" not in json.dumps(stripped)
