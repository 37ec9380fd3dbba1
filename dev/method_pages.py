# SPDX-License-Identifier: Apache-2.0
"""Assemble the site's page of a method: the committed text, its figure and accuracy row from committed files, and the
properties of the registry (dev/docs.py). dev/mkdocs_hooks.py appends the docstring.

The measured tables of docs/methods/README.md and docs/results/methods.md are generated here too; dev/readme.py writes
them."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))  # before the root, which has a folder named docs
from tables import format_table  # noqa: E402

import docs  # noqa: E402
import tokenprune  # noqa: E402

KEPT = ROOT / "docs/images/kept"
RESULTS = ROOT / "benchmarks/results"
IMAGES, VIDEOS = ROOT / "docs/results/all-methods.md", RESULTS / "bench_videos.jsonl"
PRUMERGE = RESULTS / "prumerge_blocks.jsonl"
BASELINES = {"rnd": "random", "uni": "uniform", "down": "downsample"}  # marks in docs/results/all-methods.md
# The overview shows the methods that docs/start/choose.md names or compares, then the baselines.
OVERVIEW = ("cdpruner", "scope", "vispruner", "visionzip", "divprune", "tome", "dart", "fastv", "pool")
# The read block, and the earlier block that sees the whole image.
BLOCKS = {-1: "last, read by the model", -2: "the block before", 2: "the earlier block with global attention"}


class ImageTable(NamedTuple):
    """First table of docs/results/all-methods.md.

    Attributes:
        model: Name of the measured model.
        unpruned: Accuracy with all tokens, in percent.
        rows: Cells by method and column title.
    """

    model: str
    unpruned: str
    rows: dict[str, dict[str, str]]


def page(name: str, text: str) -> str:
    """Return the complete page of a method. Figure and accuracy row follow the first paragraph; the properties come
    last."""
    title, _, rest = text.partition("\n")
    summary, _, body = rest.lstrip("\n").partition("\n\n")
    parts = [title, summary, image(name), row(name), body.strip(), f"## At a glance\n\n{docs.head(name)}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def image(name: str) -> str:
    """Return the figure of the kept tokens, or an empty string if the method cannot be drawn."""
    path = KEPT / f"{name}.json"
    if not path.is_file():
        return ""
    record = json.loads(path.read_text())
    is_video = record["of"] == "video"
    original = "the-video" if is_video else "the-photograph"
    description = "The frames of the video" if is_video else "The photograph"
    is_correct = record["answer"].strip().lower() == record["right"]
    answer = f"“{record['answer'].strip()}”" + ("" if is_correct else f" (correct: “{record['right']}”)")
    caption = (
        f"`{name}` at `keep={record['keep']:g}`: {record['kept']} of {record['tokens']} tokens after the last cut. "
        "Dark parts are dropped, and parts of one flat color are merged. Question: "
        f"“{record['question']}” Answer of the small model: {answer}."
    )
    if is_video:
        caption += " One of two joined frames is drawn."
    return (
        f'<figure class="kept {record["of"]}" markdown>\n\n![{description}](../images/kept/{original}.webp) '
        f"![Tokens that {name} keeps](../images/kept/{name}.webp)\n\n"
        f"<figcaption markdown>\n\n{caption}\n\n</figcaption>\n\n</figure>"
    )


def row(name: str) -> str:
    """Return a table with the accuracy of the method on images, otherwise on videos, or an empty string if it was not
    measured."""
    images = _read_images()
    if name in images.rows:
        cells = {title: cell for title, cell in images.rows[name].items() if title.startswith("at ") and cell}
        shown = {title: cell.partition(" ≤")[0] for title, cell in cells.items()}
        titles = ["correct answers, %", "all tokens", *shown]
        beaten_by = {title: _find_unbeaten_baselines(cell) for title, cell in cells.items()}
        unbeaten = "; ".join(f"{', '.join(names)} {title}" for title, names in beaten_by.items() if names)
        note = (
            f"Measured with `{images.model}`, tokens averaged over layers ([all methods](../results/all-methods.md))."
        )
        note += f" Not shown to beat {unbeaten}." if unbeaten else ""
        return f"{format_table(titles, [[f'`{name}`', images.unpruned, *shown.values()]])}\n\n{note}"
    accuracy = _read_videos(VIDEOS)
    keeps = sorted({keep for method, keep in accuracy if method == name}, reverse=True)
    if not keeps:
        return ""
    titles = ["correct answers, videos", "all tokens", *(f"{keep:.0%} of the tokens" for keep in keeps)]
    values = [f"`{name}`", f"{accuracy['unpatched', 1.0]:.0%}", *(f"{accuracy[name, keep]:.0%}" for keep in keeps)]
    note = "Measured with `demo_video`, a small shipped model, on synthetic videos: [videos](../results/video.md)."
    return f"{format_table(titles, [values])}\n\n{note}"


def overview() -> str:
    """Return the first table of docs/methods/README.md: accuracy and properties of the most useful methods."""
    images = _read_images()
    titles = ["method", "acts", "reads the question", *(keeps := ("at 25 %", "at 11 %"))]
    lines = [["all tokens", "", "", images.unpruned, images.unpruned]]
    for name in (*OVERVIEW, *BASELINES.values()):
        info = tokenprune.method_info(name)
        cells = (images.rows[name][keep].partition(" ≤")[0] for keep in keeps)
        lines.append([f"[`{name}`]({name}.md)", docs.SHORT_SITES[info.site], docs.YES[info.query_aware], *cells])
    note = (
        f"Correct answers in percent with 95 % intervals, `{images.model}`, visual tokens averaged over the decoder's "
        "layers. The last three rows are baselines. [All methods](../results/all-methods.md), "
        "[videos](../results/video.md), [published numbers](../results/papers.md)."
    )
    return f"{format_table(titles, lines)}\n\n{note}"


def prumerge_blocks() -> str:
    """Return the table of docs/results/methods.md about the tower block that ranks the patches of `prumerge`."""
    records = [json.loads(line) for line in PRUMERGE.read_text().splitlines()]
    accuracy: dict[tuple[str, int, str], list[str]] = {}
    counts: dict[str, int] = {}
    for record in records:
        if record["record"] == "prumerge_blocks" and record["keep"] in (0.25, 0.11):
            correct = record["right"]
            counts[record["model"]] = len(correct)
            cell = accuracy.setdefault((record["model"], record["block"], record["heads"]), [])
            cell.append(f"{100 * correct.count('1') / len(correct):.1f}")
    lines = []
    for model, block in dict.fromkeys(key[:2] for key in accuracy):
        cells = (", ".join(accuracy.get((model, block, heads), ["no class token"])) for heads in ("heads", "wide"))
        lines.append([f"`{model}`", BLOCKS[block], *cells])
    questions = ", ".join(f"{count} questions with {model}" for model, count in counts.items())
    source = "By `python benchmarks/experiments/studies/prumerge_blocks.py`"
    file = PRUMERGE.relative_to(ROOT)
    table = format_table(["model", "block", "separate heads", "one wide head"], lines)
    return f"{table}\n\n{source}, {questions}; raw data: [{file}]({file})."


def _find_unbeaten_baselines(cell: str) -> list[str]:
    """Return the baselines that a cell of docs/results/all-methods.md marks as not beaten."""
    return [f"`{BASELINES[mark]}`" for mark in cell.partition("≤")[2].split("/") if mark]


@cache
def _read_images() -> ImageTable:
    """Read the first table of docs/results/all-methods.md."""
    text = IMAGES.read_text().partition("<!-- all:begin")[2]
    header = re.search(r"^## (\w+).*?^Unpatched: ([\d.]+) %", text, re.MULTILINE | re.DOTALL)
    assert header
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line[:1] == "|"]
    titles = lines[0]
    end = next((index for index, cells in enumerate(lines) if index and cells[0] == "method"), len(lines))
    rows = {cells[0].strip("`"): dict(zip(titles, cells, strict=True)) for cells in lines[2:end]}
    return ImageTable(header[1], header[2], rows)


@cache
def _read_videos(path: Path) -> dict[tuple[str, float], float]:
    """Return the share of correct answers by method and keep."""
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (record["method"], record["keep"]): sum(record["correct"].values()) / sum(record["n"].values())
        for record in records
        if record["record"] == "result"
    }
