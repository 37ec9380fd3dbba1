# SPDX-License-Identifier: Apache-2.0
"""`tokenprune report`: print runs of `tokenprune bench`, or write a plot or a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenprune.cli.common import get_console, say
from tokenprune.cli.output import print_table
from tokenprune.errors import OptionError
from tokenprune.selection.files import check_output
from tokenprune_bench.cli.common import DetailsOption, print_one_table

if TYPE_CHECKING:
    from tokenprune_bench.report.runs import Run
    from tokenprune_bench.tables import Table


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="What `tokenprune bench` wrote: folders of --run, files of --json.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write one page with everything, which loads nothing else.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all tables as Markdown.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the plot as PNG.")] = None,
    details: DetailsOption = False,
) -> None:
    """Write tables, plots and a page from the records of runs."""
    from tokenprune_bench.report.runs import read_runs

    if plot is not None and len(runs) > 1:
        raise OptionError("--plot draws one run: name one, or write a page of all with --html")
    check_output(html, plot)
    show_runs(read_runs(runs), html=html, plot=plot, markdown=markdown, details=details or markdown)


def show_runs(
    runs: Sequence[Run], html: Path | None, plot: Path | None, markdown: bool = False, details: bool = False
) -> None:
    """Print runs and write the requested files.

    Args:
        runs: Runs to print. Several runs are also compared.
        html: File for the page.
        plot: File for the plot of the first run.
        markdown: Print Markdown.
        details: Print all tables, warnings and verdicts. If False, print one table and at most three sentences per
            group of runs with the same questions.
    """
    from rich.text import Text

    from tokenprune_bench.report.compare import build_comparisons
    from tokenprune_bench.report.page import make_page
    from tokenprune_bench.report.png import plot_png, write
    from tokenprune_bench.report.summary import summarize
    from tokenprune_bench.report.verdict import find_verdicts
    from tokenprune_bench.report.warnings import format_warnings
    from tokenprune_bench.tables import build_tables

    console = get_console()
    for table, sentences in () if details else summarize(runs):
        print_one_table(table)
        for sentence in sentences:
            say(sentence, "bold")
    for run in runs if details else ():
        if run.label:
            title = f"{run.title} ({run.model})"
            console.print(Text(f"## {title}\n" if markdown else title, style="bold"), soft_wrap=True)
        for table in build_tables(run.results):
            _show(table, markdown)
        for line in format_warnings(run.results):
            console.print(Text(f"- {line}" if markdown else f"! {line}", style="yellow"), soft_wrap=markdown)
        for verdict in find_verdicts(run.results):
            console.print(Text(f"- {verdict.line}" if markdown else verdict.line, style="bold"), soft_wrap=markdown)
    for table in build_comparisons(runs) if details else ():
        _show(table, markdown)
    if html is not None:
        write(html, make_page(runs))
    if plot is not None:
        write(plot, plot_png(runs[0].results))
    for path in filter(None, (html, plot)):
        get_console(error=True).print(f"written: {path}", markup=False, soft_wrap=True)


def _show(table: Table, markdown: bool) -> None:
    from tokenprune_bench.tables import to_markdown

    if markdown:
        get_console().print(to_markdown(table), markup=False, soft_wrap=True)
    else:
        print_table(table)
