# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: which of them asked the same questions, and a table of those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report.runs import Run
from tokenprune_bench.results import UNPATCHED
from tokenprune_bench.tables import Cell, Table


def same_questions(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups that asked the same questions and scored them alike, in the order of the runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(_asked(run.results.header)), []).append(run)
    return list(groups.values())


def same_machine(runs: Sequence[Run]) -> bool:
    """Return True if times of these runs can be compared."""
    machines = [run.results.header["environment"] for run in runs]
    return (
        len({tuple(str(one.get(name)) for name in ("device", "machine", "cores", "threads")) for one in machines}) == 1
    )


def comparisons(runs: Sequence[Run]) -> list[Table]:
    """Return a table for each group of at least two runs that asked the same questions."""
    return [_table(group) for group in same_questions(runs) if len(group) > 1 and not group[0].results.evidence_only]


def _asked(header: dict[str, Any]) -> tuple:
    # The digest is of questions, answers, kinds and files. The shipped questions have none: they are one list, of which
    # a run takes the first ones.
    digest = (header.get("data") or {}).get("digest")
    asked = header.get("metric", "exact"), header["kinds"], list(header["kind_of_question"])
    # At equal cost a keep is another thing than elsewhere.
    return digest, bool(header.get("evidence_only")), bool(header["plan"].get("equal_cost")), *asked


def _table(runs: Sequence[Run]) -> Table:
    found = {run.label: {(row.method, row.keep): row for row in run.results.rows} for run in runs}
    places = dict.fromkeys(place for rows in found.values() for place in rows)
    # Methods together, in the order of the first run that has them.
    methods = list(dict.fromkeys(method for method, _ in places))
    rows = []
    for method, keep in sorted(places, key=lambda place: methods.index(place[0])):
        cells = [Cell(method), Cell("" if method == UNPATCHED else f"{keep:g}")]
        for run in runs:
            row = found[run.label].get((method, keep))
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
