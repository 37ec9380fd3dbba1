# SPDX-License-Identifier: Apache-2.0
"""Generate the part of docs/results/methods.md about `restore`: its gain over each chooser, on two models."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import rows
from tables import format_share, format_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
FILES = {"demo_qwen": "restore_gain.jsonl", "demo_smol": "restore_gain-demo_smol.jsonl"}
WAYS = ("plain", "merged", "weighed")
SHOWN = ("divprune", "uniform", "random")
BASELINES = ("uniform", "random")  # compare no tokens
SURE = 1.96  # standard errors of an interval of 95 %

Answers = dict[tuple[str, float, str], dict[str, str]]  # of a chooser, keep and way: by set, a 1 or 0 each


def gain() -> str:
    """Return one table per model: accuracy with the chooser, and the gain of each form of `restore` in points."""
    about = (
        "Cells: correct answers in % with the chooser only; gain in points with `restore`; gain with `calibrate=True`. "
        "Bold if the 95 % interval excludes 0. By `python benchmarks/experiments/restore_gain.py`."
    )
    return "\n\n".join([about, *(_of(model, RESULTS / name) for model, name in FILES.items())])


def _of(model: str, path: Path) -> str:
    header, records = rows.read(path)
    by_setting: Answers = {(record["chooser"], record["keep"], record["way"]): record for record in records}
    sets, unpatched = header["questions"], by_setting["", 1.0, "unpatched"]
    pairs = {
        (chooser, keep) for chooser, keep, _ in by_setting if all((chooser, keep, way) in by_setting for way in WAYS)
    }
    choosers = list(dict.fromkeys(chooser for chooser, *_ in by_setting if chooser))
    keeps = sorted({keep for _, keep in pairs}, reverse=True)

    def row(title: str, names: list[str], set_names: list[str]) -> list[str]:
        return [
            title,
            *(
                _cell(by_setting, [chooser for chooser in names if (chooser, keep) in pairs], keep, set_names)
                for keep in keeps
            ),
        ]

    comparing = [chooser for chooser in choosers if chooser not in BASELINES]
    asked = ", ".join(
        f"{count} about {set_name} (unpatched {format_share(unpatched[set_name])} %)"
        for set_name, count in sets.items()
    )
    lines = [row(f"`{chooser}`", [chooser], list(sets)) for chooser in choosers if chooser in SHOWN]
    lines += [row(f"mean of {len(comparing)} methods: {set_name}", comparing, [set_name]) for set_name in sets]
    table = format_table(["chooser", *(f"{keep:g}" for keep in keeps)], lines, left=1)
    return f"{model}, [questions](../../benchmarks/results/{path.name}): {asked}.\n\n{table}"


def _cell(by_setting: Answers, choosers: list[str], keep: float, sets: list[str]) -> str:
    """Return the cell of a group of choosers. The gain of a question is the mean over the choosers."""
    if not choosers:
        return "-"

    def right(way: str) -> list[float]:
        said = ("".join(by_setting[chooser, keep, way][name] for name in sets) for chooser in choosers)
        return [100 * fmean(map(int, of_question)) for of_question in zip(*said, strict=True)]

    plain, *others = map(right, WAYS)
    points = []
    for other in others:
        more = [after - before for before, after in zip(plain, other, strict=True)]
        mean = fmean(more)
        sure = abs(mean) > SURE * stdev(more) / sqrt(len(more))
        points.append(f"**{mean:+.1f}**" if sure else f"{mean:+.1f}")
    return f"{fmean(plain):.1f}; {'; '.join(points)}"
