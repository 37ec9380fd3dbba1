# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs (mkdocs.yml): what the site shows beside the files of docs/.

README, changelog and notebooks are pages too, and are written once, where readers of the repository look for them.
Links are those of the repository; here they are turned into links of the site. Other files that pages link to, such as
the raw data of the benchmarks, go into the site under files/. Below every method's page stands its docstring.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "on-one-page.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "dev/README.md": "tools.md",
    "tests/README.md": "tests.md",
    "training/README.md": "training.md",
    "training/qwen/README.md": "training-qwen.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that lie outside docs/, then every other file of the repository that a page links to."""
    pages = {source: (ROOT / source).read_text() for source in PAGES}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.name}"] = as_markdown(path)
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    for source, text in pages.items():
        files.append(File.generated(config, uri_of(source), content=text))
    pages |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    linked = {to for source, text in pages.items() for to in links(source, text).values()}
    for to in sorted(linked):
        if uri_of(to).startswith("files/") and (ROOT / to).is_file():
            files.append(File.generated(config, uri_of(to), abs_src_path=str(ROOT / to)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    uri = page.file.src_uri
    targets = links(source_of(uri), markdown)
    folder = PurePosixPath(uri).parent
    markdown = LINK.sub(
        lambda match: os.path.relpath(uri_of(targets[match[1]]), folder) if match[1] in targets else match[1], markdown
    )
    if uri.startswith("methods/") and (name := PurePosixPath(uri).stem) != "README":
        options = "{show_root_heading: false, show_root_toc_entry: false, heading_level: 3}"
        markdown += f"\n\n## Reference\n\n::: {module_of(name)}\n    options: {options}\n"
    return markdown


def module_of(method: str) -> str:
    """Return the module of a method, which lies in the folder of its site; nothing is imported here."""
    (path,) = (ROOT / "tokenprune/methods").rglob(f"{method}.py")
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def links(source: str, text: str) -> dict[str, str]:
    """Return the links of a file of the repository that lead to another one, with the path of that from the root."""
    found = {}
    for link in LINK.findall(text):
        to = (ROOT / source).parent.joinpath(link).resolve()
        if to.exists() and to.is_relative_to(ROOT):
            found[link] = to.relative_to(ROOT).as_posix()
    return found


def uri_of(source: str) -> str:
    """Return where a file of the repository stands in the site."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source.startswith("notebooks/") and source.endswith(".ipynb"):
        return source.removesuffix(".ipynb") + ".md"
    return f"files/{source}"


def source_of(uri: str) -> str:
    """The inverse of `uri_of`, for pages."""
    for source, page in PAGES.items():
        if uri == page:
            return source
    return uri.removesuffix(".md") + ".ipynb" if uri.startswith("notebooks/") else f"docs/{uri}"


def as_markdown(path: Path) -> str:
    """A notebook as a page: text as it is, code in fences; outputs are not in git."""
    cells = json.loads(path.read_text())["cells"]
    title, *rest = ("".join(cell["source"]) if cell["cell_type"] == "markdown" else code(cell) for cell in cells)
    note = f'!!! note\n    Run it: <a href="{path.name}" download>{path.name}</a>. Outputs are computed, never stored.'
    return "\n\n".join([title, note, *rest]) + "\n"


def code(cell: dict[str, Any]) -> str:
    return f"```python\n{''.join(cell['source'])}\n```"
