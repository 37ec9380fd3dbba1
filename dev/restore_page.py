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
    """Return the tables, one a model: % right with the chooser, and the points that either form adds to that."""
    about = (
        "Cells: correct answers in % with the chooser only; gain in points with `restore`; gain with `calibrate=True`. "
        "Bold if the 95 % interval excludes 0. By `python benchmarks/experiments/restore_gain.py`."
    )
    return "\n\n".join([about, *(_of(model, RESULTS / name) for model, name in FILES.items())])


def _of(model: str, path: Path) -> str:
    header, records = rows.read(path)
    found: Answers = {(one["chooser"], one["keep"], one["way"]): one for one in records}
    sets, whole = header["questions"], found["", 1.0, "unpatched"]
    pairs = {(chooser, keep) for chooser, keep, _ in found if all((chooser, keep, way) in found for way in WAYS)}
    choosers = list(dict.fromkeys(chooser for chooser, *_ in found if chooser))
    keeps = sorted({keep for _, keep in pairs}, reverse=True)

    def row(title: str, names: list[str], of: list[str]) -> list[str]:
        return [title, *(_cell(found, [one for one in names if (one, keep) in pairs], keep, of) for keep in keeps)]

    comparing = [one for one in choosers if one not in BASELINES]
    asked = ", ".join(f"{number} about {one} (unpatched {format_share(whole[one])} %)" for one, number in sets.items())
    lines = [row(f"`{one}`", [one], list(sets)) for one in choosers if one in SHOWN]
    lines += [row(f"mean of {len(comparing)} methods: {one}", comparing, [one]) for one in sets]
    table = format_table(["chooser", *(f"{keep:g}" for keep in keeps)], lines, left=1)
    return f"{model}, [questions](../../benchmarks/results/{path.name}): {asked}.\n\n{table}"


def _cell(found: Answers, choosers: list[str], keep: float, sets: list[str]) -> str:
    """Return what a table says of some choosers together; a question's gain is the mean of theirs."""
    if not choosers:
        return "-"

    def right(way: str) -> list[float]:
        said = ("".join(found[one, keep, way][name] for name in sets) for one in choosers)
        return [100 * fmean(map(int, of_question)) for of_question in zip(*said, strict=True)]

    plain, *others = map(right, WAYS)
    points = []
    for other in others:
        more = [after - before for before, after in zip(plain, other, strict=True)]
        mean = fmean(more)
        sure = abs(mean) > SURE * stdev(more) / sqrt(len(more))
        points.append(f"**{mean:+.1f}**" if sure else f"{mean:+.1f}")
    return f"{fmean(plain):.1f}; {'; '.join(points)}"
