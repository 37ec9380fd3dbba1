# SPDX-License-Identifier: Apache-2.0
"""Summary of a run for one screen: a table of at most `MAX_ROWS` rows and at most three sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenprune.cli.table import Cell, Table
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report.compare import group_by_questions
from tokenprune_bench.report.verdict import RunVerdict, find_verdicts
from tokenprune_bench.report.warnings import Level, find_warnings
from tokenprune_bench.results import MARKS, UNPATCHED, Results, Row
from tokenprune_bench.tables import describe_limit

if TYPE_CHECKING:
    from tokenprune_bench.report.runs import Run

MAX_ROWS, MIN_ROWS = 12, 4  # of a table; several tables share the rows of a screen


def summarize(runs: Sequence[Run]) -> Iterator[tuple[Table, list[str]]]:
    """Yield a table and at most three lines per group of runs with the same questions."""
    groups = group_by_questions(runs)
    max_rows = max(MIN_ROWS, MAX_ROWS // len(groups))
    for group in groups:
        if len(group) > 1 and not group[0].results.evidence_only:
            yield _compare(group, max_rows), _describe_comparison(group, max_rows)
            continue
        for run in group:
            lines = [f"{run.label} = {run.name}"] if run.label else []
            yield build_summary_table(run.results, max_rows), [*lines, *describe_summary(run.results, max_rows)]


def build_summary_table(results: Results, max_rows: int = MAX_ROWS) -> Table:
    """Return a table of tokens, score, time to first token and KV cache per setting, without notes."""
    header = results.header
    unpatched_ms = results.unpatched_ms("ttft")
    title = f"{header['environment']['model']}: {results.baseline.questions} questions{describe_limit(results)}"
    keep_name = "target" if results.equal_cost else "keep"
    if results.evidence_only:
        columns = ("method", keep_name, "visual tokens", "prefill FLOPs", "evidence kept")
    else:
        score = METRICS[header.get("metric", "exact")].title
        columns = ("method", keep_name, "visual\ntokens", f"{score}\n[95 % CI]", "TTFT,\nms", "KV\ncache")
    rows = []
    for row in _select_rows(results, max_rows):
        # A stack's text also gives the total share, which the column of visual tokens shows.
        keep = "" if row.method == UNPATCHED else row.keep_text.partition(" each")[0]
        cells = [row.method, keep, f"{row.tokens_in:.0f} → {row.tokens_out:.0f}"]
        if results.evidence_only:
            flops = row.stats["prefill_flops_ratio"]
            cells += [
                "" if flops is None else f"{flops:.0%}",
                f"{100 * row.evidence['']:.0f} %" if row.evidence else "",
            ]
        else:
            cells += [_format_score(row)]
            cells += [_format_ttft(row, unpatched_ms), _format_cache(row)]
        rows.append([*map(Cell, cells)])
    return Table(title, columns, rows)


def describe_summary(results: Results, max_rows: int = MAX_ROWS) -> list[str]:
    """Return at most three lines: the best setting for each allowed loss, then skipped methods and warnings."""
    sentences = [verdict.summary for verdict in _find_distinct_verdicts(results)]
    warnings = [warning for warning in find_warnings(results) if warning.level is not Level.NOTE]
    pointer = _point_to_details(len(results.rows) - len(_select_rows(results, max_rows)))
    if results.skipped:
        methods = list(dict.fromkeys(record["method"] for record in results.skipped))
        others = f" and {len(methods) - 3} more" if methods[3:] else ""
        pointer = f"Skipped: {', '.join(methods[:3])}{others}. {pointer}"
    if warnings:
        more = f" (and {len(warnings) - 1} more)" if warnings[1:] else ""
        pointer = f"Warning: {warnings[0].title}{more}. {pointer}"
    return [*sentences, pointer]


def _compare(runs: Sequence[Run], max_rows: int) -> Table:
    """Return a table of the score of each setting in each run, without notes."""
    first = runs[0].results
    rows_by_run = [{(row.method, row.keep): row for row in run.results.rows} for run in runs]
    settings = _list_settings(runs)[:max_rows]
    rows = []
    for method, keep in settings:
        cells = [method, "" if method == UNPATCHED else f"{keep:g}"]
        for by_setting in rows_by_run:
            row = by_setting.get((method, keep))
            cells.append(_format_score(row) if row else "")
        rows.append([*map(Cell, cells)])
    score = METRICS[first.header.get("metric", "exact")].title
    title = f"{score} [95 % CI], {first.baseline.questions} questions"
    return Table(title, ("method", "target" if first.equal_cost else "keep", *(run.label for run in runs)), rows)


def _describe_comparison(runs: Sequence[Run], max_rows: int) -> list[str]:
    """Return a line that names the runs, and one about hidden rows and `--details`."""
    hidden = len(_list_settings(runs)) - max_rows
    return [", ".join(f"{run.label} = {run.model} ({run.name})" for run in runs), _point_to_details(hidden)]


def _list_settings(runs: Sequence[Run]) -> list[tuple[str, float]]:
    """Return the settings of all runs: first the settings of each run's summary, then all others."""
    selected = [row for run in runs for row in _select_rows(run.results, MAX_ROWS)]
    others = [row for run in runs for row in run.results.rows]
    return list(dict.fromkeys((row.method, row.keep) for row in [*selected, *others]))


def _point_to_details(hidden: int) -> str:
    if hidden <= 0:
        return "Pass --details for all tables and notes."
    return f"{hidden} more row{'s'[: hidden > 1]}: pass --details for all tables and notes."


def _format_score(row: Row) -> str:
    share = row.overall
    return f"{100 * share.value:.1f} [{100 * share.low:.0f}–{100 * share.high:.0f}]"


def _find_distinct_verdicts(results: Results) -> list[RunVerdict]:
    """Return the verdicts, or the stronger one if both name the same setting or none."""
    verdicts = find_verdicts(results)
    if len(verdicts) == 2 and verdicts[0].row is verdicts[1].row:
        return verdicts[1:] if verdicts[0].row is None else verdicts[:1]
    return verdicts


def _select_rows(results: Results, max_rows: int) -> list[Row]:
    """Return at most `max_rows` rows: unpatched, the recommended settings, then rows of each keep in turn.

    The rows of a keep start with the best method and the best baseline.
    """
    if len(results.rows) <= max_rows:
        return list(results.rows)
    recommended = [verdict.row for verdict in find_verdicts(results) if verdict.row is not None]
    by_keep: dict[str, list[Row]] = {}
    for row in results.rows:
        if row.method != UNPATCHED:
            by_keep.setdefault(row.keep_text, []).append(row)
    ranked = []
    for rows in by_keep.values():
        ordered = sorted(rows, key=lambda row: (-row.overall.value, row.tokens_average))
        baselines = [row for row in ordered if row.method in MARKS]
        methods = [row for row in ordered if row.method not in MARKS]
        ranked += list(enumerate([*methods[:1], *baselines[:1], *methods[1:], *baselines[1:]]))
    others = [row for _, row in sorted(ranked, key=lambda pair: pair[0])]
    selected = dict.fromkeys(map(id, [results.baseline, *recommended, *others]))
    chosen = set(list(selected)[:max_rows])
    return [row for row in results.rows if id(row) in chosen]


def _format_ttft(row: Row, unpatched_ms: float | None) -> str:
    if unpatched_ms is None:
        return ""
    if row.method == UNPATCHED:
        return f"{unpatched_ms:.4g}"
    return "" if row.ttft_ratio is None else f"{row.ttft_ratio * unpatched_ms:.4g}"


def _format_cache(row: Row) -> str:
    used, unpruned = row.stats["kv_bytes"], row.stats["kv_bytes_full"]
    return f"{used / unpruned:.0%}" if unpruned else ""


__all__ = ["MAX_ROWS", "build_summary_table", "describe_summary", "summarize"]
