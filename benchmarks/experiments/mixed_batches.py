# SPDX-License-Identifier: Apache-2.0
"""Measure the savings of pruning in a batch of unequal prompts, on the shipped model.

    python experiments/mixed_batches.py                # writes benchmarks/results/<device>/mixed_batches.jsonl
    python benchmarks/experiments/mixed_batches.py --repeats 3 --json out.jsonl

The batch has prompts with images and one short prompt without an image, whose row is mostly padding. Time to first
token is of `generate` from pixels on; patched and unpatched runs take turns. Widths and bytes come from
`tokenprune.stats`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import Rows, add_options, code_version, header, results_path
from rich.console import Console
from rich.table import Table

import tokenprune
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.profiling.timing import compare_times
from tokenprune_demo.heldout import load_heldout

ROWS = 8
METHODS = ["pool", "divprune", "fastv"]
KEEP = 0.25


def batch(subject: Model, texts: int) -> dict[str, Any]:
    """Return the inputs of `ROWS` prompts. The last `texts` prompts have only text."""
    examples = load_heldout(limit=ROWS)[:ROWS]
    images: list[list[Any]] = [[example.image] if row < ROWS - texts else [] for row, example in enumerate(examples)]
    return subject.inputs(images, [example.question for example in examples])


def measure(subject: Model, method: str, texts: int, repeats: int) -> dict[str, Any]:
    patched = partial(tokenprune.patched, subject.model, method, keep=KEEP, guard="off")
    inputs = batch(subject, texts)
    timing = compare_times(subject, patched, lambda: inputs, repeats)
    with patched(), torch.no_grad():
        subject.model(**inputs)
        stats = tokenprune.stats(subject.model)
    names = "width_per_layer padding_share prefill_flops_ratio prefill_flops_ratio_tokens kv_bytes kv_bytes_full"
    values = {name: getattr(stats, name) for name in names.split()}
    return {"method": method, "keep": KEEP, "texts": texts, "length": inputs["input_ids"].shape[1], **values, **timing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/mixed_batches.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    subject = load_model()
    device = subject.model.device
    path = args.json or results_path(device, "mixed_batches")
    rows = Rows(path, header(device, rows=ROWS), args, code=code_version(), threads=args.threads, repeats=args.repeats)
    records = [
        record
        for texts in (0, 1)
        for method in args.methods
        for record in rows.measure((method, texts), partial(measure, subject, method, texts, args.repeats))
    ]

    table = Table(title=f"{ROWS} prompts, {KEEP:.0%} of the visual tokens kept: patched / unpatched")
    for column in ("method", "without an image", "width of the last layer", "TTFT, unpatched / patched", "KV bytes"):
        table.add_column(column)
    for record in records:
        speed_up = {name: 1 / value for name, value in record["ttft_ratio"].items()}
        table.add_row(
            record["method"], str(record["texts"]), f"{record['length']} -> {record['width_per_layer'][-1]}",
            f"{speed_up['p50']:.2f} ({speed_up['p80']:.2f} to {speed_up['p20']:.2f})",
            f"{record['kv_bytes'] / record['kv_bytes_full']:.0%}",
        )  # fmt: skip
    Console().print(table)
    Console().print(f"Wrote {path}")


if __name__ == "__main__":
    main()
