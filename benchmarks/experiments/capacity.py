# SPDX-License-Identifier: Apache-2.0
"""Compare the predictions of `tokenprune capacity` with a vLLM server on this CPU, at four shapes.

    .venv-vllm/bin/python benchmarks/experiments/capacity.py --json benchmarks/results/cpu/capacity.jsonl
    python benchmarks/experiments/capacity.py --page    # write the table of docs/results/serving.md from that file

The engine runs on one thread. All times are CPU seconds of the engine's processes (without the API server), so other
work on the machine does not count. The script first measures the peaks of one thread: FLOPs of a matrix product, and
bandwidth of a matrix-vector product. It predicts each shape from these peaks with `--compute` and `--tower` at 0.4 and
no host time. Then a server with a random LLaVA answers requests with new images, and the settings take turns. An error
is prediction / measurement - 1. "fits" is the value of --compute that makes the predicted rate right.
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

# Decoders: 100 M parameters with embeddings, and a second decoder, 1.5 times as wide.
DECODERS: dict[str, dict[str, int]] = {
    "768 wide": {},
    "1152 wide": {"hidden_size": 1152, "intermediate_size": 3072},
}
KEEPS, COMPUTE = (1.0, 0.25), 0.4
ROOT = Path(__file__).resolve().parents[2]
RAW, PAGE = ROOT / "benchmarks/results/cpu/capacity.jsonl", ROOT / "docs/results/serving.md"
BEGIN, END = "<!-- capacity:begin (benchmarks/experiments/capacity.py --page) -->", "<!-- capacity:end -->"


def measured_peaks(seconds: float = 2.0) -> GPU:
    """Measure one thread of this CPU as a GPU of the closed forms. Each peak is a median of repeated products."""
    torch.set_num_threads(1)
    square, tall, vector = torch.randn(2048, 2048), torch.randn(16384, 4096), torch.randn(4096)

    def per_second(amount: float, run: Any) -> float:
        run()
        rates, until = [], time.process_time() + seconds
        while time.process_time() < until:
            start = time.process_time()
            run()
            rates.append(amount / (time.process_time() - start))
        return statistics.median(rates)

    flops = per_second(2 * 2048**3, lambda: square @ square)
    bandwidth = per_second(tall.numel() * 4, lambda: tall @ vector)
    return GPU("one thread of this CPU", 2 * 2**30 / Assumptions().memory, bandwidth, flops, flops)


def engine_seconds() -> float:
    """Return the CPU seconds of the engine and its worker: all processes below the server process."""
    (server,) = psutil.Process().children()
    times = [process.cpu_times() for process in server.children(recursive=True)]
    return sum(cpu_time.user + cpu_time.system for cpu_time in times)


async def measure(url: str, args: argparse.Namespace) -> dict[tuple[float, str], list[tuple[float, float]]]:
    """Return (engine CPU seconds per request, prompt tokens) of each round, by keep and kind of request.

    Kind "first token" sends single requests for one token. Kind "answer" sends `--at-once` concurrent requests.
    """
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    seeds, rounds = itertools.count(), defaultdict(list)
    kinds = {"first token": (1, 1), "answer": (args.at_once, args.tokens)}
    for round_ in range(-1, args.rounds):  # one round to warm up
        for kind, keep in itertools.product(kinds, KEEPS[:: -1 if round_ % 2 else 1]):
            at_once, tokens = kinds[kind]
            setting = {"off": True} if keep == 1.0 else {"method": "uniform", "keep": keep}
            images = [noise_image(next(seeds), 336) for _ in range(max(3, at_once))]
            before = engine_seconds()
            _, answers = await load(client, images, setting, at_once, tokens)
            took = engine_seconds() - before
            if round_ >= 0:
                rounds[keep, kind].append((took / len(images), statistics.mean(length for _, length in answers)))
    return rounds


def predicted(folder: Path, cpu: GPU, keep: float, text: int, args: argparse.Namespace, **more: float) -> Any:
    config = AutoConfig.from_pretrained(folder)
    shares = {"compute": COMPUTE} | more  # one share for tower and decoder; no launch times and no host time
    fixed = {"tower": shares["compute"], "host": 0.0, "each": 0.0, "block": 1}
    assumed = Assumptions(at_once=args.at_once, **shares, **fixed)
    server = Server.from_config(config, cpu, dtype="float32", assumed=assumed)
    request = build_load(config, 1, tokens=None, tiles=1, text=text)
    return server.capacity(request, keep, 1, args.tokens)


def compared(folder: Path, cpu: GPU, rounds: Any, decoder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for keep in KEEPS:
        prompt = rounds[keep, "answer"][0][1]
        first, answer_seconds = (
            statistics.median(seconds for seconds, _ in rounds[keep, kind]) for kind in ("first token", "answer")
        )
        rate = 1 / answer_seconds
        text = round(prompt) - round(576 * keep)
        expected = predicted(folder, cpu, keep, text, args)
        # Decoding is a small part of the time, so bisection finds the share of the peak that fits.
        low, high = 0.01, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            above = predicted(folder, cpu, keep, text, args, compute=middle).rate > rate
            low, high = (low, middle) if above else (middle, high)
        records.append({
            "decoder": decoder, "keep": keep, "prompt": round(prompt),
            "measured_rate": rate, "predicted_rate": expected.rate, "rate_error": expected.rate / rate - 1,
            "measured_first_token": first, "predicted_first_token": expected.first_token,
            "first_token_error": expected.first_token / first - 1, "compute_that_fits": round(low, 3),
            "rounds": {kind: rows for (which, kind), rows in rounds.items() if which == keep},
        })  # fmt: skip
    for record in records:  # the peaks cancel in the gains
        record["measured_gain"] = record["measured_rate"] / records[0]["measured_rate"]
        record["predicted_gain"] = record["predicted_rate"] / records[0]["predicted_rate"]
    return records


def page() -> str:
    """Return the table of docs/results/serving.md from the raw file."""
    rows = [json.loads(line) for line in RAW.read_text().splitlines()]
    lines = [
        "| decoder | keep | requests a CPU second | predicted | error | first token, s | predicted | error | fits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['decoder']} | {row['keep']:g} | {row['measured_rate']:.2f} | {row['predicted_rate']:.2f} "
            f"| {row['rate_error']:+.0%} | {row['measured_first_token']:.2f} | {row['predicted_first_token']:.2f} "
            f"| {row['first_token_error']:+.0%} | {row['compute_that_fits']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--page", action="store_true", help="write the table into docs/results/serving.md without measuring"
    )
    add_options(parser, resume=False)
    args = parser.parse_args()
    if args.page:
        fill_page(PAGE, BEGIN, END, page())
        return
    args.load = Load(args.allow_load).begin  # the servers cause load themselves, so only the load before them counts
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # inherited by the servers
    console, records = Console(), []
    for decoder, shape in DECODERS.items():
        during, cpu = Load(args.allow_load), measured_peaks()
        console.log(f"one thread: {cpu.single / 1e9:.1f} GFLOP/s, {cpu.bandwidth / 1e9:.1f} GB/s")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            write_model(folder, **shape)
            (Path(temporary) / "template.jinja").write_text(TEMPLATE)
            extra = ["--chat-template", f"{temporary}/template.jinja", "--max-model-len", "1024", "--dtype", "float32"]
            with served(str(folder), [*extra, "--enforce-eager"], console) as url:
                rounds = asyncio.run(measure(url, args))
            about = {"flops": cpu.single, "bandwidth": cpu.bandwidth} | during.record()
            records += [about | record for record in compared(folder, cpu, rounds, decoder, args)]
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
    for record in records:
        table.add_row(
            record["decoder"], str(record["keep"]), f"{record['measured_rate']:.2f}", f"{record['predicted_rate']:.2f}",
            f"{record['rate_error']:+.0%}", f"{record['measured_first_token']:.2f}",
            f"{record['predicted_first_token']:.2f}",
            f"{record['first_token_error']:+.0%}", f"{record['compute_that_fits']:.2f}",
        )  # fmt: skip
    console.print(table)
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
