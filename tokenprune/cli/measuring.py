# SPDX-License-Identifier: Apache-2.0
"""`tokenprune bench` and `report`: measure methods, and print what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenprune.cli.common import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    ThreadsOption,
    get_console,
    load_subject,
    read_keeps,
    show_progress,
)
from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from tokenprune.bench.results import Results


def bench(
    model: ModelOption = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated names; default: all. `random` and `downsample` always run.")
    ] = "",
    keep: Annotated[
        str, typer.Option(help="Comma-separated: shares such as 0.25, or whole numbers of tokens per image.")
    ] = "0.5,0.25,0.11",
    limit: Annotated[
        int, typer.Option(min=0, help="Held-out pictures, each with one question of all 8 kinds; 0: all 200.")
    ] = 24,
    json: Annotated[Path | None, typer.Option(help="Write raw records as JSON lines, for `tokenprune report`.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with tables and plot in one HTML file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot as PNG.")] = None,
    repeats: Annotated[int, typer.Option(min=0, help="Timed runs of each method and keep; 0: no timing.")] = 7,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions in a batch.")] = 32,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    suffix: Annotated[
        str | None,
        typer.Option(help="Added to every question; default: a request for a short answer, unless the model is ours."),
    ] = None,
) -> None:
    """Measure accuracy per kind of question, tokens, FLOPs, KV bytes and time of methods, against no pruning."""
    from tokenprune.bench import results, significance
    from tokenprune.bench.suite import Bench, Plan

    significance.wilson(1, 2)  # a missing scipy is said before the work, not after it
    plan = Plan(
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        keeps=read_keeps(keep),
        pictures=limit,
        batch_size=batch_size,
        repeats=repeats,
    )
    subject = load_subject(model, device, threads, dtype, suffix)
    records = []
    with show_progress() as step, _json_lines(json) as write_record:
        for record in Bench(subject, plan, step).records():
            write_record(record)
            records.append(record)
    _report(results.summarise(records), html=html, plot=plot)


def report(
    file: Annotated[Path, typer.Argument(help="What `tokenprune bench --json FILE` wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write a report with tables and plot in one HTML file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the plot as PNG.")] = None,
) -> None:
    """Make tables, plot and HTML from the raw records of an earlier run."""
    from tokenprune.bench.results import read_records, summarise

    _report(summarise(read_records(file)), html=html, plot=plot, markdown=markdown)


@contextmanager
def _json_lines(path: Path | None) -> Iterator[Any]:
    """Yield a function that writes a record, so that a run that is cut short leaves what it has."""
    if path is None:
        yield lambda record: None
        return
    import json

    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
    with file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()

        yield write


def _report(results: Results, html: Path | None, plot: Path | None, markdown: bool = False) -> None:
    from rich.text import Text

    from tokenprune.bench.plot import html_report, plot_png, write
    from tokenprune.bench.tables import tables, to_markdown, to_rich

    console = get_console()
    for table in tables(results):
        if markdown:
            console.print(to_markdown(table), markup=False, soft_wrap=True)
            continue
        console.print(to_rich(table))
        for note in table.notes:
            console.print(Text(note, style="dim"))
    for path, make in ((html, html_report), (plot, plot_png)):
        if path is not None:
            write(path, make(results))
            get_console(error=True).print(f"written: {path}", markup=False, soft_wrap=True)
