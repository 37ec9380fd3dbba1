# SPDX-License-Identifier: Apache-2.0
"""Put together the page of a method for the site: what it keeps of one photograph and what it answered right, from the
committed files, between the text written by hand; then what the registry knows (dev/docs.py), and the docstring."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))  # ahead of the root, where docs is a folder
import docs  # noqa: E402

KEPT = ROOT / "docs/images/kept"
RESULTS = ROOT / "benchmarks/results"
IMAGES, VIDEOS = RESULTS / "all_methods-demo_qwen.jsonl", RESULTS / "bench_small_videos.jsonl"


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
    """Return what the small model answers right with the method, as a table of one row; nothing where it was not
    measured."""
    on_images = any(method == name for method, _ in _right(IMAGES))
    source, page_of = (IMAGES, "all-methods") if on_images else (VIDEOS, "video-bench")
    found = _right(source)
    keeps = sorted({keep for method, keep in found if method == name}, reverse=True)
    if not keeps:
        return ""
    unit = "tokens, averaged over layers" if source == IMAGES else "tokens"
    kind = "images" if source == IMAGES else "videos"
    titles = [f"questions about drawn {kind} right", "all tokens", *(f"{keep:.0%} of the {unit}" for keep in keeps)]
    cells = [f"`{name}`", f"{found['unpatched', 1.0]:.0%}", *(f"{found[name, keep]:.0%}" for keep in keeps)]
    table = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", f"| {' | '.join(cells)} |"]
    return (
        "\n".join(table) + f"\n\nMeasured with `demo_qwen`, a small model that ships: [all methods](../{page_of}.md)."
    )


@cache
def _right(path: Path) -> dict[tuple[str, float], float]:
    """Return the share that is right of each method and keep."""
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (one["method"], one["keep"]): sum(one["correct"].values()) / sum(one["n"].values())
        for one in records
        if one["record"] == "result"
    }
