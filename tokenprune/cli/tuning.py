# SPDX-License-Identifier: Apache-2.0
"""`tokenprune tune`: find the cheapest setting that keeps accuracy on the user's questions."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenprune.cli.common import (
    BatchSizeOption,
    ColumnsOption,
    DeviceOption,
    DtypeOption,
    FramesOption,
    MaxNewTokensOption,
    ModelOption,
    SkipBadOption,
    SplitOption,
    SuffixOption,
    ThreadsOption,
    get_console,
    load_subject,
    print_skipped,
    read_keeps,
    show_progress,
)
from tokenprune.errors import ConfigError, RunError

if TYPE_CHECKING:
    from tokenprune.tuning import Tuner, Tuning

ANSWERS = "answers.jsonl"
NOTHING = 1  # exit code: the search went well and found nothing


def tune(
    max_drop: Annotated[
        str, typer.Option(help="Points of the metric that may be lost: 1%, 1pt and 0.01 all are from 80 % to 79 %.")
    ] = "1%",
    confidence: Annotated[float, typer.Option(help="How sure it must be that no more is lost.")] = 0.95,
    target_ttft: Annotated[
        str | None,
        typer.Option(
            help="Time to the first token to be reached: 0.5x of unpatched, or 120ms; what is slower is left out."
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="What is made small: ttft (measured here), tokens, flops or kv, each against unpatched."),
    ] = "ttft",
    max_kind_drop: Annotated[
        str | None, typer.Option(help="The same as --max-drop for each kind of question, without a confidence.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names; default: all.")] = "",
    keep: Annotated[
        str, typer.Option(help="Comma-separated: shares such as 0.25, or whole numbers of tokens per image.")
    ] = "0.75,0.5,0.33,0.25,0.15",
    limit: Annotated[
        int, typer.Option(min=0, help="Held-out pictures, each with 8 questions; with --data: rows. 0: all.")
    ] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Your own questions, as for `bench`; default: those that ship, 8 kinds of them.")
    ] = None,
    metric: Annotated[str, typer.Option(help="exact, vqa, anls, relaxed or f1.")] = "exact",
    columns: ColumnsOption = "",
    split: SplitOption = None,
    skip_bad: SkipBadOption = False,
    frames: FramesOption = 8,
    out: Annotated[Path, typer.Option(help="The file to write, for patch(model, config=...) and vLLM.")] = Path(
        "tokenprune.json"
    ),
    run: Annotated[
        Path | None, typer.Option(help="Keep answers in this folder; the same command goes on there.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split of the questions into search and held-out.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of a setting.")] = 7,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the settings that were not tested, too.")] = False,
    batch_size: BatchSizeOption = 32,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    suffix: SuffixOption = None,
    max_new_tokens: MaxNewTokensOption = None,
) -> None:
    """Find the cheapest method and keep that lose less than --max-drop on your questions, and write tokenprune.json.

    Exit code 1: the search found nothing that keeps the promise, and no file is written.
    """
    from tokenprune.bench.data import check_questions, left_out, load_data, misfits, read_columns
    from tokenprune.bench.heldout import FOLDER, load_heldout
    from tokenprune.config import write_config
    from tokenprune.tuning import Panel, Promise, Tuner, grid
    from tokenprune.tuning.objective import check_objective
    from tokenprune.tuning.panel import tunable_metric
    from tokenprune.tuning.parts import check_enough
    from tokenprune.tuning.promise import read_share
    from tokenprune.tuning.report import tuned_config

    tunable_metric(metric)
    check_objective(objective)
    kind_drop = None if max_kind_drop is None else read_share(max_kind_drop, "--max-kind-drop")
    promise = Promise(read_share(max_drop), confidence, kind_drop, target_ttft)
    candidates = grid([name.strip() for name in methods.split(",") if name.strip()], read_keeps(keep))
    _check_folders(out, run)
    if data is None:
        questions = load_heldout(limit=limit or None)
        digest = hashlib.sha256((FOLDER / "questions.jsonl").read_bytes()).hexdigest()[:16]
        about: dict[str, Any] = {"name": "held-out set of tokenprune", "questions": len(questions), "digest": digest}
    else:
        read = load_data(
            data, skip_bad=skip_bad, columns=read_columns(columns), split=split, frames=frames, limit=limit
        )
        questions, about = read.questions, read.about()
    check_enough(len(questions), promise)
    subject = load_subject(model, device, threads, dtype, suffix)
    subject.max_new_tokens = max_new_tokens or subject.max_new_tokens
    if data is not None:
        if skip_bad:
            read = left_out(read, misfits(questions, subject.processor))
            questions, about = read.questions, read.about()
            print_skipped(read)
            check_enough(len(questions), promise)
        check_questions(questions, subject.processor)
    journal = None if run is None else run / ANSWERS
    # Other candidates or another seed would cut the questions into other chunks.
    told = about | {"candidates": [candidate.setting for candidate in candidates], "seed": seed}
    with (
        Panel(subject, questions, metric, batch_size=batch_size, journal=journal, about=told) as panel,
        show_progress(lines=False) as step,
    ):
        tuner = Tuner(panel, candidates, promise, seed=seed, repeats=repeats, objective=objective, step=step)
        _announce(tuner, len(candidates))
        tuning = tuner.run()
    _report(tuning, panel.metric.title, verbose)
    if tuning.choice is None:
        raise typer.Exit(NOTHING)
    write_config(out, tuned_config(tuning, panel, about))
    get_console().print(f'written: {out}; tokenprune.patch(model, config="{out}")', markup=False, soft_wrap=True)


def _check_folders(out: Path, run: Path | None) -> None:
    """Said before the work, not after it."""
    if not out.parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {out.parent}")
    if run is not None:
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write {run}: {error.strerror or error}") from error


def _announce(tuner: Tuner, settings: int) -> None:
    """Say how long it may take, once the first answers are there."""
    answers, seconds = tuner.estimate()
    took = "goes on where it stopped"
    if seconds is not None:
        took = f"about {seconds / 60:.0f} minutes" if seconds >= 90 else f"about {max(1, seconds):.0f} seconds"
    count = f"{len(tuner.search) + len(tuner.held_out)} questions"
    get_console(error=True).print(f"{settings} settings, {count}: at most {answers} answers, {took}", markup=False)


def _report(tuning: Tuning, metric: str, verbose: bool) -> None:
    from rich.text import Text

    from tokenprune.bench.tables import to_rich
    from tokenprune.tuning.report import others_table, outcome, tuning_table

    console = get_console()
    for place, line in enumerate(outcome(tuning, metric)):
        bad = line.startswith("warning") or (tuning.choice is None and not place)
        console.print(Text(line, style="bold red" if bad else "" if place else "bold green"), soft_wrap=True)
    for table in (tuning_table(tuning), *([others_table(tuning)] if verbose else [])):
        if table.rows:
            shown = to_rich(table)
            shown.columns[-1].justify = "left"
            console.print(shown)
            for note in table.notes:
                console.print(Text(note, style="dim"), soft_wrap=True)
    if not verbose and (rest := len(tuning.trials) - len(tuning.tested)):
        console.print(Text(f"{rest} more settings were not tested: --verbose says why.", style="dim"))
