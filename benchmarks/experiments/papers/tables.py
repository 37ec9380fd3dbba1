# SPDX-License-Identifier: Apache-2.0
"""Tables that compare published with measured numbers, for Markdown and HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from papers.outcomes import Measured
from papers.published import BUDGETS, UNPATCHED, Published, Row, published
from papers.sets import SETS
from papers.settings import Setting, settings

MARK = 1.0  # larger differences in points are bold
_EMPTY = ""
_TITLES = tuple(benchmark.title for benchmark in SETS.values())
_MEANS = ("mean of these, %", "average as printed, %")


@dataclass(frozen=True)
class Table:
    """A table. Cells are Markdown (`**bold**`, `` `code` ``), and `about` is a line above the table."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: str = ""


def comparison(measured: Mapping[str, Measured] | None = None) -> list[Table]:
    """Return all tables, with measured numbers from `measured` (setting -> benchmark -> number)."""
    measured = measured or {}
    published_ones = _with_published_numbers()
    others = list(dict.fromkeys(setting.method for setting in settings() if setting.method not in published_ones))
    return [*beside_published(measured), _alone(others, measured)]


def beside_published(measured: Mapping[str, Measured] | None = None) -> list[Table]:
    """Return the tables of the methods with published numbers."""
    return [_beside(published(), name, measured or {}) for name in _with_published_numbers()]


def _with_published_numbers() -> list[str]:
    return [name for name in dict.fromkeys(setting.method for setting in settings()) if published().get_rows(name)]


def _beside(data: Published, method: str, measured: Mapping[str, Measured]) -> Table:
    """Return a method's table: a line per benchmark, a column per source, and columns for measured numbers."""
    columns: list[tuple[str, list[str]]] = []
    for budget in (576,) if method == UNPATCHED else BUDGETS:
        rows = data.get_rows(method, budget)
        columns += [(f"{budget} [{row.source}]", _printed(row)) for row in rows]
        for setting in (setting for setting in settings() if (setting.method, setting.budget) == (method, budget)):
            suffix = (
                {"average": ", average", "cut": ", at the cut"}.get(setting.means, "") if len(_runs(method)) > 3 else ""
            )
            columns.append((f"{budget} yours{suffix}", _own(data, rows, setting, measured)))
    names = [*_TITLES, *_MEANS]
    header = ["", *(title for title, _ in columns)]
    lines = [[name, *(cells[index] for _, cells in columns)] for index, name in enumerate(names)]
    return Table(method, header, lines, _about(method, data))


def _runs(method: str) -> list[Setting]:
    return [setting for setting in settings() if setting.method == method]


def _about(method: str, data: Published) -> str:
    if method == UNPATCHED:
        return "Differences are in points, from the closest of the published numbers; of MME, in percent of its 2800."
    rows = data.get_rows(method)
    counts = "; ".join(f"[{name}] {_meaning(data, name, rows)}" for name in dict.fromkeys(row.source for row in rows))
    runs = "; ".join(
        f"{run.budget}{' at the cut' if run.means == 'cut' else ''}: keep={run.keep}" for run in _runs(method)
    )
    notes = [f"{row.note}" for row in rows if row.note]
    notes += [f"? {SETS[key].title} at {row.budget}: {reason}." for row in rows for key, reason in row.doubt.items()]
    return " ".join([f"Counted: {counts}. Yours: {runs}.", *notes])


def _meaning(data: Published, source: str, rows: Sequence[Row]) -> str:
    rows_of_source = [row for row in rows if row.source == source]
    exact = [f"{row.tokens} tokens" for row in rows_of_source if row.tokens]
    return ", ".join([*dict.fromkeys(data.means[row.means] for row in rows_of_source), *exact])


def _printed(row: Row) -> list[str]:
    # As printed: MME's totals have a decimal in some papers only.
    values = {key: f"{value:g}" if key == "mme" else f"{value:.1f}" for key, value in row.values.items()}
    cells = [f"{values[key]}{'?' if key in row.doubt else ''}" if key in values else _EMPTY for key in SETS]
    mean = _relative_mean(row.values, published().unpruned(row.source))
    average = _EMPTY if row.average is None else f"{row.average:.1f}{f' ({row.sets} sets)' if row.sets else ''}"
    return [*cells, _EMPTY if mean is None else f"{mean:.1f}", average]


def _own(data: Published, rows: Sequence[Row], setting: Setting, measured: Mapping[str, Measured]) -> list[str]:
    """Return the cells of a setting, empty where a measurement is missing."""
    measured_values, base = measured.get(setting.name, {}), measured.get(UNPATCHED, {})
    comparable = [row for row in rows if setting.means == "input" or row.means in (setting.means, "not stated")]
    cells = []
    for key in SETS:
        if key not in measured_values:
            cells.append(_EMPTY)
            continue
        gaps = [gap for row in comparable if (gap := _gap(data, key, row, measured_values, base)) is not None]
        if setting.method == UNPATCHED:
            gaps = sorted(gaps, key=abs)[:1]
        cells.append(_filled(_number(key, measured_values[key]), gaps))
    return [*cells, *_means(data, comparable, measured_values, base)]


def _means(data: Published, rows: Sequence[Row], measured_values: Measured, base: Measured) -> tuple[str, str]:
    mean, gaps = _relative_mean(measured_values, base), []
    if mean is None or measured_values is base:
        return _EMPTY if mean is None else f"{mean:.1f}", _EMPTY
    for row in rows:
        shared = [
            key for key in row.values if key in measured_values and key in base and key in data.unpruned(row.source)
        ]
        if shared:
            paper_mean = _relative_mean({key: row.values[key] for key in shared}, data.unpruned(row.source))
            gaps.append(_relative_mean({key: measured_values[key] for key in shared}, base) - paper_mean)
    printed = [mean - row.average for row in rows if row.average is not None]
    return _filled(f"{mean:.1f}", gaps), _filled(f"{mean:.1f}", printed) if printed else _EMPTY


def _gap(data: Published, key: str, row: Row, measured_values: Measured, base: Measured) -> float | None:
    """Return the difference in points between measured and published numbers.

    Percentages of the unpruned model are compared, because other splits and prompts affect them least. For the unpruned
    model, the numbers are compared.
    """
    if key not in row.values:
        return None
    if row.method == UNPATCHED:
        return (measured_values[key] - row.values[key]) / SETS[key].limit * 100
    paper_unpruned = data.unpruned(row.source)
    if key not in paper_unpruned or not base.get(key):
        return None
    return 100 * (measured_values[key] / base[key] - row.values[key] / paper_unpruned[key])


def _relative_mean(values: Mapping[str, float], base: Mapping[str, float]) -> float | None:
    """Return the percentage of the unpruned model, averaged over the table's benchmarks."""
    shared = [100 * values[key] / base[key] for key in SETS if key in values and base.get(key)]
    return fmean(shared) if shared else None


def _number(key: str, value: float) -> str:
    return f"{value:.0f}" if key == "mme" else f"{value:.1f}"


def _filled(value: str, gaps: Sequence[float]) -> str:
    if not gaps:
        return value
    gaps = [round(gap, 1) + 0.0 for gap in gaps]  # avoids "-0.0"
    text = f"{value} ({', '.join(f'{gap:+.1f}' for gap in gaps)})"
    return f"**{text}**" if any(abs(gap) > MARK for gap in gaps) else text


def _alone(methods: Sequence[str], measured: Mapping[str, Measured]) -> Table:
    """Return the table of methods without published numbers, with a line per setting."""
    base = measured.get(UNPATCHED, {})
    lines = []
    for setting in (setting for setting in settings() if setting.method in methods):
        measured_values = measured.get(setting.name, {})
        row = [_number(key, measured_values[key]) if key in measured_values else _EMPTY for key in SETS]
        mean = _relative_mean(measured_values, base)
        lines.append([f"`{setting.method}`", str(setting.budget), *row, _EMPTY if mean is None else f"{mean:.1f}"])
    header = ["yours", "tokens", *_TITLES, _MEANS[0]]
    return Table("Without published numbers", header, lines, "Papers print no numbers for these methods and budgets.")


def summary() -> Table:
    """Return the published averages of each method and budget, one row per source."""
    data = published()
    titles = {name: f"`{name}`" for name in _with_published_numbers() if name != UNPATCHED} | dict(data.others)
    lines = []
    for method, title in titles.items():
        for source in dict.fromkeys(row.source for row in data.get_rows(method)):
            by_budget = {row.budget: row for row in data.get_rows(method) if row.source == source}
            if any(row.average is not None for row in by_budget.values()):
                counts = "/".join(dict.fromkeys(row.means for row in by_budget.values()))
                cells = [_average(by_budget.get(budget)) for budget in BUDGETS]
                lines.append([title, f"[{source}]", counts, *cells])
    header = ["method", "source", "counts", *(f"{budget} tokens" for budget in BUDGETS)]
    return Table("Published averages", header, lines)


def _average(row: Row | None) -> str:
    """Return the printed average and, if known, its number of benchmarks."""
    if row is None or row.average is None:
        return _EMPTY
    return f"{row.average:.1f}{f' ({row.sets})' if row.sets else ''}"


def tasks() -> Table:
    """Return the task and the metrics of each benchmark."""
    lines = [
        [benchmark.title, f"`{benchmark.tasks[0]}`", " + ".join(f"`{metric}`" for metric in benchmark.metrics)]
        for benchmark in SETS.values()
    ]
    return Table("Benchmarks", ["", "task", "metric"], lines)


def sources() -> Table:
    """Return the papers, the versions used, and notes."""
    lines = [
        [
            f"[{name}]",
            f"[{source.arxiv}](https://arxiv.org/abs/{source.arxiv})",
            f"{source.version}, {source.table}",
            source.note,
        ]
        for name, source in published().sources.items()
    ]
    return Table("Sources", ["source", "arXiv", "version, table", "notes"], lines)


def to_markdown(table: Table, level: int = 3) -> str:
    lines = [f"{'#' * level} {table.title}", ""]
    if table.about:
        lines += [table.about, ""]
    lines += ["| " + " | ".join(table.header) + " |", "|---" * len(table.header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table.rows)])


def to_html(tables: Sequence[Table], title: str, notes: Sequence[str]) -> str:
    """Return a self-contained HTML page."""
    style = (
        "body{font:14px/1.5 sans-serif;margin:2em auto;max-width:75em;padding:0 1em}div{overflow-x:auto}"
        "table{border-collapse:collapse}"
        "td,th{border:1px solid #aaa;padding:.2em .6em;text-align:left;white-space:nowrap}"
        "td:last-child{white-space:normal;min-width:6em}"
    )
    parts = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{_inline(note)}</p>" for note in notes)]
    for table in tables:
        parts += [f"<h2>{_inline(table.title)}</h2>", f"<p>{_inline(table.about)}</p>" if table.about else ""]
        rows = [("th", table.header), *(("td", row) for row in table.rows)]
        body = "\n".join(f"<tr>{''.join(f'<{tag}>{_inline(cell)}</{tag}>' for cell in row)}</tr>" for tag, row in rows)
        parts.append(f"<div><table>\n{body}\n</table></div>")
    head = ['<!doctype html><html lang="en"><meta charset="utf-8">', f"<title>{html.escape(title)}</title>"]
    return "\n".join([*head, f"<style>{style}</style>", *filter(None, parts), "</html>\n"])


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    for pattern, tag in ((r"\*\*(.+?)\*\*", "b"), (r"\*(.+?)\*", "i"), (r"`(.+?)`", "code")):
        text = re.sub(pattern, rf"<{tag}>\1</{tag}>", text)
    return re.sub(r"\[([^\]]+)\]\((https?://[^)]+)\)", r'<a href="\2">\1</a>', text)
