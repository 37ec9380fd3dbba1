# SPDX-License-Identifier: Apache-2.0
"""`tokenprune bench`: measure methods and print the results."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenprune.cli.common import METHODS_HELP, ModelOption, read_keeps, read_specs
from tokenprune.cli.completion import complete_methods
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
    print_skipped,
    resumable,
    show_progress,
)
from tokenprune_bench.cli.report import show_runs
from tokenprune_bench.demo_package import import_demo

if TYPE_CHECKING:
    from tokenprune_bench.backend import BenchBackend
    from tokenprune_bench.data import Data
    from tokenprune_bench.group import Group
    from tokenprune_bench.profiling.model import Model
    from tokenprune_bench.report.drawing import SampleRequest
    from tokenprune_bench.suite import BenchPlan
    from tokenprune_demo.drawn_sets import DrawnSet


def bench(
    model: ModelOption = None,
    methods: Annotated[
        str,
        typer.Option(
            help=f"{METHODS_HELP}; default: all. `random` and `downsample` always run.", autocompletion=complete_methods
        ),
    ] = "",
    keep: Annotated[
        str, typer.Option(help="Comma-separated: shares such as 0.25, or whole numbers of tokens per image.")
    ] = "0.5,0.25,0.11",
    equal_cost: Annotated[
        bool,
        typer.Option(
            "--equal-cost",
            help="Compare at equal cost: each --keep is a share of visual tokens averaged over the decoder's layers. "
            "Methods without such a setting are skipped.",
        ),
    ] = False,
    max_visual_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum visual tokens per image, before pruning. The row of `downsample` is then this limit alone.",
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Held-out images (videos, prompts, documents) with all their questions; default 24, of demo_smol 12; "
            "0: all.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Ask only the first N questions. 0: all.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your own questions: JSON lines of {image|images|video, question, answer|answers, kind?}, a folder "
            "with such a file, JSON, CSV, Parquet, or a folder of the `datasets` library."
        ),
    ] = None,
    set_: Annotated[
        str | None,
        typer.Option(
            "--set",
            help="Which of our own questions: images (default), videos (eight frames, eight kinds), small-videos (144 "
            "pixels a side; default of demo_video), views (six images a prompt), documents (pages, screens, charts), "
            "pages (a thousand tokens and more).",
        ),
    ] = None,
    evidence: Annotated[
        bool,
        typer.Option(
            "--evidence",
            help="Measure only the share of evidence that is kept, without answers. Shipped questions only.",
        ),
    ] = False,
    metric: Annotated[
        str | None,
        typer.Option(help="exact (default), ending (default of demo_smol), vqa, anls, relaxed, f1 or cider."),
    ] = None,
    columns: ColumnsOption = "",
    split: SplitOption = None,
    skip_bad: SkipBadOption = False,
    frames: FramesOption = 8,
    run: Annotated[
        Path | None,
        typer.Option(help="Folder for config, predictions and results. The same command continues a stopped run."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --run: number of questions to draw with kept tokens. Default: 4.",
        ),
    ] = None,
    sample: Annotated[str, typer.Option(help="With --run: indices of the questions to draw, such as 3,17.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write raw records as JSON lines, for `tokenprune report`.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page with everything.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot as PNG.")] = None,
    details: DetailsOption = False,
    repeats: Annotated[int, typer.Option(min=0, help="Timed runs per method and keep. 0: no timing.")] = 7,
    batch_size: BatchSizeOption = 32,
    backend: BackendOption = "hf",
    server: ServerOption = None,
    engine_args: EngineArgsOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    suffix: SuffixOption = None,
    max_new_tokens: MaxNewTokensOption = None,
) -> None:
    """Measure the accuracy and the cost of methods, with and without pruning.

    Several processes: accelerate launch --num_processes N -m tokenprune bench ...
    """
    from tokenprune_bench import significance
    from tokenprune_bench.backend import get_backend
    from tokenprune_bench.cli.engines import Engines
    from tokenprune_bench.data import drop_questions, load_data, read_columns
    from tokenprune_bench.demo_package import get_default_images, get_default_set
    from tokenprune_bench.group import join_group
    from tokenprune_bench.metrics import get_metric
    from tokenprune_bench.report.drawing import SampleRequest
    from tokenprune_bench.report.runs import finished_run
    from tokenprune_bench.suite import BenchPlan

    engines = Engines(backend, server, engine_args, model, device, threads, dtype, suffix)
    engines.check()
    significance.wilson(1, 2)  # raises before the run if scipy is missing
    set_ = set_ or ("images" if data is not None else get_default_set(model))
    check_set(set_, evidence, data, backend, html, plot, samples, sample)
    if data is not None and images is not None:
        raise OptionError("--images counts images of our own questions. With --data pass --limit, which counts rows.")
    request = SampleRequest.from_options(0 if evidence else samples, sample, run, is_local=backend == "hf")
    if metric is not None:
        get_metric(metric)
    planned = partial(
        BenchPlan,
        methods=tuple(read_specs(methods)),
        keeps=read_keeps(keep),
        # Each image has at least one question.
        images=(limit or get_default_images(model)) if images is None else images,
        limit=0 if data is not None else limit or 0,
        batch_size=batch_size,
        repeats=0 if evidence else repeats,
        equal_cost=equal_cost,
        max_visual_tokens=max_visual_tokens,
    )
    check_output(json, html, plot)
    check_output_folder(run)
    planned()  # raises for invalid options before anything is read
    asked: Data | DrawnSet | None = None
    if data is not None:
        asked = load_data(
            data,
            skip_bad=skip_bad,
            columns=read_columns(columns),
            split=split,
            frames=frames,
            limit=limit or 0,
        )
    elif set_ != "images":
        asked = import_demo("drawn_sets").draw_set(set_, planned().images).first(limit or 0)
    questions = [] if asked is None else asked.questions
    plan = planned(
        several=set_ == "views" or any(len(question.sources) > 1 for question in questions),
        videos=any(question.is_video for question in questions),
    )
    with resumable(run), ExitStack() as stack:
        max_images = max((len(question.sources) for question in asked.questions), default=1) if data is not None else 1
        subject = engines.open(stack, max_images)
        metric = metric or subject.metric
        subject.max_new_tokens = 1 if evidence else max_new_tokens or subject.max_new_tokens
        group = stack.enter_context(join_group())
        if data is not None and skip_bad:
            asked = drop_questions(asked, get_backend(subject).find_misfits(asked.questions))
            if group.is_leader:
                print_skipped(asked)
        records = _measure(subject, plan, asked, metric, run, json, group, request, evidence)
    if group.is_leader:
        show_runs([finished_run(records, run)], html=html, plot=plot, details=details)


def check_set(
    set_: str,
    evidence: bool,
    data: Path | None,
    backend: str,
    html: Path | None,
    plot: Path | None,
    samples: int | None,
    sample: str,
) -> None:
    """Raise OptionError for options that conflict with --set or --evidence."""
    if data is None:
        import_demo("heldout")  # raises before the model is loaded if the package is missing
    if set_ != "images" and set_ not in (sets := import_demo("drawn_sets").SETS):
        raise OptionError(f"--set {set_!r} is none of {', '.join(sets)}")
    if data is not None and (set_ != "images" or evidence):
        other = "--evidence" if evidence else f"--set {set_}"
        raise OptionError(f"{other} is of our own questions, whose evidence is known: leave out --data")
    if evidence and backend != "hf":
        raise OptionError("--evidence looks at the model in this process: leave out --backend")
    if evidence:
        for name, value in (("html", html), ("plot", plot), ("samples", samples or None), ("sample", sample or None)):
            if value is not None:
                raise OptionError(f"--{name} is about answers, and --evidence asks for none: leave one of them out")


def _measure(
    subject: Model | BenchBackend,
    plan: BenchPlan,
    asked: Data | DrawnSet | None,
    metric: str,
    run: Path | None,
    json: Path | None,
    group: Group,
    request: SampleRequest,
    evidence: bool,
) -> list[dict[str, Any]]:
    from tokenprune_bench.backend import get_backend
    from tokenprune_bench.data import Data
    from tokenprune_bench.json_lines import JsonLinesWriter
    from tokenprune_bench.report.drawing import draw_samples
    from tokenprune_bench.run_folder import RunFolder, config_of
    from tokenprune_bench.suite import Bench

    questions, about = None, {}
    if asked is not None:
        get_backend(subject).begin(asked.questions)  # raises for invalid questions before a folder is created
        if isinstance(asked, Data) and group.is_leader:
            print_notes(asked)
            print_limits(subject)
        questions, about = asked.questions if isinstance(asked, Data) else asked, {"data": asked.about()}
    records = []
    with ExitStack() as stack:
        step = stack.enter_context(show_progress()) if group.is_leader else None
        file = stack.enter_context(JsonLinesWriter(json)) if json is not None and group.is_leader else None
        folder = None
        if run is not None:
            config = config_of(subject, plan, metric, about | ({"evidence_only": True} if evidence else {}))
            folder = stack.enter_context(RunFolder(run, config, group))
        bench = Bench(
            subject,
            plan,
            step,
            questions=questions,
            metric=metric,
            about=about,
            evidence_only=evidence,
            folder=folder,
            group=group,
        )
        request.check(len(bench.examples))
        for record in bench.records():
            if file is not None:
                file.write(record)
            records.append(record)
        if run is not None and group.is_leader:
            draw_samples(run, subject, bench.examples, records, request, step)
    return records
