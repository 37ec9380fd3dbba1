# SPDX-License-Identifier: Apache-2.0
"""Speed-ups that papers print beside ours: prefill of a LLaVA-1.5-shaped model, 576 visual tokens to 192, 128 and 64.

    python benchmarks/peers.py --resume         # measure, and print
    python benchmarks/peers.py --page                            # write docs/peers.md from the results

Ours: random weights, the proportions of LLaVA-1.5's decoder in a smaller size, its token counts; prefill of 64 text
tokens and one image that was encoded beforehand, methods and the unpatched model in turn in one process
(benchmarks/efficiency.py). Oracle: the unpatched decoder on a prompt that has only the kept tokens. Theirs: what a
paper prints (benchmarks/papers/speedups.json), of its own implementation, model and device. `By FLOPs`: the closed form
at LLaVA-1.5-7B's true size, which no implementation beats on a device that is limited by arithmetic. Memory: the most
that tensors made in a prefill hold at once, the cache among them; on a GPU what its allocator says.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import (
    AFTER,
    BEFORE,
    Clock,
    Live,
    Peak,
    Rows,
    add_options,
    code_version,
    default_device,
    fill_page,
    header,
    llava,
    quiet,
    results_path,
)
from efficiency import Case, measure
from limits import SHAPES
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tokenprune
from tokenprune.config import Config
from tokenprune.cost.model import CostModel, Load

VISUAL, KEEPS = 576, (192, 128, 64)
METHODS = "random,divprune,pool,dart,fastv,vscan"
PUBLISHED = Path(__file__).parent / "papers" / "speedups.json"
PAGE = Path(__file__).parents[1] / "docs" / "peers.md"
BEGIN, END = "<!-- peers:begin (benchmarks/peers.py --page) -->", "<!-- peers:end -->"


def published() -> list[dict[str, Any]]:
    """Return what papers print, each with its `ratio`, before / after."""
    made = []
    for one in json.loads(PUBLISHED.read_text()):
        ratio = one["ratio"] if "ratio" in one else one["before"] / one["after"]
        made.append(one | {"ratio": ratio})
    return made


def by_flops(method: str, keep: int) -> float:
    """Return the ratio of LLaVA-1.5-7B's decoder FLOPs in prefill, unpatched over patched."""
    model = CostModel.from_config(SHAPES[0].made())
    load = Load((VISUAL,), VISUAL, BEFORE + AFTER)
    cost = model.predict(load, *Config({"method": method, "keep": keep}).steps())
    return model.cost(load).decoder / cost.decoder


def memory(case: Case, method: str | None, keep: int) -> dict[str, int]:
    """Return the bytes that a prefill takes at its peak, and those of the cache that it leaves."""
    device = case.clock.device
    with nullcontext() if method is None else tokenprune.patched(case.model, method, keep=keep, guard="off"):
        images = case.images(method or "random")
        case.cache = None
        with Peak(device) if device.type == "cuda" else Live() as peak:
            case.prefill(images)
        return {"peak": peak.bytes, "kv": _held(case.cache)}


def _held(cache: Any) -> int:
    tensors = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ours(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Measure; returns the rows of the results."""
    device = torch.device(args.device)
    size = "tiny" if args.tiny else args.model or ("vicuna-7b" if device.type == "cuda" else "100m")
    model = llava(size, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    parameters = sum(one.numel() for one in model.model.language_model.parameters())
    first = header(device, model=size, parameters=parameters, text=BEFORE + AFTER, rounds=args.rounds)
    known = Rows(args.json, first, args, code=code_version(), threads=args.threads, size=size, rounds=args.rounds)
    made = []
    todo = [(keep, name) for keep in args.keeps for name in args.methods.split(",")]
    for keep, name in track(todo, "peers", console=console):
        case = Case(model, VISUAL, keep, Clock(device))

        def run(case: Case = case, name: str = name, keep: int = keep) -> dict[str, Any]:
            whole = {f"whole_{key}": value for key, value in memory(case, None, keep).items()}
            return measure(case, name, args.rounds, known.allowed) | memory(case, name, keep) | whole

        made += known.measure((name, keep), run)
    return made


def rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of our table: for each method and budget what was measured, and what could be."""
    return [
        [
            f"`{line['method']}`", f"{line['keep']}", f"x{line['speedup']['p50']:.2f}",
            f"x{line['unpatched_ms']['p50'] / line['oracle_ms']['p50']:.2f}", f"{line['efficiency']['p50']:.2f}",
            f"x{by_flops(line['method'], line['keep']):.2f}", f"{line['kv'] / line['whole_kv']:.0%}",
            f"{line['peak'] / max(1, line['whole_peak']):.0%}",
        ]
        for line in lines
    ]  # fmt: skip


COLUMNS = ("method", "tokens", "prefill", "oracle", "of the oracle", "by FLOPs, 7B", "KV cache", "peak memory")


def page(path: Path) -> str:
    """Return both tables as Markdown."""
    text = measured(path) if path.exists() else []
    text += [
        "Published, by others on their machines (not measured here):",
        "",
        "| method | printed in | model | what | setting | device | speed-up |",
        "|---|---|---|---|---|---|---:|",
    ]
    for one in published():
        source = f"{one['source']}, {one['where']}"
        text.append(
            f"| {one['title']} | {source} | {one['model']} | {one['measured']} | {one['setting']} "
            f"| {one['device'] or 'not noted'} | x{one['ratio']:.2f} |"
        )
    return "\n".join(text)


def measured(path: Path) -> list[str]:
    """Return our table as lines of Markdown."""
    about, lines = quiet(path)
    if not lines:
        return []
    return [
        f"Ours: {about['device']}, {about['threads']} threads, torch {about['torch']}, transformers "
        f"{about['transformers']}, {about['date']}; a decoder of "
        f"{about['parameters'] / 1e6:.0f} M random parameters, medians of {about['rounds']} rounds.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
        *("| " + " | ".join(row) + " |" for row in rows(lines)),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--keeps", type=int, nargs="+", default=KEEPS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    parser.add_argument("--model", help="tiny, 100m or vicuna-7b (the default on a GPU)")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds")
    parser.add_argument("--page", action="store_true", help="write the tables of --json into docs/peers.md")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/peers.jsonl")
    args = parser.parse_args()
    args.json = args.json or results_path(torch.device(args.device), "peers", args.tiny)
    if args.page:
        fill_page(PAGE, BEGIN, END, page(args.json))
        return
    torch.set_num_threads(args.threads)
    console = Console()
    lines = ours(args, console)
    table = Table(title=f"prefill of {VISUAL} visual tokens, faster by")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows(lines):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
