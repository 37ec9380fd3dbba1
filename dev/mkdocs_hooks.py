# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs (mkdocs.yml) that add pages and tables to the site.

README, changelog and notebooks become pages of the site. Links of the repository are turned into links of the site.
Linked files outside docs/, such as raw data of the benchmarks, are copied to files/.

Parts derived from the code are not stored in a file: `<!-- made: NAME -->` becomes the table of this name (`MADE`), and
the page of a method gets its image, its numbers and its docstring (dev/method_pages.py). Long tables are folded
(dev/fold.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "dev")]


class _Absent(ModuleType):
    """An empty stand-in for a package, so that methods can be described without running them."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the site is built without {self.__name__}, and {self.__name__}.{name} is read on import")


if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
    sys.modules["torch"] = _Absent("torch")

import figure_sites  # noqa: E402
import fold  # noqa: E402
import house  # noqa: E402
import method_pages  # noqa: E402
import notebook_outputs  # noqa: E402

import docs  # noqa: E402

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "dev/README.md": "tools.md",
    "tests/README.md": "tests.md",
    "dev/release.md": "release.md",
    "benchmarks/experiments/gpu/plan.md": "gpu-plan.md",
    "benchmarks/experiments/gpu/rehearsal.md": "gpu-rehearsal.md",
    "benchmarks/experiments/training/README.md": "training.md",
    "benchmarks/experiments/training/qwen/README.md": "training-qwen.md",
    "benchmarks/experiments/training/smol/README.md": "training-smol.md",
}
MADE: dict[str, Callable[[], str]] = {
    "sites": docs.sites,
    "index": docs.index,
    "comparison": docs.comparison,
    "observables": docs.observables,
    "limits": docs.limits,
    "served": docs.served,
    "not-served": docs.list_unserved,
    "house": lambda: house.table(house.in_numbers()),
}
MARKER = re.compile(r"^<!-- made: ([\w-]+) -->$", re.MULTILINE)
INLINE_CODE = re.compile(r"<code>[^<\n]*--[^<\n]*</code>")
OPTION = re.compile(r"--[a-z][\w-]{0,24}")
FIGURE = "images/sites-methods.svg"  # of the index of methods
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages outside docs/, the figure of all methods, and every other linked file of the repository."""
    files.append(File.generated(config, FIGURE, content=figure_sites.figure(names=True)))
    pages = {source: (ROOT / source).read_text() for source in PAGES}
    pages["CHANGELOG.md"] = with_news(pages["CHANGELOG.md"])
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        pages[f"docs/notebooks/{path.name}"] = as_markdown(path)
    for source, text in pages.items():
        files.append(File.generated(config, uri_of(source), content=text))
    pages |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    linked = {to for source, text in pages.items() for to in links(source, text).values()}
    for to in sorted(linked):
        if uri_of(to).startswith("files/") and (ROOT / to).is_file():
            files.append(File.generated(config, uri_of(to), abs_src_path=str(ROOT / to)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Insert the generated parts, and turn links of the repository into links of the site."""
    uri = page.file.src_uri
    name = PurePosixPath(uri).stem if uri.startswith("methods/") and not uri.endswith("/README.md") else None
    markdown = MARKER.sub(lambda match: MADE[match[1]](), markdown)
    if name:
        markdown = method_pages.page(name, markdown)
    targets = links(source_of(uri), markdown)
    folder = PurePosixPath(uri).parent
    markdown = LINK.sub(
        lambda match: os.path.relpath(uri_of(targets[match[1]]), folder) if match[1] in targets else match[1], markdown
    )
    if name:
        options = "{show_root_heading: false, show_root_toc_entry: false, heading_level: 3, "
        options += "show_docstring_parameters: false}"  # `docs.head` lists them
        markdown += f"\n\n## Reference\n\n::: {module_of(name)}\n    options: {options}\n"
    return fold.folded(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark options in inline code, so that no line breaks after their dashes."""
    return INLINE_CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def with_news(changelog: str) -> str:
    """Return the changelog with the lines of dev/news in front of its first version."""
    paths = sorted(path for path in (ROOT / "dev/news").glob("*.md") if path.name != "README.md")
    if not paths:
        return changelog
    head, first, rest = changelog.partition("\n## ")
    news = "\n".join(path.read_text().strip().replace("](../../", "](") for path in paths)
    return f"{head}\n## Since then\n\n{news}\n{first}{rest}"


def module_of(method: str) -> str:
    """Return the file name of a method's module without importing it."""
    (path,) = (ROOT / "tokenprune/methods").rglob(f"{method}.py")
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def links(source: str, text: str) -> dict[str, str]:
    """Return the links of a file to other files of the repository, with their path from the root."""
    targets = {}
    for link in LINK.findall(text):
        to = (ROOT / source).parent.joinpath(link).resolve()
        if to.exists() and to.is_relative_to(ROOT):
            targets[link] = to.relative_to(ROOT).as_posix()
    return targets


def uri_of(source: str) -> str:
    """Return the address of a file in the site."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("docs/"):
        page = source.removeprefix("docs/")
        return page.removesuffix(".ipynb") + ".md" if page.endswith(".ipynb") else page
    return f"files/{source}"


def source_of(uri: str) -> str:
    """The inverse of `uri_of`, for pages."""
    for source, page in PAGES.items():
        if uri == page:
            return source
    return f"docs/{uri.removesuffix('.md')}.ipynb" if uri.startswith("notebooks/") else f"docs/{uri}"


def as_markdown(path: Path) -> str:
    """Return a notebook as a page: text, code in fences, and the outputs that dev/notebook_outputs.py kept."""
    cells = json.loads(path.read_text())["cells"]
    folder = notebook_outputs.OUTPUTS / path.stem
    title, *rest = (
        "".join(cell["source"]) if cell["cell_type"] == "markdown" else code(cell, folder) for cell in cells
    )
    kept = "shows the outputs of a run" if folder.is_dir() else "has no outputs"
    note = f'!!! note\n    Run it: <a href="{path.name}" download>{path.name}</a>. This page {kept}.'
    return "\n\n".join([title, note, *rest]) + "\n"


def code(cell: dict[str, Any], outputs: Path) -> str:
    fence = f"```python\n{''.join(cell['source'])}\n```"
    return "\n\n".join(filter(None, [fence, notebook_outputs.shown(outputs, cell)]))
