# SPDX-License-Identifier: Apache-2.0
"""Helpers of commands that run a model: options, loading and progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenprune.cli.common import get_console, say

if TYPE_CHECKING:
    from pathlib import Path

    from tokenprune.cli.table import Table
    from tokenprune_bench.profiling.model import Model

WIDTH = 80  # columns of output without --details
_SILENCE = 30  # seconds between progress lines of a long step
QUESTION = "what is shown?"  # default question

DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda:1 ...; default: cuda if available.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads; default: torch's choice.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
MostOption = Annotated[
    int | None,
    typer.Option("--max-visual-tokens", min=1, help="Maximum visual tokens per image, before pruning."),
]
# Options of the commands that ask questions.
ColumnsOption = Annotated[
    str, typer.Option("--columns", help="Columns of --data to rename or drop: query=question,label=answers,id=")
]
SplitOption = Annotated[str | None, typer.Option("--split", help="Split of a `datasets` folder.")]
SkipBadOption = Annotated[bool, typer.Option("--skip-bad", help="Skip invalid rows of --data.")]
FramesOption = Annotated[int, typer.Option("--frames", min=1, help="Frames per video.")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Questions in a batch.")]
SuffixOption = Annotated[
    str | None,
    typer.Option(
        "--suffix", help="Added to every question; default: a request for a short answer, unless the model is ours."
    ),
]
BackendOption = Annotated[
    str, typer.Option("--backend", help="hf: transformers, in this process; vllm: vLLM with our plugin.")
]
ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="With --backend vllm: a server, http://host:8000/v1; default: vLLM in this process."),
]
EngineArgsOption = Annotated[
    str | None, typer.Option("--engine-args", help="With --backend vllm: arguments of vllm.LLM, as a JSON object.")
]
DetailsOption = Annotated[bool, typer.Option("--details", help="Print all tables and notes.")]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help="Length of an answer; default: 16, and 4 for our model."),
]


def print_one_table(table: Table) -> None:
    """Print a table without its notes, at most 80 columns wide. Cells of a wider table wrap."""
    from tokenprune.cli.table import split_table, to_rich

    console = get_console()
    width = min(console.width, WIDTH)
    fits = len(split_table(table, width)) == 1
    console.print(to_rich(table, width if fits else None), width=width)


@contextmanager
def resumable(run: Path | None) -> Iterator[None]:
    """Print on Ctrl+C that the same command continues, if the run has a folder."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise stop if run is None else KeyboardInterrupt("stopped; the same command goes on") from None


def load_model(
    model: str | None, device: str | None, threads: int | None, dtype: str = "auto", suffix: str | None = None
) -> Model:
    import torch
    from transformers.utils import logging

    from tokenprune_bench.profiling.model import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    if model is None:
        logging.disable_progress_bar()
    return load_model(model, device=device, dtype=dtype, suffix=suffix)


def print_skipped(data: Any) -> None:
    """Print the rows that --skip-bad skipped."""
    for line in data.skipped:
        say(f"skipped: {line}", error=True)


def print_notes(data: Any) -> None:
    """Print the notes on the user's questions."""
    for note in data.notes:
        say(f"note: {note}", error=True)


def print_limits(subject: Any) -> None:
    """Warn if a shipped model was not trained for the user's questions."""
    if said := getattr(subject, "describe_limits", str)():
        say(f"warning: {said}", error=True)


@contextmanager
def show_progress(lines: bool = True) -> Iterator[Any]:
    """Yield a progress function of (label, done, total).

    On a terminal it shows a bar. Otherwise it prints a line for each new label (if `lines`) and every 30 seconds.
    """
    from tokenprune_bench.profiling.pace import Pace

    console, pace = get_console(error=True), Pace()
    if not console.is_terminal:
        last_label, printed_at = "" if lines else None, pace.clock()

        def line(label: str, done: int, total: int) -> None:
            nonlocal last_label, printed_at
            left, now = pace.format_remaining(done, total), pace.clock()
            if (lines and label != last_label) or now - printed_at >= _SILENCE:
                last_label, printed_at = label, now
                console.print(f"{done:>5}/{total} {label}{left and f', {left}'}", markup=False)

        yield line
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description:<18}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[left]}"),
    )
    with bars.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", left="")
        yield lambda label, done, total: progress.update(
            task, description=label, completed=done, total=total, left=pace.format_remaining(done, total)
        )
