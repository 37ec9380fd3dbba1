# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of one or several runs.

A content security policy forbids all other scripts, styles and requests, because names of models, methods and questions
are untrusted.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenprune
from tokenprune.errors import TokenPruneError
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report import fronts
from tokenprune_bench.report.compare import build_comparisons, group_by_questions
from tokenprune_bench.report.layers import Layers, build_layer_plots
from tokenprune_bench.report.plots import Plot, Style
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.styles import Styles
from tokenprune_bench.report.verdict import RunVerdict, find_verdicts
from tokenprune_bench.report.warnings import RunWarning, find_warnings
from tokenprune_bench.results import UNPATCHED, Results
from tokenprune_bench.tables import Table, build_tables


@dataclass(frozen=True)
class RunSection:
    """Section of the page about one run.

    Attributes:
        run: The run.
        verdicts: Recommended settings.
        facts: Pairs of a name and a value.
        warnings: Warnings, the worst first.
        plots: Pareto plots.
        notes: Notes on the plots.
        legend: Methods with their styles.
        tables: All tables.
        layers: Plots of tokens per layer.
        config: Header of the run as JSON.
        graded: Whether scores can be between 0 and 1.
    """

    run: Run
    verdicts: list[RunVerdict]
    facts: list[tuple[str, str]]
    warnings: list[RunWarning]
    plots: list[Plot]
    notes: list[str]
    legend: list[tuple[str, Style]]
    tables: list[Table]
    layers: list[Layers]
    config: str
    graded: bool


@dataclass(frozen=True)
class Joint:
    """Section about runs with the same questions.

    Attributes:
        runs: The runs.
        legend: Runs and methods with their styles.
        plots: Pareto plots of all runs.
        notes: Comparisons that are not possible, with reasons.
        table: Scores of all runs.
    """

    runs: list[Run]
    legend: list[tuple[str, Style]]
    plots: list[Plot]
    notes: list[str]
    table: Table


def make_page(runs: Sequence[Run]) -> str:
    """Return the report as an HTML page. Equal runs give equal pages.

    Raises:
        TokenPruneError: If Jinja2 is not installed.
    """
    styles = Styles.from_runs(runs)
    groups = group_by_questions(runs)
    shared = [group for group in groups if len(group) > 1]
    sections = zip(shared, build_comparisons(runs), strict=True)
    return render_template(
        "page.html",
        parts=[_build_section(run, styles) for run in runs],
        joints=[
            Joint(group, styles.joint_legend(group), *fronts.build_joint_plots(group, styles), table)
            for group, table in sections
        ],
        alone=[run for group in groups if len(group) == 1 for run in group] if len(runs) > 1 else [],
        styles=styles,
        version=tokenprune.__version__,
    )


def _build_section(run: Run, styles: Styles) -> RunSection:
    results = run.results
    config = {name: value for name, value in results.header.items() if name != "kind_of_question"}
    plots = [plot for plot in (fronts.plot_against_tokens(run, styles), fronts.plot_against_ttft(run, styles)) if plot]
    return RunSection(
        run=run,
        verdicts=find_verdicts(results),
        facts=_list_facts(results),
        warnings=find_warnings(results),
        plots=plots,
        notes=_list_notes(results),
        legend=styles.legend(run),
        tables=[_score_first(table) for table in build_tables(results)],
        layers=build_layer_plots(results, lambda method: styles.methods[method]),
        config=json.dumps(config, indent=1, ensure_ascii=False),
        graded=METRICS[results.header.get("metric", "exact")].graded,
    )


def _list_facts(results: Results) -> list[tuple[str, str]]:
    header, env, base = results.header, results.header["environment"], results.baseline
    data, threads = header.get("data"), env.get("threads")
    cores = f", {threads} thread{'s'[: threads != 1]}" if threads else ""
    weights = f", weights {env['weights']}" if env.get("weights") else ""
    facts = [
        ("Model", f"{env['model']}{weights}"),
        ("Questions", f"{base.questions} of {data['name'] if data else 'the shipped questions'}"),
        (f"Unpatched, {METRICS[header.get('metric', 'exact')].title}", f"{100 * base.overall.value:.1f}"),
        ("Device", f"{env['device']}, {env['dtype']}{cores}"),
        ("Date", str(header.get("date", "unknown"))),
        (
            "Versions",
            ", ".join(f"{name} {env[name]}" for name in ("tokenprune", "transformers", "torch") if name in env),
        ),
    ]
    return [(name, value) for name, value in facts if value]


def _score_first(table: Table) -> Table:
    """Move score and interval behind method and keep, so that narrow screens show them."""
    if "95 % CI" not in table.columns:
        return table
    score = table.columns.index("95 % CI") - 1
    order = [
        0,
        1,
        score,
        score + 1,
        *(index for index in range(2, len(table.columns)) if index not in (score, score + 1)),
    ]
    rows = [[row[index] for index in order] for row in table.rows]
    return replace(table, columns=tuple(table.columns[index] for index in order), rows=rows)


def _list_notes(results: Results) -> list[str]:
    rows = [row for row in results.rows if row.method != UNPATCHED]
    untimed = [f"{row.method} {row.keep:g}" for row in rows if row.ttft_ratio is None]
    if len(untimed) == len(rows):
        return ["No plot against time: this run has no timing (--repeats 0)."]
    return [f"Without timing, and not in the second plot: {', '.join(untimed)}."] if untimed else []


def render_template(name: str, **values: Any) -> str:
    """Render a template. Its policy allows only the style and script with the given digests.

    Raises:
        TokenPruneError: If Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise TokenPruneError("The report needs Jinja2: pip install tokenprune-bench") from error

    loader = PackageLoader("tokenprune_bench.report")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["code"] = _mark_code
    env.globals["next_id"] = itertools.count(1).__next__
    style, script = (loader.get_source(env, name)[0] for name in ("style.css", "script.js"))
    page = env.get_template(name).render(
        style=Markup(style), script=Markup(script), style_digest=_digest(style), script_digest=_digest(script), **values
    )
    return page.encode("utf-8", "replace").decode()  # replaces lone surrogates in names


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _mark_code(text: str) -> Any:
    """Escape a text and mark `name` as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
