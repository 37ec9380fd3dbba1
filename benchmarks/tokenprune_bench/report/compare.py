# SPDX-License-Identifier: Apache-2.0
"""Compare runs that asked the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report.runs import Run
from tokenprune_bench.results import UNPATCHED
from tokenprune_bench.tables import Cell, Table


def group_by_questions(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs by questions and metric, in the order of the runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(_build_group_key(run.results.header)), []).append(run)
    return list(groups.values())


def is_same_machine(runs: Sequence[Run]) -> bool:
    """Return True if the times of these runs can be compared."""
    machines = [run.results.header["environment"] for run in runs]
    return (
        len({tuple(str(env.get(name)) for name in ("device", "machine", "cores", "threads")) for env in machines}) == 1
    )


def build_comparisons(runs: Sequence[Run]) -> list[Table]:
    """Return a table for each group of at least two runs with the same questions."""
    return [
        _build_table(group)
        for group in group_by_questions(runs)
        if len(group) > 1 and not group[0].results.evidence_only
    ]


def _build_group_key(header: dict[str, Any]) -> tuple:
    # The digest covers questions, answers, kinds and files. Shipped questions have no digest, because every run asks a
    # prefix of the same list.
    digest = (header.get("data") or {}).get("digest")
    asked = header.get("metric", "exact"), header["kinds"], list(header["kind_of_question"])
    # At equal cost, a keep is averaged over layers. With a maximum per image, it is a share of that maximum.
    plan = header["plan"]
    keeps = bool(plan.get("equal_cost")), plan.get("max_visual_tokens")
    return digest, bool(header.get("evidence_only")), *keeps, *asked


def _build_table(runs: Sequence[Run]) -> Table:
    rows_by_run = {run.label: {(row.method, row.keep): row for row in run.results.rows} for run in runs}
    settings = dict.fromkeys(setting for rows in rows_by_run.values() for setting in rows)
    # Group the settings by method, in the order of the runs.
    methods = list(dict.fromkeys(method for method, _ in settings))
    rows = []
    for method, keep in sorted(settings, key=lambda setting: methods.index(setting[0])):
        cells = [Cell(method), Cell("" if method == UNPATCHED else f"{keep:g}")]
        for run in runs:
            row = rows_by_run[run.label].get((method, keep))
            against = row.differences.get(UNPATCHED) if row else None
            cells += [
                Cell(f"{100 * row.overall.value:.1f}" if row else ""),
                Cell(f"{100 * against.difference:+.1f}" if against else ""),
                Cell(f"{row.tokens_average:.0f}" if row else ""),
            ]
        rows.append(cells)
    title = METRICS[runs[0].results.header.get("metric", "exact")].title
    columns = tuple(text for run in runs for text in (f"{run.label}: {title}", "vs unpatched", "layer avg"))
    names = ", ".join(f"{run.label} = {run.model} ({run.name})" for run in runs)
    note = (
        f"{names}. Vs unpatched: points against the unpatched model of the same run. Layer avg: visual tokens, "
        "averaged over the decoder's layers. Runs are not tested against each other: see their own intervals."
    )
    labels = " and ".join([", ".join(run.label for run in runs[:-1]), runs[-1].label])
    keep = "target" if runs[0].results.equal_cost else "keep"
    return Table(f"{labels} on the same questions", ("method", keep, *columns), rows, (note,), grouped=True)
