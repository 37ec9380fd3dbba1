# SPDX-License-Identifier: Apache-2.0
"""`tokenprune demo`: a few held-out questions before and after pruning."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from tokenprune.cli.table import Cell, Table
from tokenprune.errors import require
from tokenprune.statistics import Stats
from tokenprune_bench.profiling.cost import build_cost_record, get_batch_cost
from tokenprune_bench.profiling.machine_load import format_busy_note, get_machine_load
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import UNPATCHED, patched

KEEP = 0.25
# All keep the same number of tokens in every decoder layer, so their answers are compared at equal cost. README.md
# recommends the first two; the last is the baseline.
METHODS = ("divprune", "pool", "random")
KINDS = ("colour", "count", "word", "grounding")
REPEATS = 3


def run(subject: Model, step: Callable[[str, int, int], None] = lambda label, done, total: None) -> list[Table]:
    """Return a table of answers and a table of costs.

    Args:
        subject: The model.
        step: Progress callback with a label, the number of finished runs, and their total.
    """
    load_heldout = require("tokenprune_demo.heldout", "held-out questions").load_heldout
    asked = load_heldout(kinds=KINDS, limit=len(KINDS), folder=subject.heldout)
    examples = [next(e for e in asked if e.index == index and e.kind == kind) for index, kind in enumerate(KINDS)]
    inputs = subject.inputs([e.image for e in examples], [e.question for e in examples])
    names = (UNPATCHED, *METHODS)
    answers: dict[str, list[str]] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, Stats] = {}
    for repeat in range(REPEATS + 1):
        for index_of_method, name in enumerate(names):
            step(name, repeat * len(names) + index_of_method, (REPEATS + 1) * len(names))
            with patched(subject, name, KEEP):
                begin = time.perf_counter()
                answers[name] = subject.generate(inputs)
                # The first run is a warm-up.
                if repeat:
                    times[name].append(time.perf_counter() - begin)
                else:
                    costs[name] = get_batch_cost(subject, inputs, 0 if name == UNPATCHED else None)

    rows = []
    for index, example in enumerate(examples):
        cells = [
            Cell(answers[name][index], bad=not example.is_right(answers[name][index].rstrip("."))) for name in names
        ]
        rows.append([Cell(example.question), Cell(example.answer), *cells])
    titles = [name if name == UNPATCHED else f"{name} {KEEP}" for name in names]
    title = f"{subject.name}: answers (wrong ones in red)"
    first = Table(title, ("question", "gold", *titles), rows)

    rows = []
    unpatched_cost = costs[UNPATCHED]
    for name, title in zip(names, titles, strict=True):
        cost, median, n = build_cost_record(costs[name], unpatched_cost), statistics.median(times[name]), len(examples)
        rows.append([
            Cell(title),
            Cell(f"{cost['visual_tokens_out'] / n:.0f} of {cost['visual_tokens_in'] / n:.0f}"),
            Cell(f"{cost['visual_tokens_average'] / n:.0f}"),
            Cell(f"{cost['prefill_flops_ratio']:.0%}"),
            Cell(f"{1000 * median:.0f} ms ({statistics.median(times[UNPATCHED]) / median:.2f}x)"),
        ])  # fmt: skip
    same = (
        f"Every method keeps {KEEP:.0%} of the tokens in every layer, at equal cost except for the selection. "
        f"{len(examples)} questions are an example; a comparison of methods needs hundreds (README.md)."
    )
    note = f"Time: all {len(examples)} questions in one batch, vision tower included; median of {REPEATS}."
    columns = ("method", "visual tokens", "layer avg", "prefill FLOPs", "time")
    notes = [same, note, *filter(None, [format_busy_note(get_machine_load())])]
    return [first, Table("What they cost", columns, rows, tuple(notes))]
