# SPDX-License-Identifier: Apache-2.0
"""The command line. Nothing heavy is imported before a command needs it: `tokenprune --help` must answer at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from rich.console import Console

    from tokenprune.bench.model import Subject
    from tokenprune.bench.results import Results

_PIPED_WIDTH = 160


class _Group(TyperGroup):
    """Turns our own errors into one red line and exit code 2; other exceptions are bugs and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenPruneError as error:
            from rich.text import Text

            _console(error=True).print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Prune the visual tokens of vision-language models, and see what that costs.",
)

ModelOption = Annotated[
    str | None, typer.Option("--model", help="Directory or hub id; default: the small model in the package.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda:1 ...; default: cuda if there is one.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: torch's choice.")]


def _console(error: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=error, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=error, highlight=False, width=_PIPED_WIDTH)
    return console


def _load(
    model: str | None, device: str | None, threads: int | None, dtype: str = "auto", suffix: str | None = None
) -> Subject:
    import torch
    from transformers.utils import logging

    from tokenprune.bench.model import load

    if threads is not None:
        torch.set_num_threads(threads)
    if model is None:
        logging.disable_progress_bar()
    return load(model, device=device, dtype=dtype, suffix=suffix)


@app.command()
def methods() -> None:
    """List the methods that are registered."""
    import tokenprune
    from tokenprune.bench.tables import Cell, Table, to_rich

    def yes(value: bool) -> Cell:
        return Cell("yes" if value else "no")

    rows = []
    for name in tokenprune.available_methods():
        info = tokenprune.method_info(name)
        flags = [yes(info.query_aware), yes(info.prefix_cache_safe), yes(info.merges)]
        rows.append([Cell(name), Cell(info.site.name), *flags, Cell(info.paper), Cell(info.summary)])
    columns = ("method", "site", "query-aware", "prefix-cache-safe", "merges", "paper", "what it does")
    table = to_rich(Table("Methods", columns, rows))
    for column in table.columns[1:]:
        column.justify = "left"
    _console().print(table)


@app.command()
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
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
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
        keeps=_keeps(keep),
        pictures=limit,
        batch_size=batch_size,
        repeats=repeats,
    )
    subject = _load(model, device, threads, dtype, suffix)
    records = []
    with _progress() as step, _json_lines(json) as write_record:
        for record in Bench(subject, plan, step).records():
            write_record(record)
            records.append(record)
    _report(results.summarise(records), html=html, plot=plot)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="What `tokenprune bench --json FILE` wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write a report with tables and plot in one HTML file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the plot as PNG.")] = None,
) -> None:
    """Make tables, plot and HTML from the raw records of an earlier run."""
    from tokenprune.bench.results import read_records, summarise

    _report(summarise(read_records(file)), html=html, plot=plot, markdown=markdown)


@app.command()
def demo(model: ModelOption = None, device: DeviceOption = None, threads: ThreadsOption = None) -> None:
    """Ask four held-out questions before and after pruning."""
    from rich.text import Text

    from tokenprune.bench.demo import KEEP, run
    from tokenprune.bench.tables import to_rich

    subject = _load(model, device, threads)
    console = _console()
    for table in run(subject):
        console.print(to_rich(table))
        for note in table.notes:
            console.print(Text(note, style="dim"))
    console.print(f"Draw what a method keeps: tokenprune show IMAGE --method dart --keep {KEEP}")


@app.command()
def show(
    pictures: Annotated[
        list[Path], typer.Argument(help="A picture; or the frames of a video: a GIF, a folder, files.")
    ],
    method: Annotated[str, typer.Option(help="A name out of `tokenprune methods`.")] = "dart",
    keep: Annotated[str, typer.Option(help="Share of the visual tokens, or a whole number of them.")] = "0.25",
    question: Annotated[str, typer.Option(help="Some methods choose by it.")] = "what color is the circle?",
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("tokenprune.png"),
    frames: Annotated[int, typer.Option(min=1, help="Frames of a video to take, evenly chosen.")] = 8,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Draw which patches of a picture, or of frames, a method keeps (clear), drops (dark) and merges (one colour)."""
    from tokenprune.bench import draw, strip
    from tokenprune.registry import method_class

    method_class(method)
    (share,) = _keeps(keep, one=True)
    images = strip.read_frames(pictures, frames)
    subject = _load(model, device, threads, suffix="")
    if len(images) == 1:
        shown = draw.show(subject, images[0], question, method, share)
    else:
        shown = strip.show(subject, images, question, method, share)
    try:
        shown.image.save(out)
    except (OSError, ValueError) as error:
        raise TokenPruneError(f"cannot write {out}: {error}") from error
    console = _console()
    console.print(f"{question}  unpatched: {shown.before!r}  {method} {share:g}: {shown.after!r}", markup=False)
    average = shown.stats.visual_tokens_average
    counts = f"{shown.tokens_in} → {shown.tokens_out}"
    console.print(f"visual tokens: {counts}, {average:.0f} on average over the decoder's layers")
    console.print(f"written: {out}", markup=False, soft_wrap=True)


@app.command()
def calibrate(
    images: Annotated[Path, typer.Option(help="Folder of pictures like those that the model will see.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")] = Path("thresholds.safetensors"),
    keep: Annotated[str, typer.Option(help="Comma-separated shares of the patches to keep on average.")] = "0.25",
    schedule: Annotated[
        str, typer.Option(help="How many tokens each block merges: constant, linear or reverse_linear.")
    ] = "constant",
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures whose tokens compete with each other.")] = 32,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an interrupted run has done.")] = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Find the thresholds that `dymu` needs for a model, on unlabelled pictures."""
    import tokenprune

    keeps = list(_keeps(keep))
    subject = _load(model, device, threads, dtype, suffix="")
    with _progress() as step:
        found = tokenprune.calibrate(
            subject.model,
            images,
            processor=subject.processor,
            keep=keeps,
            schedule=schedule,
            batch_size=batch_size,
            progress=step,
            out=out,
            resume=not restart,
        )
    console = _console()
    for share in found.keeps:
        row = " ".join(f"{value:.3f}" for value in found.values[share].tolist())
        console.print(f"keep {share:g}: {row}", markup=False, soft_wrap=True)
    console.print(f"written: {out} (calibrated on {found.images} pictures)", markup=False, soft_wrap=True)


@app.command("fit-dyrate")
def fit_dyrate(
    out: Annotated[Path, typer.Option(help="The predictor file to write.")] = Path("predictor.safetensors"),
    images: Annotated[Path | None, typer.Option(help="Folder of pictures; default: drawn scenes.")] = None,
    question: Annotated[str, typer.Option(help="Asked about each picture of --images.")] = "Describe this picture.",
    limit: Annotated[int, typer.Option(min=1, help="How many pictures.")] = 24,
    keep: Annotated[float, typer.Option(help="Share that prefill keeps; use the same with dyrate.")] = 0.5,
    layer: Annotated[int, typer.Option(help="As in dyrate.")] = 3,
    grid: Annotated[int, typer.Option(min=1, help="As in dyrate.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 32,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Fit the predictor of `dyrate` to a model: how many visual tokens each step of an answer can do without."""
    from tokenprune.bench.fitting import fit

    subject = _load(model, device, threads, suffix="")
    options = dict(keep=keep, layer=layer, grid=grid, max_new_tokens=max_new_tokens)
    with _progress() as step:
        seen = fit(subject, out, images, question, limit, step, options)
    console = _console()
    console.print(f"{sum(seen.labels)} decode steps; right on {seen.accuracy:.1%} of them; steps a rate:")
    console.print(", ".join(f"{number / grid:g}: {count}" for number, count in enumerate(seen.labels)), markup=False)
    console.print(f"written: {out}", markup=False, soft_wrap=True)


def _keeps(text: str, one: bool = False) -> tuple[float | int, ...]:
    try:
        keeps = tuple(int(part) if part.strip().isdigit() else float(part) for part in text.split(",") if part.strip())
    except ValueError:
        keeps = ()
    if not keeps or (one and len(keeps) > 1):
        wanted = "one number" if one else "numbers with commas between them"
        hint = "a share such as 0.25, or a whole number of tokens per image"
        raise TokenPruneError(f"--keep {text!r} is not {wanted}: use {hint}")
    return keeps


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that takes (label, done, total): a bar on a terminal, else a line for each new label."""
    console = _console(error=True)
    if not console.is_terminal:
        last = [""]

        def line(label: str, done: int, total: int) -> None:
            if label != last[0]:
                last[0] = label
                console.print(f"{done:>5}/{total} {label}", markup=False)

        yield line
        return
    from rich import progress as bars

    times = (bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
    columns = (bars.TextColumn("{task.description:<18}"), bars.BarColumn(), bars.MofNCompleteColumn(), *times)
    with bars.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        yield lambda label, done, total: progress.update(task, description=label, completed=done, total=total)


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

    console = _console()
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
            _console(error=True).print(f"written: {path}", markup=False, soft_wrap=True)


def main() -> None:
    """Entry point of the `tokenprune` command."""
    app(prog_name="tokenprune")


if __name__ == "__main__":
    sys.exit(main())
