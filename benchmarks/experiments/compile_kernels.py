# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for four GPUs at the shapes of real models. No GPU is needed.

    python benchmarks/experiments/compile_kernels.py              # all, into results/kernels.jsonl: dev/measure kernels
    python experiments/compile_kernels.py --worst 2    # per kernel, compare the 2 programs nearest to the limits
    python benchmarks/experiments/compile_kernels.py --list       # list the programs without compiling
    python experiments/compile_kernels.py --new        # compile programs without a record, keep the other records

A record describes one program: kernel, dtype, GPU, specialization, resources, and the first model that launches it.
Programs that several models share are compiled once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
import triton
from common import RESULTS, write
from gpu_targets import GPUS
from model_shapes import MODELS, Model
from offline_driver import OfflineDriver, Program, fresh_cache
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tokenprune.kernels.dispatch import list_operations

PATH = RESULTS / "kernels.jsonl"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TEXT, SHARE = 64, 9  # text tokens after the visual tokens; one of 9 visual tokens is kept
GRID = (2**31 - 1, 65535, 65535)
ROOM = {"registers": 1.1, "shared": 1.0, "size": 1.25}  # allowed growth over the committed record


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def calls(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (operation, function that calls its launcher) for each launch that the methods make for a model."""
    ops, long = list_operations(), torch.long
    decoder, tower = model.decoder, model.tower
    visual, num_kept = decoder.visual, decoder.visual // SHARE
    length = visual + TEXT

    def heads(num_heads: int, tokens: int, width: int, rows: int = 1) -> Tensor:
        return meta(rows, tokens, num_heads, width, dtype=dtype).transpose(1, 2)

    query = heads(decoder.heads, length, decoder.head_width)
    key = heads(decoder.kv_heads, length, decoder.head_width)
    rows_kernel, columns = ops["attention_rows"].triton, ops["attention_column_means"].triton
    options = dict(scaling=0.1)
    last, padding = meta(1, 1, dtype=long), meta(1, length, dtype=torch.bool)
    yield "attention_column_means", partial(columns, query, key, padding, **options)
    for index, mask in ((last, None), (last, padding), (meta(1, TEXT, dtype=long), None)):
        yield "attention_rows", partial(rows_kernel, query, key, index, mask, **options)
    # In the tower: attention of the class token, or the mean over all patches, per image.
    options |= dict(causal=False)
    if tower.packed:
        patches = heads(tower.heads, tower.tokens * tower.images, tower.head_width)
        starts = meta(tower.images + 1, dtype=torch.int32)
        yield "attention_column_means", partial(columns, patches, patches, None, None, starts, **options)
    else:
        patches = heads(tower.heads, tower.tokens, tower.head_width, tower.images)
        first = meta(tower.images, 1, dtype=long)
        yield "attention_rows", partial(rows_kernel, patches, patches, first, **options)
        yield "attention_column_means", partial(columns, patches, patches, **options)

    hidden, mask = meta(1, visual, decoder.width, dtype=dtype), meta(1, visual, dtype=torch.bool)
    match = ops["best_match"].triton
    chosen, allowed = meta(1, num_kept, decoder.width, dtype=dtype), meta(1, num_kept, dtype=torch.bool)
    groups = meta(1, visual, dtype=long), meta(1, num_kept, dtype=long)
    yield "best_match", partial(match, hidden, chosen, allowed, group_a=groups[0], group_b=groups[1])
    metric = meta(tower.images, tower.tokens, tower.head_width, dtype=dtype)
    yield "best_match", partial(match, metric[:, ::2], metric[:, 1::2])
    budget = meta(1, dtype=long)
    yield "farthest", partial(ops["farthest"].triton, hidden, mask, budget, 1)
    # Coverage and determinants compare all pairs of tokens in float32 for every dtype.
    similarity, vectors, factor = meta(1, visual, visual), meta(1, visual, decoder.width), meta(1, visual)
    yield "coverage_gain", partial(ops["coverage_gain"].triton, similarity, factor)
    for weights in (None, factor):
        yield "most_covering", partial(ops["most_covering"].triton, similarity, mask, budget, 1, weights)
    yield "greedy_dpp", partial(ops["greedy_dpp"].triton, vectors, vectors, mask, budget, 1)
    for pickers in (1, 8):
        score = meta(1, pickers, visual)
        yield "take_in_turn", partial(ops["take_in_turn"].triton, score, mask, meta(1, pickers, dtype=long), num_kept)
    dropped = meta(visual - num_kept, dtype=long)
    join = partial(
        ops["join"].triton,
        hidden[0],
        meta(num_kept, dtype=long),
        meta(num_kept),
        dropped,
        dropped,
        meta(visual - num_kept),
    )
    yield "join", join
    yield "join", partial(join, few=True)
    positions, weights = meta(1, visual, dtype=long), meta(1, visual)
    for weight in (None, weights):
        yield "destinations", partial(ops["destinations"].triton, positions, mask, positions, weight, length)
    yield "cosines", partial(ops["cosines"].triton, hidden, chosen[:, :8])
    score = meta(1, visual)
    for keys in ((), (score,), (positions, score), (mask, score)):
        yield "rank_in_group", partial(ops["rank_in_group"].triton, positions, *keys)
    best = meta(tower.images, (tower.tokens + 1) // 2)
    partner, counts = meta(*best.shape, dtype=long), [tower.tokens] * tower.images
    yield "as_sources", partial(ops["as_sources"].triton, best, partner, 1, None)
    dropped_counts = [tower.tokens // SHARE] * tower.images
    if ops["pairing"].accepts(best):
        yield "pairing", partial(ops["pairing"].triton, best, partner, dropped_counts, counts, 1)
        on_device = meta(tower.images, dtype=long), meta(tower.images, dtype=long)
        yield "pairing", partial(ops["pairing"].triton, best, partner, dropped_counts, counts, 1, on_device=on_device)
    yield "partition", partial(ops["partition"].triton, meta(1, length, dtype=torch.bool))
    index = meta(1, num_kept + TEXT, dtype=long)
    for x, dim in ((meta(1, length, decoder.width, dtype=dtype), 1), (meta(3, 1, length, dtype=long), 2)):
        yield "gather_tokens", partial(ops["gather_tokens"].triton, x, index, dim)


def describe(program: Program, model: str) -> dict[str, Any]:
    """Return the fields of a record that identify a program. `dtype` is the dtype of its tokens."""
    halves = {"*bf16": "bfloat16", "*fp16": "float16"}
    dtype = next((name for kind, name in halves.items() if kind in program.types), "float32")
    constants = {name: value for name, value in program.constants if name.isupper()}
    ones = [name for name, value in program.constants if not name.isupper()]
    return {
        "kernel": program.kernel, "gpu": program.gpu, "dtype": dtype, "warps": program.warps,
        "stages": program.stages, "constants": constants, "ones": ones, "divided": list(program.divided),
        "types": list(program.types), "model": model,
    }  # fmt: skip


def identity(record: dict[str, Any]) -> str:
    """Return a string that is equal for records of the same program."""
    fields = ("kernel", "gpu", "warps", "stages", "constants", "ones", "divided", "types")
    return json.dumps([record[field] for field in fields], sort_keys=True)


def programs(is_wanted: Callable[[Program], bool], gpus: list[str], dtypes: list[torch.dtype]) -> list[dict[str, Any]]:
    """Run all launches of all models and return one record per program, with its resources if it was compiled."""
    driver, first, grids = OfflineDriver(is_wanted), {}, {}
    for target, dtype, model in itertools.product(gpus, dtypes, MODELS):
        for _, call in calls(model, dtype):
            with driver.compiling(GPUS[target]) as launches:
                call()
            for program in driver.programs.keys() - first.keys():
                first[program] = model.name
            for launch in launches:
                grids.setdefault(launch.program, []).append(launch.grid)
    records = []
    for program, binary in driver.programs.items():
        record = describe(program, first[program])
        if binary is not None:
            share = GPUS[program.gpu].occupancy(binary.registers, binary.shared, program.warps)
            record |= dataclasses.asdict(binary) | {"occupancy": round(share, 3)}
            record["grid"] = [max(axis) for axis in zip(*grids[program], strict=True)]
        records.append(record)
    return sorted(records, key=identity)


def worst(records: list[dict[str, Any]], count: int) -> set[str]:
    """Return the identities of the `count` programs of each kernel nearest to their limits, on different GPUs."""
    chosen = set()
    for kernel in sorted({record["kernel"] for record in records}):
        of_kernel = [record for record in records if record["kernel"] == kernel]
        of_kernel.sort(
            key=lambda record: (
                -record["registers"] / (512 if record["gpu"].startswith("gfx") else 255),
                identity(record),
            )
        )
        by_gpu = {record["gpu"]: record for record in reversed(of_kernel)}  # the first of each GPU
        chosen |= {identity(record) for record in sorted(by_gpu.values(), key=of_kernel.index)[:count]}
    return chosen


def faults(record: dict[str, Any], budget: dict[str, Any] | None = None) -> list[str]:
    """Return the problems of a compiled program: spilled registers, shared memory, grid or warps over the limit.

    With a `budget` (the committed record of the program), also return resources that have grown too much.
    """
    gpu = GPUS[record["gpu"]]
    problems = []
    if record["spills"]:
        problems.append(f"spills {record['spills']} bytes of a thread")
    if record["shared"] > gpu.shared_block:
        problems.append(f"takes {record['shared']} bytes of shared memory of {gpu.shared_block}")
    if any(size > limit for size, limit in zip(record["grid"], GRID, strict=True)):
        problems.append(f"has a grid of {record['grid']}, of {list(GRID)}")
    if not record["occupancy"]:
        problems.append("does not fit on a multiprocessor")
    for resource in ("registers", "shared", "size") if budget else ():
        if record[resource] > ROOM[resource] * budget[resource]:
            problems.append(f"needs {record[resource]} {resource}, {budget[resource]} in the committed record")
    return [
        f"{record['kernel']} on {record['gpu']} ({record['dtype']}, {record['model']}) {problem}"
        for problem in problems
    ]


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PATH.read_text().splitlines()[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=list(GPUS), choices=GPUS)
    parser.add_argument("--dtypes", nargs="+", default=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
    parser.add_argument("--list", action="store_true", help="list the programs without compiling")
    parser.add_argument("--new", action="store_true", help="compile programs without a record and keep other records")
    parser.add_argument("--worst", type=int, help="compile only this number of programs per kernel, on different GPUs")
    parser.add_argument(
        "--json", type=Path, help=f"default: {PATH.relative_to(PATH.parents[2])}, unless --list or --worst"
    )
    args = parser.parse_args()
    dtypes = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in args.dtypes]
    chosen = worst(read(), args.worst) if args.worst else set()
    known = {identity(record): record for record in read()} if PATH.exists() else {}

    def is_wanted(program: Program) -> bool:
        key = identity(describe(program, ""))
        return not args.list and (not args.worst or key in chosen) and not (args.new and key in known)

    folder = None if "TRITON_CACHE_DIR" in os.environ else fresh_cache()
    records = programs(is_wanted, args.gpus, dtypes)
    if args.new:
        records = [record if "registers" in record else known[identity(record)] for record in records]
    print_table(records)
    if path := args.json or (None if args.list or args.worst else PATH):
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        models = [model.name for model in MODELS]
        first = {"triton": triton.__version__, "gpus": args.gpus, "dtypes": names, "models": models}
        write(path, [first, *records])
    problems = [
        fault for record in records if "registers" in record for fault in faults(record, known.get(identity(record)))
    ]
    del folder
    if problems:
        sys.exit("\n".join(problems))


def print_table(records: list[dict[str, Any]]) -> None:
    table = Table(title="Compiled kernels: maximum resources of their programs")
    columns = ("kernel", "GPU", "dtype", "programs", "registers", "spilled, B", "shared, KiB", "occupancy", "size, KiB")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right")
    for row in summary(records):
        table.add_row(*map(str, row))
    Console(width=130).print(table)


def summary(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return rows of kernel, GPU, dtype, number of programs, and the extremes of their resources.

    The extremes are maximum registers, spilled bytes, KiB of shared memory, minimum occupancy, and maximum KiB of code.
    """
    rows = []
    keys = sorted(
        {(record["kernel"].strip("_"), record["gpu"], record["dtype"]) for record in records if "registers" in record}
    )
    for key in keys:
        programs = [
            record for record in records if (record["kernel"].strip("_"), record["gpu"], record["dtype"]) == key
        ]
        programs = [record for record in programs if "registers" in record]
        maxima = {
            resource: max(record[resource] for record in programs)
            for resource in ("registers", "spills", "shared", "size")
        }
        rows.append(
            (*key, len(programs), maxima["registers"], maxima["spills"], round(maxima["shared"] / 1024, 1),
             f"{min(record['occupancy'] for record in programs):.0%}", round(maxima["size"] / 1024))
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
