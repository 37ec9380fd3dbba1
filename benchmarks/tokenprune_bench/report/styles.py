# SPDX-License-Identifier: Apache-2.0
"""The colour and marker of each method: the same in every plot, legend and table of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenprune_bench.report.plots import Style, baseline_style, method_style, run_style, whole_style
from tokenprune_bench.report.runs import Run
from tokenprune_bench.results import MARKS, UNPATCHED


@dataclass(frozen=True)
class Styles:
    """methods: the look of each method. runs: of each run (by its label), for plots of several."""

    methods: dict[str, Style]
    runs: dict[str, Style]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Styles:
        """Give each method of these runs a look, baselines first, then in the order in which they were run."""
        names = dict.fromkeys(row.method for run in runs for row in run.results.rows)
        styles = {UNPATCHED: whole_style("m-whole")}
        styles |= {name: baseline_style(index, f"m-base{index}") for index, name in enumerate(MARKS) if name in names}
        others = [name for name in names if name not in styles]
        styles |= {name: method_style(index, f"m{index}") for index, name in enumerate(others)}
        return cls(styles, {run.label: run_style(index, f"r{index}") for index, run in enumerate(runs)})

    def of_run(self, method: str, label: str) -> Style:
        """Return the look of a method in a plot of several runs: the colour tells the run, the marker the method."""
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
