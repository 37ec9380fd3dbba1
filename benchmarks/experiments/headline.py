# SPDX-License-Identifier: Apache-2.0
"""Measure the accuracy and cost of a few settings on one model. README, the site and the report quote these numbers.

    python experiments/headline.py ask --methods divprune,scope --keeps 0.25,0.11    # continues an existing file
    python benchmarks/experiments/headline.py time    # on an idle machine; then dev/readme.py

`ask` writes a row for the unpatched model and for each setting to results/headline.jsonl: right answers on the held-out
set with their interval, visual tokens and KV bytes. It adds `random` and `downsample` for comparison. `time` adds to
each row the time to first token including the vision tower, measured in turn with the unpatched model, and the peak
memory of a prefill beyond the model. On a loaded machine, it exits with the message of `rows.Load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import calm_threads  # noqa: F401
import typer
from all_methods import Rows
from common import Live
from rows import Load, read, write

from tokenprune.cli.common import ErrorGroup, get_console, read_keeps
from tokenprune.models.model_config import SHIPPED
from tokenprune.settings import Setting
from tokenprune_bench.backend import get_backend
from tokenprune_bench.cli.common import show_progress
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.profiling.patched import UNPATCHED, patched
from tokenprune_bench.suite import Bench, BenchPlan

OUT = Path(__file__).parents[1] / "results/headline.jsonl"

app = typer.Typer(
    cls=ErrorGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
Out = Annotated[Path, typer.Option(help="Results file.")]
Threads = Annotated[int, typer.Option(min=1)]


def peak(subject: Model, example: Any, method: str, keep: float) -> int:
    """Return the peak bytes of live tensors in the prefill of one question, including the vision tower."""
    with patched(subject, method, keep):
        inputs = subject.inputs([example.images], [example.question])  # inside the patch: a method may act on pixels
        with Live() as live:
            subject.generate(inputs, max_new_tokens=1)
    return live.bytes


@app.command()
def ask(
    model: Annotated[str, typer.Option(help=f"{', '.join(SHIPPED)}.")] = SHIPPED[-1],
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "divprune,scope",
    keeps: Annotated[str, typer.Option(help="Comma-separated shares.")] = "0.25,0.11",
    images: Annotated[int, typer.Option(min=0, help="Held-out images; 0: all.")] = 0,
    threads: Threads = 1,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    out: Out = OUT,
) -> None:
    """Ask the unpatched model and every setting. Skip rows that the file already has."""
    import torch

    torch.set_num_threads(threads)
    subject = load_model(model, device="cpu")
    names = tuple(name.strip() for name in methods.split(","))
    plan = BenchPlan(names, read_keeps(keeps), images=images, batch_size=batch_size, seeds=(0,), repeats=0)
    with show_progress() as step, Rows(out, Bench(subject, plan).header()) as rows:
        records = list(Bench(subject, plan, step, folder=rows).records())
    get_console(error=True).print(f"{out.name}: {len(records) - 1} rows")


@app.command("time")
def timed(
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 15,
    threads: Threads = 1,
    allow_load: Annotated[bool, typer.Option("--allow-load", help="Write and mark rows of a loaded machine.")] = False,
    out: Out = OUT,
) -> None:
    """Measure time and memory of every row again."""
    import torch

    machine = Load(allow_load)
    torch.set_num_threads(threads)
    header, records = read(out)
    subject = load_model(header["environment"]["model"].partition(" ")[0], device="cpu")
    example = Bench(subject, BenchPlan(("divprune",), images=1)).examples[0]
    for record in records:
        if record["record"] != "result":
            continue
        if record["method"] != UNPATCHED:
            setting = Setting.from_json({"method": record["method"], "keep": record["keep"]})
            record["timing"] = get_backend(subject).timing(setting, example, repeats)
        record["peak_bytes"] = peak(subject, example, record["method"], record["keep"])
        record |= machine.record() | {"threads": threads}
    write(out, [header, *records])
    get_console(error=True).print(f"{out.name}: {len(records)} rows timed")


if __name__ == "__main__":
    app(prog_name="headline.py")
