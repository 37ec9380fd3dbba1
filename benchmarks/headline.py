# SPDX-License-Identifier: Apache-2.0
"""The numbers that README, the site and the report quote: one model, and each setting's cost and accuracy side by side.

    python benchmarks/headline.py --methods divprune,scope --keeps 0.25,0.11    # then dev/readme.py

For the unpatched model and each setting: visual tokens, right answers on the whole held-out set with their interval,
the time to the first token with the vision tower (in turn with the unpatched model), KV bytes, and the most memory that
the prefill holds at once beyond the model. `random` and `downsample` stand beside every setting. On a loaded machine it
ends with what `rows.Load` says before anything is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import calm_threads  # noqa: F401
import typer
from common import Live
from rows import Load, write

from tokenprune.cli.common import ErrorGroup, get_console, read_keeps, show_progress
from tokenprune.profiling.model import Model, load
from tokenprune.profiling.patched import UNPATCHED, patched
from tokenprune.shapes.model_config import SHIPPED
from tokenprune_bench.suite import Bench, BenchPlan

OUT = Path(__file__).parent / "results/headline.jsonl"

app = typer.Typer(cls=ErrorGroup, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def peak(subject: Model, example: Any, method: str, keep: float) -> int:
    """Return the most bytes of tensors that the prefill of one question holds at once, the vision tower included."""
    with patched(subject, method, keep):
        inputs = subject.inputs([example.images], [example.question])  # a method may act on pixels
        with Live() as live:
            subject.generate(inputs, max_new_tokens=1)
    return live.bytes


@app.command()
def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(SHIPPED)}.")] = SHIPPED[-1],
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "divprune,scope",
    keeps: Annotated[str, typer.Option(help="Comma-separated shares.")] = "0.25,0.11",
    images: Annotated[int, typer.Option(min=0, help="Held-out images; 0: all.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 15,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    allow_load: Annotated[bool, typer.Option("--allow-load", help="Write marked rows of a loaded machine.")] = False,
    out: Annotated[Path, typer.Option()] = OUT,
) -> None:
    """Measure, and write the records."""
    import torch

    machine = Load(allow_load)
    torch.set_num_threads(threads)
    subject = load(model, device="cpu")
    names = tuple(name.strip() for name in methods.split(","))
    plan = BenchPlan(names, read_keeps(keeps), images=images, batch_size=batch_size, repeats=repeats)
    with show_progress() as step:
        bench = Bench(subject, plan, step)
        records = list(bench.records())
    for one in records:
        if one["record"] == "result":
            one["peak_bytes"] = peak(subject, bench.examples[0], one["method"], one["keep"])
            one |= machine.record()
    write(out, records)
    whole = next(one for one in records if one.get("method") == UNPATCHED)
    get_console(error=True).print(
        f"{out.name}: {len(records) - 1} rows, {whole['peak_bytes'] / 2**20:.0f} MiB unpatched"
    )


if __name__ == "__main__":
    app(prog_name="headline.py")
