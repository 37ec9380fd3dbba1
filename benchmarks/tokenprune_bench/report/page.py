# SPDX-License-Identifier: Apache-2.0
"""One page out of one or several runs, which loads nothing: style, script and images are inside.

A policy in its head forbids everything else, whatever stands in the names of models, methods and questions.
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
from tokenprune_bench.report.compare import comparisons, same_questions
from tokenprune_bench.report.layers import Layers, layer_plots
from tokenprune_bench.report.plots import Plot, Style
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.styles import Styles
from tokenprune_bench.report.verdict import RunVerdict, find_verdicts
from tokenprune_bench.report.warnings import RunWarning, find_warnings
from tokenprune_bench.results import UNPATCHED, Results
from tokenprune_bench.tables import Table, build_tables


@dataclass(frozen=True)
class RunSection:
    """The section of the page on one run. notes: about its plots. graded: True if answers have scores between right and
    wrong."""

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
    """Runs that asked the same questions. notes: what cannot be compared, and why."""

    runs: list[Run]
    legend: list[tuple[str, Style]]
    plots: list[Plot]
    notes: list[str]
    table: Table


def make_page(runs: Sequence[Run]) -> str:
    """Return the report as a whole HTML page; the same runs give the same page.

    Raises TokenPruneError without Jinja2.
    """
    styles = Styles.of(runs)
    groups = same_questions(runs)
    shared = [group for group in groups if len(group) > 1]
    made = zip(shared, comparisons(runs), strict=True)
    return filled(
        "page.html",
        parts=[_part(run, styles) for run in runs],
        joints=[
            Joint(group, styles.joint_legend(group), *fronts.joint_plots(group, styles), table) for group, table in made
        ],
        alone=[run for group in groups if len(group) == 1 for run in group] if len(runs) > 1 else [],
        styles=styles,
        version=tokenprune.__version__,
    )


def _part(run: Run, styles: Styles) -> RunSection:
    results = run.results
    config = {name: value for name, value in results.header.items() if name != "kind_of_question"}
    plots = [plot for plot in (fronts.against_tokens(run, styles), fronts.against_ttft(run, styles)) if plot]
    return RunSection(
        run=run,
        verdicts=find_verdicts(results),
        facts=_facts(results),
        warnings=find_warnings(results),
        plots=plots,
        notes=_notes(results),
        legend=styles.legend(run),
        tables=[_score_first(one) for one in build_tables(results)],
        layers=layer_plots(results, lambda method: styles.methods[method]),
        config=json.dumps(config, indent=1, ensure_ascii=False),
        graded=METRICS[results.header.get("metric", "exact")].graded,
    )


def _facts(results: Results) -> list[tuple[str, str]]:
    header, env, base = results.header, results.header["environment"], results.baseline
    data, threads = header.get("data"), env.get("threads")
    cores = f", {threads} thread{'s'[: threads != 1]}" if threads else ""
    weights = f", weights {env['weights']}" if env.get("weights") else ""
    facts = [
        ("Model", f"{env['model']}{weights}"),
        ("Questions", f"{base.questions} of {data['name'] if data else 'those that ship with tokenprune'}"),
        (f"Unpatched, {METRICS[header.get('metric', 'exact')].title}", f"{100 * base.overall.value:.1f}"),
        ("Device", f"{env['device']}, {env['dtype']}{cores}"),
        ("Date", str(header.get("date", "unknown"))),
        ("Versions", ", ".join(f"{one} {env[one]}" for one in ("tokenprune", "transformers", "torch") if one in env)),
    ]
    return [(name, value) for name, value in facts if value]


def _score_first(table: Table) -> Table:
    """Return the table with score and interval after method and keep, where a narrow screen shows them too."""
    if "95 % CI" not in table.columns:
        return table
    score = table.columns.index("95 % CI") - 1
    order = [0, 1, score, score + 1, *(at for at in range(2, len(table.columns)) if at not in (score, score + 1))]
    rows = [[row[at] for at in order] for row in table.rows]
    return replace(table, columns=tuple(table.columns[at] for at in order), rows=rows)


def _notes(results: Results) -> list[str]:
    rows = [row for row in results.rows if row.method != UNPATCHED]
    untimed = [f"{row.method} {row.keep:g}" for row in rows if row.ttft_ratio is None]
    if len(untimed) == len(rows):
        return ["No plot against time: this run took no times (--repeats 0)."]
    return [f"Not timed, and so not in the second plot: {', '.join(untimed)}."] if untimed else []


def filled(name: str, **values: Any) -> str:
    """Return a template with its values filled in. What the page may run and apply is named by its digest: no other
    script, no other style. Raises TokenPruneError without Jinja2."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise TokenPruneError("the report needs Jinja2: pip install tokenprune-bench") from error

    loader = PackageLoader("tokenprune_bench.report")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["code"] = _code
    env.globals["next_id"] = itertools.count(1).__next__
    style, script = (loader.get_source(env, name)[0] for name in ("style.css", "script.js"))
    page = env.get_template(name).render(
        style=Markup(style), script=Markup(script), style_digest=_digest(style), script_digest=_digest(script), **values
    )
    return page.encode("utf-8", "replace").decode()  # a name may hold half a character


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _code(text: str) -> Any:
    """`name` becomes code; everything is escaped."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
