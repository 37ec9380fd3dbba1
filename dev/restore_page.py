# SPDX-License-Identifier: Apache-2.0
"""The generated part of docs/methods/restore.md: what `restore` gains over each chooser by itself."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parent.parent
GAIN = ROOT / "experiments/results/restore_gain.jsonl"
SURE = 1.96  # standard errors of an interval of 95 %


def gain() -> str:
    """Return the table: answers right with the chooser, and the points that either form adds to them."""
    header, *records = (json.loads(line) for line in GAIN.read_text().splitlines())
    found = {(one["chooser"], one["keep"], one["way"]): one for one in records}
    sets, whole = header["questions"], found["", 1.0, "unpatched"]
    titles = [title for name in sets for title in (f"{name}: plain", "merged", "weighed")]
    lines = [f"| chooser, keep | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for chooser, keep, way in found:
        ways = [found.get((chooser, keep, one)) for one in ("plain", "merged", "weighed")]
        if way == "plain" and all(ways):
            plain, *others = (one or {} for one in ways)
            cells = [
                cell for name in sets for cell in (_share(plain[name]), *(_more(plain[name], o[name]) for o in others))
            ]
            lines.append(f"| `{chooser}`, {keep:g} | {' | '.join(cells)} |")
    asked = ", ".join(
        f"{number} about {header['images']} {name} (unpatched {_share(whole[name])} %)" for name, number in sets.items()
    )
    about = (
        f"{header['model'].partition(' ')[0]}, questions: {asked}. Plain: % right with the chooser. Merged, weighed "
        "(`calibrate=True`): points that `restore` adds to it, of the same questions, with 95 %. By `python "
        "experiments/restore_gain.py`; [raw data](../../experiments/results/restore_gain.jsonl)."
    )
    return "\n".join([about, "", *lines])


def _share(right: str) -> str:
    return f"{100 * right.count('1') / len(right):.1f}"


def _more(before: str, after: str) -> str:
    """Return the mean difference of answers, in points, and its interval; bold where that leaves out 0."""
    points = [100 * (int(b) - int(a)) for a, b in zip(before, after, strict=True)]
    mean, error = fmean(points), SURE * stdev(points) / sqrt(len(points))
    said = f"{mean:+.1f} ({mean - error:+.0f} to {mean + error:+.0f})"
    return f"**{said}**" if abs(mean) > error else said
