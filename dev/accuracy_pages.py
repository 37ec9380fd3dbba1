# SPDX-License-Identifier: Apache-2.0
"""Generated tables of accuracy, from raw files of `tokenprune bench --json`; dev/readme.py writes them."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "benchmarks" / "experiments")]
import all_methods  # noqa: E402
import rows  # noqa: E402
from tables import format_keeps, format_table  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
BENCH = RESULTS / "bench.jsonl"
VIDEOS = RESULTS / "bench_videos.jsonl"
FEW = RESULTS / "bench_videos_few.jsonl"
VIEWS = RESULTS / "bench_views.jsonl"
MIN_KEPT_POINTS = 60.0  # accuracy in percent at the largest keep, for a row in the table of few tokens
BASELINES = ("random", "uniform", "downsample")
VIEW_METHODS = ("random", "divprune", "view_select")


def link(path: Path, up: str = "") -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"[{name}]({up}{name})"


def _raw(path: Path) -> str:
    return f"[Raw data]({path.relative_to(ROOT).as_posix()})"


def _interval(share: Any) -> str:
    return f"{100 * share.value:.1f} [{100 * share.low:.0f}–{100 * share.high:.0f}]"


def summary() -> str:
    """Return accuracy and visual tokens of each method at each keep, for demo_vlm."""
    results = results_of(BENCH)
    shown = [row for row in results.rows if row.site is not None]
    keeps = sorted({row.keep for row in shown}, reverse=True)
    by_setting = {(row.method, row.keep): row for row in shown}
    lines = [
        [f"`{name}`", *(_accuracy_at_tokens(by_setting.get((name, keep))) for keep in keeps)]
        for name in dict.fromkeys(row.method for row in shown)
    ]
    base = results.baseline
    note = (
        f"Correct answers in %, of {base.questions} questions, @ visual tokens averaged over layers. Unpatched: "
        f"{100 * base.overall.value:.1f} @{base.tokens_average:.0f}. ≤rnd, ≤down: not significantly better than "
        f"`random` or `downsample`. ▼n: n of {len(base.kinds)} kinds of questions lose over 20 points. {_raw(BENCH)}; "
        f"print all columns with `tokenprune report {BENCH.relative_to(ROOT).as_posix()} --details`."
    )
    table = format_table(["method", *format_keeps(keeps)], lines)
    return "\n\n".join(["![Accuracy against visual tokens](docs/images/bench.png)", table, note])


def _accuracy_at_tokens(row: Any) -> str:
    if row is None:
        return ""
    num_lost = sum(share.collapsed for share in row.kinds.values())
    marks = [*row.marks, *([f"▼{num_lost}"] if num_lost else [])]
    return f"{100 * row.overall.value:.1f} @{row.tokens_average:.0f} {' '.join(marks)}".strip()


def videos() -> str:
    """Return accuracy on drawn videos, the best method first, and the controls."""
    results = results_of(VIDEOS)
    base, *pruned = results.rows
    lines = []
    for row in [base, *sorted(pruned, key=lambda row: -row.overall.value)]:
        name = "unpatched" if row is base else f"`{row.method}`"
        evidence = f"{100 * row.evidence['']:.0f}" if row.evidence and row is not base else ""
        mark = " ≤rnd" if "≤rnd" in row.marks else ""
        lines.append([name, f"{row.tokens_average:.0f}", evidence, f"{_interval(row.overall)}{mark}"])
    note = (
        f"demo_video, {base.questions} questions, keep 0.25 (`pevlm`: 1). ≤rnd: not significantly better than "
        f"`random`. {_raw(VIDEOS)}; print all tables with "
        f"`tokenprune report {VIDEOS.relative_to(ROOT).as_posix()} --details`."
    )
    return f"{format_table(['method', 'tokens per layer', 'evidence, %', 'correct, %'], lines, left=1)}\n\n{note}"


def few() -> str:
    """Return accuracy on drawn videos at small keeps, the best method first. Weak methods are left out."""
    results, by_method = results_of(FEW), {}
    base = results.baseline
    for row in results.rows:
        if row.site is not None:
            by_method.setdefault(row.method, {})[row.keep] = row
    keeps = sorted({keep for by_keep in by_method.values() for keep in by_keep}, reverse=True)
    marks = {keep: all_methods.marks_at(results, [*by_method], keep) for keep in keeps}
    means = {
        name: sum(row.overall.value for row in by_keep.values()) / len(by_keep) for name, by_keep in by_method.items()
    }
    shown = [
        name
        for name in sorted(means, key=lambda name: -means[name])
        if name in BASELINES[:2] or 100 * by_method[name][keeps[0]].overall.value >= MIN_KEPT_POINTS
    ]
    lines = [
        [f"`{name}`", *(_with_marks(by_method[name].get(keep), marks[keep].get(name, ())) for keep in keeps)]
        for name in shown
    ]
    note = (
        f"Correct answers in % [95 % interval], of {base.questions} questions about "
        f"{base.questions // len(base.kinds)} videos; unpatched {100 * base.overall.value:.1f}. ≤rnd, ≤uni: not shown "
        f"to beat `random`, `uniform` (McNemar, corrected for all methods). Methods below {MIN_KEPT_POINTS:g} % at "
        f"{keeps[0]:g} are not shown. {_raw(FEW)}."
    )
    return f"{format_table(['method', *format_keeps(keeps)], lines)}\n\n{note}"


def _with_marks(row: Any, marks: Any) -> str:
    if row is None:
        return ""
    shown = "/".join(mark for mark in marks if mark != "down")
    return f"{_interval(row.overall)} ≤{shown}" if shown else _interval(row.overall)


def views() -> str:
    """Return accuracy on prompts of several images, by kind of question."""
    results = results_of(VIEWS)
    lines = []
    for row in results.rows:
        is_base = row is results.baseline
        if is_base or row.method in VIEW_METHODS:
            name, keep = ("unpatched", "") if is_base else (f"`{row.method}`", f"{row.keep:g}")
            shares = [row.kinds[kind] for kind in results.kinds]
            cells = [f"{100 * share.value:.0f} [{100 * share.low:.0f}–{100 * share.high:.0f}]" for share in shares]
            lines.append([name, keep, *cells])
    note = f"demo_qwen. Correct answers in % [95 % interval] by kind of question. {_raw(VIEWS)}."
    return f"{format_table(['method', 'keep', *results.kinds], lines, left=1)}\n\n{note}"


def plot() -> bytes:
    """Return a PNG of accuracy against tokens."""
    from tokenprune_bench.report.png import plot_png

    return plot_png(results_of(BENCH))


def results_of(path: Path) -> Any:
    """Return the summary of a raw file, without times measured on a busy machine."""
    path = path.resolve()
    return _summary(path, path.stat().st_mtime_ns)


@cache
def _summary(path: Path, modified: int) -> Any:
    """Cache the summary per file version: the intervals take seconds."""
    from tokenprune_bench.results import read_records, summarise

    records = read_records(path)
    return summarise([{**record, "timing": None} if rows.is_loaded(record) else record for record in records])
