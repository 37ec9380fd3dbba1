# SPDX-License-Identifier: Apache-2.0
"""Color and marker of each method, equal in all plots, legends and tables of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenprune_bench.report.plots import (
    Style,
    get_baseline_style,
    get_method_style,
    get_run_color,
    get_unpatched_style,
)
from tokenprune_bench.report.runs import Run
from tokenprune_bench.results import MARKS, UNPATCHED


@dataclass(frozen=True)
class Styles:
    """Styles of a page.

    Attributes:
        methods: Style of each method.
        runs: Style of each run by label, for plots of several runs.
    """

    methods: dict[str, Style]
    runs: dict[str, Style]

    @classmethod
    def from_runs(cls, runs: Sequence[Run]) -> Styles:
        """Assign a style to each method: unpatched, baselines, then methods in the order of the runs."""
        names = dict.fromkeys(row.method for run in runs for row in run.results.rows)
        styles = {UNPATCHED: get_unpatched_style("m-whole")}
        styles |= {
            name: get_baseline_style(index, f"m-base{index}") for index, name in enumerate(MARKS) if name in names
        }
        others = [name for name in names if name not in styles]
        styles |= {name: get_method_style(index, f"m{index}") for index, name in enumerate(others)}
        return cls(styles, {run.label: get_run_color(index, f"r{index}") for index, run in enumerate(runs)})

    def get_run_style(self, method: str, label: str) -> Style:
        """Return the style of a method in a plot of several runs: color of the run, marker of the method."""
        ours, run = self.methods[method], self.runs[label]
        return replace(ours, css=run.css, tags=f"{ours.tags} {run.tags}")

    def legend(self, run: Run) -> list[tuple[str, Style]]:
        """Return the methods of a run with their styles."""
        names = {row.method for row in run.results.rows}
        return [(name, look) for name, look in self.methods.items() if name in names]

    def joint_legend(self, runs: Sequence[Run]) -> list[tuple[str, Style]]:
        """Return the runs with their colours, and their methods with their markers."""
        names = {row.method for run in runs for row in run.results.rows}
        styles = [(name, replace(look, css="whole")) for name, look in self.methods.items() if name in names]
        return [*((f"{run.label}: {run.name}", self.runs[run.label]) for run in runs), *styles]
