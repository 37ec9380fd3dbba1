# SPDX-License-Identifier: Apache-2.0
"""What choosing the tokens farthest from each other (`divprune`) costs, beside one product of all tokens and the picks.

    python benchmarks/farthest.py --threads 1

"blocks": what the library does with many tokens. "one by one": the loop that reads all features for each pick, and
finds the first pick by the products of all pairs, up to `--slow` tokens. Both take turns with the product of N tokens
and K = N / 9 of them, in one process; ratios are of CPU seconds of all threads, taken round by round, so other work on
the machine shows less than in wall time (caches are shared all the same). The script stops where the two choose
differently. "random": independent normal features, where each token is alike to none; "groups": 200 directions with
noise; "video": 64 frames that hardly change.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import Clock, Rows, add_options, code_version, header, ladder, results_path
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from tokenprune.kernels.farthest import nearest_other
from tokenprune.kernels.farthest_blocks import farthest_of_many
from tokenprune.kernels.match import best_match

FRAMES, GROUPS, SHARE = 64, 200, 9


def features(kind: str, count: int, width: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(count, width, generator=g)
    if kind == "random":
        return noise
    centres = torch.randn(count // FRAMES if kind == "video" else GROUPS, width, generator=g)
    if kind == "video":
        return centres.repeat(FRAMES, 1) + 0.05 * noise[: len(centres) * FRAMES]
    return centres[torch.randint(GROUPS, (count,), generator=g)] + 0.3 * noise


def one_by_one(unit: Tensor, number: int) -> Tensor:
    """bool `[N]`: the picks, each compared with all."""
    mask = torch.ones(1, len(unit), dtype=torch.bool)
    apart, taken = nearest_other(unit[None], mask, best_match.reference)[0], torch.zeros(len(unit), dtype=torch.bool)
    for step in range(number):
        pick = int(apart.masked_fill(taken, -torch.inf).argmax())
        taken[pick] = True
        new = 1 - unit @ unit[pick]
        apart = new if step == 0 else torch.minimum(apart, new)
    return taken


def measure(kind: str, count: int, width: int, rounds: int, slow: int, clock: Clock) -> dict[str, Any]:
    unit = normalize(features(kind, count, width), dim=-1)
    number = len(unit) // SHARE
    some, found = unit[:number].T, {}
    runs = {"product": lambda: unit @ some, "blocks": lambda: found.update(blocks=farthest_of_many(unit, number))}
    if count <= slow:
        runs["one by one"] = lambda: found.update(slow=one_by_one(unit, number))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(clock(run))
    if "slow" in found and not torch.equal(found["slow"], found["blocks"]):
        raise SystemExit(f"{kind}, {count} tokens: blocks take others than one by one")
    record: dict[str, Any] = {"kind": kind, "tokens": len(unit), "picks": number, "width": width}
    for name, taken in times.items():
        key = name.replace(" ", "_")
        record[f"{key}_cpu_ms"] = ladder([1000 * cpu for _, cpu in taken])
        if name != "product":
            pairs = zip(taken, times["product"], strict=True)
            record[f"{key}_products"] = ladder([mine[1] / product[1] for mine, product in pairs])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[4608, 8192, 16384, 32768])
    parser.add_argument("--kinds", nargs="+", default=["random", "groups", "video"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--slow", type=int, default=8192, help="tokens up to which the slow way is run, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    parser.add_argument("--device", default="cpu", choices=["cpu"], help="a GPU has kernels of its own")
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/cpu/farthest.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, console = torch.device(args.device), Console()
    counts = [256, 640] if args.tiny else args.counts
    rows = Rows(
        args.json or results_path(device, "farthest", args.tiny), header(device, width=args.width, rounds=args.rounds),
        args, code=code_version(), threads=args.threads, width=args.width, rounds=args.rounds,
    )  # fmt: skip
    table = Table(title=f"Farthest tokens, width {args.width}, {args.threads} thread(s), CPU time")
    for column in ("features", "tokens", "product, ms", "blocks, ms", "products", "one by one, ms", "products"):
        table.add_column(column, justify="left" if column == "features" else "right")
    todo = [(kind, count) for count in counts for kind in args.kinds]
    for kind, count in track(todo, description="farthest", console=console):
        run = partial(measure, kind, count, args.width, args.rounds, args.slow, Clock(device))
        (one,) = rows.measure((kind, count), run)
        shown = [one["product_cpu_ms"], one["blocks_cpu_ms"], one["blocks_products"]]
        shown += [one.get("one_by_one_cpu_ms"), one.get("one_by_one_products")]
        cells = ["" if value is None else f"{value['p50']:.1f}" for value in shown]
        table.add_row(kind, str(one["tokens"]), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
