# SPDX-License-Identifier: Apache-2.0
"""The generated tables of accuracy, from raw files that `tokenprune bench --json` wrote; dev/readme.py writes them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
import all_methods  # noqa: E402
import rows  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
BENCH = RESULTS / "bench.jsonl"
VIDEOS = RESULTS / "bench_videos.jsonl"
FEW = RESULTS / "bench_videos_few.jsonl"
VIEWS = RESULTS / "bench_views.jsonl"
KINDS, CONTROLS = "Accuracy by kind of question", "Controls, which must fail"


def link(path: Path, up: str = "") -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"[{name}]({up}{name})"


def summary() -> str:
    """The benchmark of the first model in short: accuracy of each method at each keep, and how many tokens that is."""
    results = results_of(BENCH)
    keeps = sorted({row.keep for row in results.rows if row.site is not None}, reverse=True)
    by_place = {(row.method, row.keep): row for row in results.rows}
    lines = ["| method | " + " | ".join(f"keep {keep:g}" for keep in keeps) + " |", "|---" * (1 + len(keeps)) + "|"]
    for name in dict.fromkeys(row.method for row in results.rows if row.site is not None):
        rows = [by_place.get((name, keep)) for keep in keeps]
        lines.append(f"| `{name}` | " + " | ".join(map(_cell, rows)) + " |")
    base = results.baseline
    note = (
        f"Percent right of {base.questions} questions (unpatched {100 * base.overall.value:.1f}) @ visual tokens "
        f"averaged over the decoder's layers (unpatched {base.tokens_average:.0f}). ≤rnd, ≤down: not significantly "
        f"better than `random`, than `downsample`, at the same keep. ▼n: n of the {len(base.kinds)} kinds of questions "
        "fell by more than 20 points. Times, FLOPs, KV bytes, intervals and every kind: "
        f"`tokenprune report {BENCH.relative_to(ROOT).as_posix()}`. Raw data: {link(BENCH, '../')}."
    )
    return "\n\n".join(["![accuracy against visual tokens](images/bench.png)", "\n".join(lines), note])


def videos() -> str:
    """Accuracy on drawn videos, and what the unpatched model cannot know."""
    return _tables(VIDEOS, CONTROLS)


def few() -> str:
    """Accuracy on drawn videos where a tenth of the tokens is kept and less, the best first."""
    results, made = results_of(FEW), {}
    base, whole = results.baseline, results.baseline.tokens_average
    for row in results.rows:
        if row.site is not None:
            made.setdefault(row.method, {})[row.keep] = row
    keeps = sorted({keep for of in made.values() for keep in of}, reverse=True)
    marks = {keep: all_methods.marks_at(results, [*made], keep) for keep in keeps}
    order = sorted(made, key=lambda name: -sum(row.overall.value for row in made[name].values()) / len(made[name]))
    lines = ["| method | " + " | ".join(f"keep {keep:g}" for keep in keeps) + " |", "|---" * (1 + len(keeps)) + "|"]
    for name in order:
        cells = [_with_interval(made[name].get(keep), marks[keep].get(name, ()), keep * whole) for keep in keeps]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    note = (
        f"Percent right [95 % Wilson interval] of {base.questions} questions about {base.questions // len(base.kinds)} "
        f"videos (unpatched {100 * base.overall.value:.1f}); @ tokens averaged over the layers, of {whole:.0f}, where "
        f"they are not what `keep` says. ≤rnd/uni: not shown to beat `random`, `uniform` at the same keep (McNemar, "
        f"corrected for all methods). Raw data: {link(FEW, '../')}."
    )
    return "\n\n".join(["\n".join(lines), note])


def _with_interval(row: Any, marks: Any, asked: float) -> str:
    if row is None:
        return ""
    share, shown = row.overall, "/".join(mark for mark in marks if mark != "down")
    said = f"{100 * share.value:.1f} [{100 * share.low:.0f}–{100 * share.high:.0f}]"
    said += f" @{row.tokens_average:.0f}" if abs(row.tokens_average - asked) > 1 else ""
    return f"{said} ≤{shown}" if shown else said


def views() -> str:
    """Accuracy on prompts of several images, by kind of question."""
    return _tables(VIEWS, KINDS, CONTROLS, costs=False)


def plot() -> bytes:
    """Return the image of accuracy against tokens, a PNG."""
    from tokenprune_bench.report.png import plot_png

    return plot_png(results_of(BENCH))


def _tables(path: Path, *titles: str, costs: bool = True) -> str:
    """Return the table of costs (if asked for) and those of `titles`, without empty columns; the others are one command
    away."""
    from tokenprune_bench.tables import build_tables, to_markdown

    first, *others = build_tables(results_of(path))
    shown = [one for one in others if one.title in titles]
    parts = [to_markdown(_filled_columns(one)).strip() for one in ([first] * costs + shown)]
    name = path.relative_to(ROOT).as_posix()
    left = ["costs and accuracy overall"] * (not costs) + [f"*{one.title}*" for one in others if one not in shown]
    more = f"{', '.join(left)}: `tokenprune report {name}` prints them." if left else ""
    return "\n\n".join([*parts, f"{more} Raw data: {link(path, '../')}, written by `tokenprune bench --json`.".strip()])


def _filled_columns(table: Any) -> Any:
    """Return the table without the columns of which every cell is empty."""
    taken = [any(row[place].text for row in table.rows) for place in range(len(table.columns))]
    columns = tuple(compress(table.columns, taken))
    return replace(table, columns=columns, rows=[list(compress(row, taken)) for row in table.rows])


def _cell(row: Any) -> str:
    if row is None:
        return ""
    lost = sum(share.collapsed for share in row.kinds.values())
    marks = [*row.marks, *([f"▼{lost}"] if lost else [])]
    return f"{100 * row.overall.value:.1f} @{row.tokens_average:.0f} {' '.join(marks)}".strip()


def results_of(path: Path) -> Any:
    """Return the summary of a raw file, without the times that were taken under load: answers do not depend on it."""
    path = path.resolve()
    return _summary(path, path.stat().st_mtime_ns)


@cache
def _summary(path: Path, written: int) -> Any:
    """Many sentences read one file, and its intervals take seconds."""
    from tokenprune_bench.results import read_records, summarise

    return summarise([{**one, "timing": None} if rows.is_loaded(one) else one for one in read_records(path)])
