# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for four GPUs, at the shapes of real models, on a machine that needs no GPU.

    python benchmarks/experiments/compile_kernels.py              # all, into results/kernels.jsonl: dev/measure kernels
    python experiments/compile_kernels.py --worst 2    # of each kernel the 2 nearest to their limits, compared with it
    python benchmarks/experiments/compile_kernels.py --list       # compile nothing: which ones there are
    python experiments/compile_kernels.py --new        # those without a record, beside the records that there are

A record is one program: kernel, dtype, GPU, what it is specialised for, what it needs, and the first launch that asks
for it. Programs that several models share are compiled once.
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
TEXT, SHARE = 64, 9  # tokens of text behind the visual ones; one visual token of 9 stays
GRID = (2**31 - 1, 65535, 65535)
ROOM = {"registers": 1.1, "shared": 1.0, "size": 1.25}  # times what was committed; more needs a look


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def calls(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (operation, a call of its launcher) for all that methods ask of a model."""
    ops, long = list_operations(), torch.long
    decoder, tower = model.decoder, model.tower
    visual, stay = decoder.visual, decoder.visual // SHARE
    length = visual + TEXT

    def heads(number: int, tokens: int, width: int, rows: int = 1) -> Tensor:
        return meta(rows, tokens, number, width, dtype=dtype).transpose(1, 2)

    query = heads(decoder.heads, length, decoder.head_width)
    key = heads(decoder.kv_heads, length, decoder.head_width)
    seen, columns = ops["attention_rows"].triton, ops["attention_column_means"].triton
    options = dict(scaling=0.1)
    last, padding = meta(1, 1, dtype=long), meta(1, length, dtype=torch.bool)
    yield "attention_column_means", partial(columns, query, key, padding, **options)
    for index, mask in ((last, None), (last, padding), (meta(1, TEXT, dtype=long), None)):
        yield "attention_rows", partial(seen, query, key, index, mask, **options)
    # In the tower: what its class token attends to, or the mean over all patches, of each image for itself.
    options |= dict(causal=False)
    if tower.packed:
        patches = heads(tower.heads, tower.tokens * tower.images, tower.head_width)
        starts = meta(tower.images + 1, dtype=torch.int32)
        yield "attention_column_means", partial(columns, patches, patches, None, None, starts, **options)
    else:
        patches = heads(tower.heads, tower.tokens, tower.head_width, tower.images)
        first = meta(tower.images, 1, dtype=long)
        yield "attention_rows", partial(seen, patches, patches, first, **options)
        yield "attention_column_means", partial(columns, patches, patches, **options)

    hidden, mask = meta(1, visual, decoder.width, dtype=dtype), meta(1, visual, dtype=torch.bool)
    match = ops["best_match"].triton
    chosen, allowed = meta(1, stay, decoder.width, dtype=dtype), meta(1, stay, dtype=torch.bool)
    groups = meta(1, visual, dtype=long), meta(1, stay, dtype=long)
    yield "best_match", partial(match, hidden, chosen, allowed, group_a=groups[0], group_b=groups[1])
    metric = meta(tower.images, tower.tokens, tower.head_width, dtype=dtype)
    yield "best_match", partial(match, metric[:, ::2], metric[:, 1::2])
    budget = meta(1, dtype=long)
    yield "farthest", partial(ops["farthest"].triton, hidden, mask, budget, 1)
    # Coverage and determinants compare all tokens with all in float32, whatever they come in.
    alike, vectors, factor = meta(1, visual, visual), meta(1, visual, decoder.width), meta(1, visual)
    yield "coverage_gain", partial(ops["coverage_gain"].triton, alike, factor)
    for weights in (None, factor):
        yield "most_covering", partial(ops["most_covering"].triton, alike, mask, budget, 1, weights)
    yield "greedy_dpp", partial(ops["greedy_dpp"].triton, vectors, vectors, mask, budget, 1)
    for pickers in (1, 8):
        score = meta(1, pickers, visual)
        yield "take_in_turn", partial(ops["take_in_turn"].triton, score, mask, meta(1, pickers, dtype=long), stay)
    gone = meta(visual - stay, dtype=long)
    join = partial(ops["join"].triton, hidden[0], meta(stay, dtype=long), meta(stay), gone, gone, meta(visual - stay))
    yield "join", join
    yield "join", partial(join, few=True)
    places, weights = meta(1, visual, dtype=long), meta(1, visual)
    for weight in (None, weights):
        yield "destinations", partial(ops["destinations"].triton, places, mask, places, weight, length)
    yield "cosines", partial(ops["cosines"].triton, hidden, chosen[:, :8])
    score = meta(1, visual)
    for keys in ((), (score,), (places, score), (mask, score)):
        yield "rank_in_group", partial(ops["rank_in_group"].triton, places, *keys)
    best = meta(tower.images, (tower.tokens + 1) // 2)
    partner, counts = meta(*best.shape, dtype=long), [tower.tokens] * tower.images
    yield "as_sources", partial(ops["as_sources"].triton, best, partner, 1, None)
    gone = [tower.tokens // SHARE] * tower.images
    if ops["pairing"].accepts(best):
        yield "pairing", partial(ops["pairing"].triton, best, partner, gone, counts, 1)
        there = meta(tower.images, dtype=long), meta(tower.images, dtype=long)
        yield "pairing", partial(ops["pairing"].triton, best, partner, gone, counts, 1, on_device=there)
    yield "partition", partial(ops["partition"].triton, meta(1, length, dtype=torch.bool))
    index = meta(1, stay + TEXT, dtype=long)
    for x, dim in ((meta(1, length, decoder.width, dtype=dtype), 1), (meta(3, 1, length, dtype=long), 2)):
        yield "gather_tokens", partial(ops["gather_tokens"].triton, x, index, dim)


def describe(program: Program, model: str) -> dict[str, Any]:
    """Return the fields of a record that tell which program it is; dtype: of the tokens, if it reads any."""
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
    """What two records of one program have in common."""
    fields = ("kernel", "gpu", "warps", "stages", "constants", "ones", "divided", "types")
    return json.dumps([record[field] for field in fields], sort_keys=True)


def programs(wanted: Callable[[Program], bool], gpus: list[str], dtypes: list[torch.dtype]) -> list[dict[str, Any]]:
    """Go through all launches of all models; return a record of each program, with what it needs if it was wanted."""
    driver, first, grids = OfflineDriver(wanted), {}, {}
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


def worst(records: list[dict[str, Any]], number: int) -> set[str]:
    """Return which programs to look at: of each kernel the `number` nearest to their limits, on different GPUs."""
    chosen = set()
    for kernel in sorted({one["kernel"] for one in records}):
        own = [one for one in records if one["kernel"] == kernel]
        own.sort(key=lambda one: (-one["registers"] / (512 if one["gpu"].startswith("gfx") else 255), identity(one)))
        by_gpu = {one["gpu"]: one for one in reversed(own)}  # the first of each GPU
        chosen |= {identity(one) for one in sorted(by_gpu.values(), key=own.index)[:number]}
    return chosen


def faults(record: dict[str, Any], budget: dict[str, Any] | None = None) -> list[str]:
    """Return what is wrong with a compiled program: spilled registers, too much shared memory, too large a grid, no
    warp that fits; and, given its `budget` (its record as committed), what has grown past it."""
    gpu = GPUS[record["gpu"]]
    found = []
    if record["spills"]:
        found.append(f"spills {record['spills']} bytes of a thread")
    if record["shared"] > gpu.shared_block:
        found.append(f"takes {record['shared']} bytes of shared memory of {gpu.shared_block}")
    if any(size > most for size, most in zip(record["grid"], GRID, strict=True)):
        found.append(f"has a grid of {record['grid']}, of {list(GRID)}")
    if not record["occupancy"]:
        found.append("does not fit on a multiprocessor")
    for what in ("registers", "shared", "size") if budget else ():
        if record[what] > ROOM[what] * budget[what]:
            found.append(f"{what} {record[what]}, {budget[what]} when it was last looked at")
    return [f"{record['kernel']} on {record['gpu']} ({record['dtype']}, {record['model']}) {one}" for one in found]


def read() -> list[dict[str, Any]]:
    """The committed records."""
    return [json.loads(line) for line in PATH.read_text().splitlines()[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=list(GPUS), choices=GPUS)
    parser.add_argument("--dtypes", nargs="+", default=[str(one).removeprefix("torch.") for one in DTYPES])
    parser.add_argument("--list", action="store_true", help="compile nothing; the records tell what there is")
    parser.add_argument("--new", action="store_true", help="compile what has no record; keep the records of others")
    parser.add_argument("--worst", type=int, help="of each kernel alone so many, on different GPUs")
    parser.add_argument(
        "--json", type=Path, help=f"default: {PATH.relative_to(PATH.parents[2])}, unless --list or --worst"
    )
    args = parser.parse_args()
    dtypes = [one for one in DTYPES if str(one).removeprefix("torch.") in args.dtypes]
    chosen = worst(read(), args.worst) if args.worst else set()
    known = {identity(one): one for one in read()} if PATH.exists() else {}

    def wanted(program: Program) -> bool:
        who = identity(describe(program, ""))
        return not args.list and (not args.worst or who in chosen) and not (args.new and who in known)

    folder = None if "TRITON_CACHE_DIR" in os.environ else fresh_cache()
    records = programs(wanted, args.gpus, dtypes)
    if args.new:
        records = [one if "registers" in one else known[identity(one)] for one in records]
    print_table(records)
    if path := args.json or (None if args.list or args.worst else PATH):
        names = [str(one).removeprefix("torch.") for one in dtypes]
        models = [model.name for model in MODELS]
        first = {"triton": triton.__version__, "gpus": args.gpus, "dtypes": names, "models": models}
        write(path, [first, *records])
    found = [fault for one in records if "registers" in one for fault in faults(one, known.get(identity(one)))]
    del folder
    if found:
        sys.exit("\n".join(found))


def print_table(records: list[dict[str, Any]]) -> None:
    table = Table(title="Kernels as compiled: what the programs of each need, at most")
    columns = ("kernel", "GPU", "dtype", "programs", "registers", "spilled, B", "shared, KiB", "occupancy", "size, KiB")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right")
    for row in summary(records):
        table.add_row(*map(str, row))
    Console(width=130).print(table)


def summary(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of kernel, GPU, dtype, programs, and of those the most registers, bytes spilled, KiB of shared memory, the
    least occupancy and the largest program in KiB."""
    rows = []
    keys = sorted({(one["kernel"].strip("_"), one["gpu"], one["dtype"]) for one in records if "registers" in one})
    for key in keys:
        own = [one for one in records if (one["kernel"].strip("_"), one["gpu"], one["dtype"]) == key]
        own = [one for one in own if "registers" in one]
        most = {what: max(one[what] for one in own) for what in ("registers", "spills", "shared", "size")}
        rows.append(
            (*key, len(own), most["registers"], most["spills"], round(most["shared"] / 1024, 1),
             f"{min(one['occupancy'] for one in own):.0%}", round(most["size"] / 1024))
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
