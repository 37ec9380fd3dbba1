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
    sets, whole, errors = header["questions"], found["", 1.0, "unpatched"], [0.0]
    titles = [title for name in sets for title in (f"{name}: plain", "merged", "weighed")]
    lines = [f"| chooser, keep | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]

    def more(before: str, after: str) -> str:
        points = [100 * (int(b) - int(a)) for a, b in zip(before, after, strict=True)]
        mean = fmean(points)
        errors.append(SURE * stdev(points) / sqrt(len(points)))
        return f"**{mean:+.1f}**" if abs(mean) > errors[-1] else f"{mean:+.1f}"

    for chooser, keep, way in found:
        ways = [found.get((chooser, keep, one)) for one in ("plain", "merged", "weighed")]
        if way == "plain" and all(ways):
            plain, *others = (one or {} for one in ways)
            cells = []
            for name in sets:
                cells += [_share(plain[name]), *(more(plain[name], other[name]) for other in others)]
            lines.append(f"| `{chooser}`, {keep:g} | {' | '.join(cells)} |")
    asked = ", ".join(
        f"{number} about {header['images']} {name} (unpatched {_share(whole[name])} %)" for name, number in sets.items()
    )
    about = (
        f"{header['model'].partition(' ')[0]}, questions: {asked}. Plain: % right with the chooser. Merged, weighed "
        f"(`calibrate=True`): points that `restore` adds, of the same questions, 95 %: up to ±{max(errors):.0f}; bold "
        "where 0 is outside. By `python experiments/restore_gain.py`; "
        "[raw data](../../experiments/results/restore_gain.jsonl)."
    )
    return "\n".join([about, "", *lines])


def _share(right: str) -> str:
    return f"{100 * right.count('1') / len(right):.1f}"
