# SPDX-License-Identifier: Apache-2.0
"""Put together the page of a method for the site: what it keeps of one photograph and what it answered right, from the
committed files, between the text written by hand; then what the registry knows (dev/docs.py), and the docstring."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))  # ahead of the root, where docs is a folder
import docs  # noqa: E402

KEPT = ROOT / "docs/images/kept"
RESULTS = ROOT / "benchmarks/results"
IMAGES, VIDEOS = ROOT / "docs/results/all-methods.md", RESULTS / "bench_videos.jsonl"
BASELINES = {"rnd": "random", "uni": "uniform", "down": "downsample"}  # the marks of the table of all methods


def page(name: str, text: str) -> str:
    """Return the text of a method's page with everything that is made. The image and the row of numbers follow the
    first paragraph, the table of the registry ends the page."""
    title, _, rest = text.partition("\n")
    first, _, more = rest.lstrip("\n").partition("\n\n")
    parts = [title, first, image(name), row(name), more.strip(), f"## At a glance\n\n{docs.head(name)}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def image(name: str) -> str:
    """Return the figure of what the method keeps; nothing for a method that cannot be drawn."""
    record = KEPT / f"{name}.json"
    if not record.is_file():
        return ""
    one = json.loads(record.read_text())
    original = "the-video" if one["of"] == "video" else "the-photograph"
    shown = "The frames of the video" if one["of"] == "video" else "The photograph"
    right = one["answer"].strip().lower() == one["right"]
    answer = f"“{one['answer'].strip()}”" + ("" if right else f" (right: “{one['right']}”)")
    said = (
        f"What `{name}` keeps with `keep={one['keep']:g}`: {one['kept']} of {one['tokens']} tokens, after its last "
        "cut. Clear parts stay, dark ones are dropped, parts of one flat colour became one token. Asked "
        f"“{one['question']}”, the small model answers {answer}."
    )
    if one["of"] == "video":
        said += " It reads two frames as one, and one of the two is drawn."
    return (
        f'<figure class="kept {one["of"]}" markdown>\n\n![{shown}](../images/kept/{original}.webp) '
        f"![What {name} keeps of it](../images/kept/{name}.webp)\n\n"
        f"<figcaption markdown>\n\n{said}\n\n</figcaption>\n\n</figure>"
    )


def row(name: str) -> str:
    """Return what a small model answers right with the method, as a table of one row: on images the row of the table of
    all methods, else on drawn videos; nothing where it was not measured."""
    model, whole, rows = _images()
    if name in rows:
        cells = {title: cell for title, cell in rows[name].items() if title.startswith("at ") and cell}
        shown = {title: cell.partition(" ≤")[0] for title, cell in cells.items()}
        titles, values = ["questions right, %", "all tokens", *shown], [f"`{name}`", whole, *shown.values()]
        missed = {title: _not_beaten(cell) for title, cell in cells.items()}
        said = [f"Not shown to beat {', '.join(names)} {title}." for title, names in missed.items() if names]
        note = " ".join(
            [f"Measured with `{model}`, tokens averaged over layers ([all methods](../results/all-methods.md)).", *said]
        )
        return f"{_table(titles, values)}\n\n{note}"
    found = _right(VIDEOS)
    keeps = sorted({keep for method, keep in found if method == name}, reverse=True)
    if not keeps:
        return ""
    titles = ["questions about drawn videos right", "all tokens", *(f"{keep:.0%} of the tokens" for keep in keeps)]
    cells = [f"`{name}`", f"{found['unpatched', 1.0]:.0%}", *(f"{found[name, keep]:.0%}" for keep in keeps)]
    note = "Measured with `demo_video`, a small model that ships: [videos](../results/video.md)."
    return f"{_table(titles, cells)}\n\n{note}"


def _table(titles: list[str], cells: list[str]) -> str:
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", f"| {' | '.join(cells)} |"])


def _not_beaten(cell: str) -> list[str]:
    """Return the baselines that a cell of the table of all methods marks."""
    return [f"`{BASELINES[mark]}`" for mark in cell.partition("≤")[2].split("/") if mark]


@cache
def _images() -> tuple[str, str, dict[str, dict[str, str]]]:
    """Return the model of the first table of all methods, the percentage that is right unpatched, and the rows by
    method, each by the title of its column."""
    text = IMAGES.read_text().partition("<!-- all:begin")[2]
    model, whole = re.search(r"^## (\w+).*?^Unpatched: ([\d.]+) %", text, re.MULTILINE | re.DOTALL).groups()
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line[:1] == "|"]
    titles = lines[0]
    end = next((at for at, line in enumerate(lines) if at and line[0] == "method"), len(lines))
    return model, whole, {one[0].strip("`"): dict(zip(titles, one, strict=True)) for one in lines[2:end]}


@cache
def _right(path: Path) -> dict[tuple[str, float], float]:
    """Return the share that is right of each method and keep."""
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (one["method"], one["keep"]): sum(one["correct"].values()) / sum(one["n"].values())
        for one in records
        if one["record"] == "result"
    }
