# SPDX-License-Identifier: Apache-2.0
"""How far off is `tokenprune capacity`? Its closed forms beside a vLLM server on this CPU, at four shapes.

    .venv-vllm/bin/python benchmarks/experiments/capacity.py --json benchmarks/results/cpu/capacity.jsonl
    python benchmarks/experiments/capacity.py --page    # write the table of docs/results/serving.md from that file

The engine computes on one thread, and all times are CPU seconds, of which other work on the machine takes none: those
of the engine's processes, not of the API server's beside it. First the peaks of one thread are measured: FLOPs of a
product of large matrices, and bandwidth of a product of a large matrix and a vector, which has to read it all. With
these in place of a data sheet, with `--compute` and `--tower` at 0.4 and no time of a host, each shape is predicted;
then a server of a random LLaVA answers requests, the settings in turn, each image new. An error is the prediction over
what was measured, less one. "fits" is the share of the peak FLOPs that makes the rate right: what to hand to --compute.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import openai
import psutil
import torch
from common import fill_page
from rich.console import Console
from rich.table import Table
from rows import Load, add_options
from serving import TEMPLATE, load, noise_image, served, write, write_model
from transformers import AutoConfig

from tokenprune.integrations.vllm.capacity import Assumptions, Server, build_load
from tokenprune.integrations.vllm.gpus import GPU

# Decoders: one of 100 M parameters with its embeddings, and one half as wide again.
DECODERS: dict[str, dict[str, int]] = {
    "768 wide": {},
    "1152 wide": {"hidden_size": 1152, "intermediate_size": 3072},
}
KEEPS, COMPUTE = (1.0, 0.25), 0.4
ROOT = Path(__file__).resolve().parents[2]
RAW, PAGE = ROOT / "benchmarks/results/cpu/capacity.jsonl", ROOT / "docs/results/serving.md"
BEGIN, END = "<!-- capacity:begin (benchmarks/experiments/capacity.py --page) -->", "<!-- capacity:end -->"


def measured_peaks(seconds: float = 2.0) -> GPU:
    """Return this CPU, one thread of it, as the closed forms see a GPU; medians of repeated products."""
    torch.set_num_threads(1)
    square, tall, vector = torch.randn(2048, 2048), torch.randn(16384, 4096), torch.randn(4096)

    def per_second(amount: float, run: Any) -> float:
        run()
        found, until = [], time.process_time() + seconds
        while time.process_time() < until:
            start = time.process_time()
            run()
            found.append(amount / (time.process_time() - start))
        return statistics.median(found)

    flops = per_second(2 * 2048**3, lambda: square @ square)
    bandwidth = per_second(tall.numel() * 4, lambda: tall @ vector)
    return GPU("one thread of this CPU", 2 * 2**30 / Assumptions().memory, bandwidth, flops, flops)


def engine_seconds() -> float:
    """Return the CPU seconds of the engine and its worker, all that runs below the one server of this process."""
    (server,) = psutil.Process().children()
    times = [one.cpu_times() for one in server.children(recursive=True)]
    return sum(one.user + one.system for one in times)


async def measure(url: str, args: argparse.Namespace) -> dict[tuple[float, str], list[tuple[float, float]]]:
    """Return for each round the engine's CPU seconds a request, and the tokens of a prompt: by keep, and "first token"
    of lone requests for a single token, or "answer" of as many at once as were asked for."""
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    seeds, found = itertools.count(), defaultdict(list)
    kinds = {"first token": (1, 1), "answer": (args.at_once, args.tokens)}
    for round_ in range(-1, args.rounds):  # one round to warm up
        for kind, keep in itertools.product(kinds, KEEPS[:: -1 if round_ % 2 else 1]):
            at_once, tokens = kinds[kind]
            setting = {"off": True} if keep == 1.0 else {"method": "uniform", "keep": keep}
            images = [noise_image(next(seeds), 336) for _ in range(max(3, at_once))]
            before = engine_seconds()
            _, got = await load(client, images, setting, at_once, tokens)
            took = engine_seconds() - before
            if round_ >= 0:
                found[keep, kind].append((took / len(images), statistics.mean(length for _, length in got)))
    return found


def predicted(folder: Path, cpu: GPU, keep: float, text: int, args: argparse.Namespace, **more: float) -> Any:
    config = AutoConfig.from_pretrained(folder)
    shares = {"compute": COMPUTE} | more  # one for tower and decoder; and there are no launches, nor a host beside it
    alone = {"tower": shares["compute"], "host": 0.0, "each": 0.0, "block": 1}
    assumed = Assumptions(at_once=args.at_once, **shares, **alone)
    server = Server.from_config(config, cpu, dtype="float32", assumed=assumed)
    request = build_load(config, 1, tokens=None, tiles=1, text=text)
    return server.capacity(request, keep, 1, args.tokens)


def compared(folder: Path, cpu: GPU, found: Any, decoder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for keep in KEEPS:
        prompt = found[keep, "answer"][0][1]
        first, each = (statistics.median(one for one, _ in found[keep, kind]) for kind in ("first token", "answer"))
        rate = 1 / each
        text = round(prompt) - round(576 * keep)
        said = predicted(folder, cpu, keep, text, args)
        # Decoding is a small part, so the share of the peak that fits is found by halving.
        low, high = 0.01, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            above = predicted(folder, cpu, keep, text, args, compute=middle).rate > rate
            low, high = (low, middle) if above else (middle, high)
        records.append({
            "decoder": decoder, "keep": keep, "prompt": round(prompt),
            "measured_rate": rate, "predicted_rate": said.rate, "rate_error": said.rate / rate - 1,
            "measured_first_token": first, "predicted_first_token": said.first_token,
            "first_token_error": said.first_token / first - 1, "compute_that_fits": round(low, 3),
            "rounds": {kind: rows for (which, kind), rows in found.items() if which == keep},
        })  # fmt: skip
    for one in records:  # what reduction gains, which the shares of the peaks cancel in
        one["measured_gain"] = one["measured_rate"] / records[0]["measured_rate"]
        one["predicted_gain"] = one["predicted_rate"] / records[0]["predicted_rate"]
    return records


def page() -> str:
    """Return the table of docs/results/serving.md, from the raw file."""
    rows = [json.loads(line) for line in RAW.read_text().splitlines()]
    lines = [
        "| decoder | keep | requests a CPU second | predicted | error | first token, s | predicted | error | fits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        lines.append(
            f"| {one['decoder']} | {one['keep']:g} | {one['measured_rate']:.2f} | {one['predicted_rate']:.2f} "
            f"| {one['rate_error']:+.0%} | {one['measured_first_token']:.2f} | {one['predicted_first_token']:.2f} "
            f"| {one['first_token_error']:+.0%} | {one['compute_that_fits']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--page", action="store_true", help="write the table into docs/results/serving.md, and measure nothing"
    )
    add_options(parser, resume=False)
    args = parser.parse_args()
    if args.page:
        fill_page(PAGE, BEGIN, END, page())
        return
    args.load = Load(args.allow_load).begin  # of other work: what a server takes is what is measured
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # of the servers
    console, records = Console(), []
    for decoder, shape in DECODERS.items():
        during, cpu = Load(args.allow_load), measured_peaks()
        console.log(f"one thread: {cpu.single / 1e9:.1f} GFLOP/s, {cpu.bandwidth / 1e9:.1f} GB/s")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            write_model(folder, **shape)
            (Path(place) / "template.jinja").write_text(TEMPLATE)
            extra = ["--chat-template", f"{place}/template.jinja", "--max-model-len", "1024", "--dtype", "float32"]
            with served(str(folder), [*extra, "--enforce-eager"], console) as url:
                found = asyncio.run(measure(url, args))
            about = {"flops": cpu.single, "bandwidth": cpu.bandwidth} | during.record()
            records += [about | one for one in compared(folder, cpu, found, decoder, args)]
    table = Table(title="predicted and measured")
    for column in (
        "decoder",
        "keep",
        "requests/s",
        "predicted",
        "error",
        "first token, s",
        "predicted",
        "error",
        "fits",
    ):
        table.add_column(column)
    for one in records:
        table.add_row(
            one["decoder"], str(one["keep"]), f"{one['measured_rate']:.2f}", f"{one['predicted_rate']:.2f}",
            f"{one['rate_error']:+.0%}", f"{one['measured_first_token']:.2f}", f"{one['predicted_first_token']:.2f}",
            f"{one['first_token_error']:+.0%}", f"{one['compute_that_fits']:.2f}",
        )  # fmt: skip
    console.print(table)
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
