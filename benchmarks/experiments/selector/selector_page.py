# SPDX-License-Identifier: Apache-2.0
"""Table of the experiment learned.py in docs/results/methods.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import fill_page

from tokenprune_bench.paired import Answers, compare_paired

PAGE = Path(__file__).parents[3] / "docs/results/methods.md"
_ABOUT = (
    "First row: correct in %. Other rows: gains over `divprune`, or the method after the minus, in points, bold if the "
    "95 % interval excludes 0. By `python benchmarks/experiments/learned.py`; "
    "[raw data](../../benchmarks/results/learned.jsonl)."
)
# Heads that are also compared with the strongest training-free method.
_COMPARED = ("learned attention question, diversity 1", "learned attention, diversity 1", "learned gradient question")
BEGIN, END = "<!-- learned:begin (python benchmarks/experiments/learned.py page) -->", "<!-- learned:end -->"


def write_page(raw: Path) -> None:
    """Fill the section of the page from the raw file."""
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    models = dict.fromkeys(row["model"] for row in rows if row["record"] == "result")
    fill_page(PAGE, BEGIN, END, "\n\n".join([_ABOUT, *(format_model(name, rows) for name in models)]))


def format_model(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the paragraph and the table of a model: gains over divprune, and over the strongest other method."""
    results = {(row["setting"], row["keep"]): row["right"] for row in rows
               if row["record"] == "result" and row["model"] == name}  # fmt: skip
    keeps = sorted({keep for label, keep in results if label == "divprune"}, reverse=True)
    labels = list(dict.fromkeys(label for label, _ in results if label not in ("unpatched", "divprune")))
    parts = [part for part, right in results["divprune", keeps[0]].items() if right]
    unpatched = results["unpatched", 1.0]
    counts = ", ".join(f"{len(unpatched[part])} {part} (unpatched {_share(unpatched[part])} %)" for part in parts)
    pairs = next(row["pairs"] for row in rows if row["record"] == "fit" and row["model"] == name)
    lines = [
        f"{name}, {pairs} pairs, in this order: {counts}.",
        "",
        "| method | " + " | ".join(f"{100 * keep:g} %" for keep in keeps) + " |",
        "|---|" + "---|" * len(keeps),
        "| `divprune` | "
        + " | ".join(", ".join(_share(results["divprune", keep][part]) for part in parts) for keep in keeps)
        + " |",
    ]
    strongest = _find_strongest(results, keeps)
    for baseline in ("divprune", strongest):
        for label in labels:
            if baseline == strongest and not label.startswith(_COMPARED):
                continue
            cells = []
            for keep in keeps:
                right, other = results.get((label, keep)), results.get((baseline, keep))
                is_known = right is not None and other is not None
                cells.append(", ".join(_gain(right[part], other[part]) for part in parts) if is_known else "")
            versus = f" - `{baseline}`" if baseline == strongest else ""
            lines.append(f"| {_shorten(label)}{versus} | " + " | ".join(cells) + " |")
    for row in rows:
        if row["record"] == "time" and row["model"] == name:
            learned, cdpruner = row["ratios"]["learned question, diversity 1"], row["ratios"]["cdpruner"]
            lines += [
                "",
                f"CPU time of the choice ({row['tokens']} tokens): {learned} x `divprune`; `cdpruner` {cdpruner} x.",
            ]
    return "\n".join(lines)


def _find_strongest(results: dict[tuple[str, float], dict[str, str]], keeps: list[float]) -> str:
    """Return the training-free method besides divprune with the most right answers to trained kinds, over all keeps."""
    excluded = ("learned", "divprune", "unpatched")
    labels = dict.fromkeys(label for label, _ in results if not label.startswith(excluded))
    free = [label for label in labels if all((label, keep) in results for keep in keeps)]
    return max(free, key=lambda label: sum(results[label, keep]["trained kinds"].count("1") for keep in keeps))


def _shorten(label: str) -> str:
    if not label.startswith("learned "):
        return f"`{label}`"
    return label.replace(", diversity 1", "").replace(", diversity 0", ", scores only").removeprefix("learned ")


def _share(right: str) -> str:
    return f"{100 * right.count('1') / len(right):.1f}"


def _gain(ours: str, theirs: str) -> str:
    """Return the gain in points, bold if its 95 % interval excludes 0."""
    first, second = (Answers([[float(x) for x in right]], [right]) for right in (ours, theirs))
    gap = compare_paired(first, second)
    text = f"{100 * gap.difference:+.1f}"
    return f"**{text}**" if gap.low > 0 or gap.high < 0 else text
