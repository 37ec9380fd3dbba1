# SPDX-License-Identifier: Apache-2.0
"""`tokenprune tune`: find the cheapest setting that keeps accuracy on the user's questions."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenprune.cli.common import METHODS_HELP, ModelOption, get_console, read_keeps, read_specs, say
from tokenprune.cli.completion import complete_methods
from tokenprune.cli.output import print_table
from tokenprune.errors import OptionError
from tokenprune.selection.files import check_output, check_output_folder
from tokenprune_bench.cli.common import (
    BackendOption,
    BatchSizeOption,
    ColumnsOption,
    DetailsOption,
    DeviceOption,
    DtypeOption,
    EngineArgsOption,
    FramesOption,
    MaxNewTokensOption,
    ServerOption,
    SkipBadOption,
    SplitOption,
    SuffixOption,
    ThreadsOption,
    print_limits,
    print_notes,
    print_one_table,
    print_skipped,
    resumable,
    show_progress,
)

if TYPE_CHECKING:
    from tokenprune_bench.group import Group
    from tokenprune_bench.tuning import Tuner, Tuning

NOTHING = 1  # exit code: the search found no setting


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
        typer.Option(help="What is made small, against unpatched: ttft, throughput (measured), tokens, flops or kv."),
    ] = "ttft",
    max_kind_drop: Annotated[
        str | None, typer.Option(help="The same as --max-drop for each kind of question, without a confidence.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help=f"{METHODS_HELP}; default: all but those for comparison (docs/methods).",
            autocompletion=complete_methods,
        ),
    ] = "",
    keep: Annotated[
        str, typer.Option(help="Comma-separated: shares such as 0.25, or whole numbers of tokens per image.")
    ] = "0.75,0.5,0.33,0.25,0.15",
    stacks: Annotated[
        int,
        typer.Option(min=0, help="Stacks of these methods at several sites that may be tried, too; 0: none."),
    ] = 16,
    limit: Annotated[int, typer.Option(min=0, help="Ask only the first N questions. 0: all.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Your own questions, as for `bench`; default: those that ship, 8 kinds of them.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="exact (default), ending (default of demo_smol), vqa, anls, relaxed or f1.")
    ] = None,
    columns: ColumnsOption = "",
    split: SplitOption = None,
    skip_bad: SkipBadOption = False,
    frames: FramesOption = 8,
    out: Annotated[Path, typer.Option(help="The file to write, for patch(model, config=...) and vLLM.")] = Path(
        "tokenprune.json"
    ),
    run: Annotated[
        Path | None, typer.Option(help="Folder for answers. The same command continues a stopped run.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split of the questions into search and held-out.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of a setting.")] = 7,
    details: DetailsOption = False,
    batch_size: BatchSizeOption = 32,
    backend: BackendOption = "hf",
    server: ServerOption = None,
    engine_args: EngineArgsOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    suffix: SuffixOption = None,
    max_new_tokens: MaxNewTokensOption = None,
) -> None:
    """Find the cheapest setting that keeps accuracy, and write tokenprune.json.

    Exit code 1: no setting keeps the promise, and no file is written.

    Several processes: accelerate launch --num_processes N -m tokenprune tune ...
    """
    from tokenprune.settings.saved import write_config
    from tokenprune_bench.backend import get_backend
    from tokenprune_bench.cli.engines import Engines
    from tokenprune_bench.data import drop_questions, load_data, read_columns
    from tokenprune_bench.demo_package import import_demo
    from tokenprune_bench.group import join_group
    from tokenprune_bench.run_folder import RunFolder, config_of
    from tokenprune_bench.tuning import Evaluator, Promise, Search, Tuner, build_grid
    from tokenprune_bench.tuning.evaluator import get_tunable_metric
    from tokenprune_bench.tuning.objective import check_objective
    from tokenprune_bench.tuning.promise import read_share
    from tokenprune_bench.tuning.question_split import check_question_count
    from tokenprune_bench.tuning.report import build_tuned_config

    engines = Engines(backend, server, engine_args, model, device, threads, dtype, suffix)
    engines.check()
    if metric is not None:
        get_tunable_metric(metric)
    check_objective(objective)
    if objective == "throughput" and backend != "hf":
        raise OptionError("--objective throughput is measured with the model in this process: use --backend hf")
    kind_drop = None if max_kind_drop is None else read_share(max_kind_drop, "--max-kind-drop")
    promise = Promise(read_share(max_drop), confidence, kind_drop, target_ttft)
    candidates = build_grid(read_specs(methods), read_keeps(keep))
    check_output(out)
    check_output_folder(run)
    if data is None:
        heldout = import_demo("heldout")
        folder = heldout.get_heldout_folder(model)
        questions = heldout.load_heldout(folder=folder)[: limit or None]
        digest = hashlib.sha256((folder / "questions.jsonl").read_bytes()).hexdigest()[:16]
        about: dict[str, Any] = {"name": "held-out set of tokenprune", "questions": len(questions), "digest": digest}
    else:
        read = load_data(
            data, skip_bad=skip_bad, columns=read_columns(columns), split=split, frames=frames, limit=limit
        )
        questions, about = read.questions, read.about()
    check_question_count(len(questions), promise)
    with resumable(run), ExitStack() as stack:
        subject = engines.open(stack, 1 if data is None else max(len(question.sources) for question in questions))
        subject.max_new_tokens = max_new_tokens or subject.max_new_tokens
        asked, metric = get_backend(subject), metric or subject.metric
        group = stack.enter_context(join_group())
        if data is not None and skip_bad:
            read = drop_questions(read, asked.find_misfits(questions))
            questions, about = read.questions, read.about()
            if group.is_leader:
                print_skipped(read)
            check_question_count(len(questions), promise)
        asked.begin(questions)  # raises for invalid questions before a folder is created
        if data is not None and group.is_leader:
            print_notes(read)
            print_limits(subject)
        folder = None
        if run is not None:
            search = Search([candidate.to_json() for candidate in candidates], seed, batch_size, stacks)
            folder = stack.enter_context(RunFolder(run, config_of(asked, search, metric, {"data": about}), group))
        evaluator = Evaluator(asked, questions, metric, batch_size=batch_size, folder=folder, group=group)
        step = stack.enter_context(show_progress(lines=False)) if group.is_leader else None
        tuner = Tuner(
            evaluator, candidates, promise, seed=seed, repeats=repeats, objective=objective, stacks=stacks, step=step
        )
        _announce(tuner, len(candidates), group)
        tuning = tuner.run()
    if group.is_leader:
        _report(tuning, evaluator.metric.title, details)
    if tuning.choice is None:
        raise typer.Exit(NOTHING)
    if group.is_leader:
        write_config(out, build_tuned_config(tuning, evaluator, about))
        get_console().print(f'written: {out}; tokenprune.patch(model, config="{out}")', markup=False, soft_wrap=True)


def _announce(tuner: Tuner, settings: int, group: Group) -> None:
    """Print an estimate of the duration after the first answers."""
    answers, seconds = tuner.estimate()
    if not group.is_leader:
        return
    took = "goes on where it stopped"
    if seconds is not None:
        took = f"about {seconds / 60:.0f} minutes" if seconds >= 90 else f"about {max(1, seconds):.0f} seconds"
    tried = f"{settings} settings" + (f" and up to {tuner.stacks} stacks" if tuner.stacks else "")
    count = f"{len(tuner.search) + len(tuner.held_out)} questions"
    get_console(error=True).print(f"{tried}, {count}: at most {answers} answers, {took}", markup=False)


def _report(tuning: Tuning, metric: str, details: bool) -> None:
    from tokenprune_bench.tuning import report

    lines = report.describe_outcome(tuning, metric)
    for index, line in enumerate(lines if details else report.shorten_outcome(lines)):
        is_bad = line.startswith("warning") or (tuning.choice is None and not index)
        say(line, "bold red" if is_bad else "" if index else "bold green")
    if not details:
        table = report.build_short_table(tuning)
        if table.rows:
            print_one_table(table)
        if num_untested := len(tuning.trials) - len(tuning.tested):
            say(f"{num_untested} more settings were not tested. --details prints the reasons.", "dim")
        return
    for table in (report.build_tuning_table(tuning), report.build_others_table(tuning)):
        if table.rows:
            print_table(table)
