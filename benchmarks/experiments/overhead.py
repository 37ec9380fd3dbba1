# SPDX-License-Identifier: Apache-2.0
"""Measure the plugin's CPU seconds per request on a vLLM server that prunes nothing.

    .venv-vllm/bin/python benchmarks/experiments/overhead.py --json benchmarks/results/overhead.jsonl

Three servers of the same model run side by side: without the plugin (`VLLM_PLUGINS` is empty), with the plugin and no
setting, and with the plugin and `{"off": true}`. Only one answers at a time. In each round each server gets the same
requests with new images, and the order changes between rounds. The script counts CPU time of all processes of a server,
so other work on the machine does not count. A share is the median over rounds of a server's time divided by the time of
the server without the plugin; the table also has minimum and maximum.

The models are random LLaVAs with 576 visual tokens per image: one with a tiny decoder, where the plugin's share is
largest, and one with 100 M parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import openai
import psutil
from rich.console import Console
from rich.table import Table
from serving import QUESTION, TEMPLATE, noise_image, served, write, write_model

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
# Decoder sizes that differ from the defaults of `write_model`.
MODELS: dict[str, dict[str, int]] = {
    "next to none": SMALL | {"num_key_value_heads": 2},
    "100 M parameters": {},
}
# Per server: the plugins that vLLM loads, and the arguments of its processor.
SERVERS = {"no plugin": ("", "{}"), "no setting": (None, "{}"), "off": (None, '{"tokenprune": {"off": true}}')}


@contextlib.contextmanager
def running(model: Path, name: str, console: Console) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server and yield its address and its process."""
    plugins, processor_arguments = SERVERS[name]
    before = {process.pid for process in psutil.Process().children()}
    environment = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    extra = ["--max-model-len", "1024", "--dtype", "float32", "--block-size", "32", "--enforce-eager"]
    extra += ["--chat-template", str(model / "template.jinja"), "--mm-processor-kwargs", processor_arguments]
    with served(str(model), extra, console) as url:
        os.environ.clear()
        os.environ.update(environment)
        (process,) = (child for child in psutil.Process().children() if child.pid not in before)
        yield url, process


def seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and all of its descendants."""
    times = [process.cpu_times() for process in [process, *process.children(recursive=True)]]
    return sum(cpu_time.user + cpu_time.system for cpu_time in times)


async def ask(url: str, seeds: range, at_once: int) -> None:
    """Send a request with an image for each seed, at most `at_once` at a time."""
    gate = asyncio.Semaphore(at_once)

    async def send(client: openai.AsyncOpenAI, seed: int) -> None:
        content: Any = [noise_image(seed, 336), {"type": "text", "text": QUESTION}]
        async with gate:
            await client.chat.completions.create(
                model="served", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=4,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
        await asyncio.gather(*(send(client, seed) for seed in seeds))


def measure(model: Path, args: argparse.Namespace, console: Console) -> dict[str, list[float]]:
    """Return the CPU seconds per request of each server and round."""
    seconds_of: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(running(model, name, console)) for name in SERVERS}
        for round_ in range(-1, args.rounds):  # the first is a warm-up
            seeds = range((round_ + 1) * args.requests, (round_ + 2) * args.requests)
            turn = round_ % len(SERVERS)
            for name in [*SERVERS][turn:] + [*SERVERS][:turn]:
                url, process = servers[name]
                before = seconds(process)
                asyncio.run(ask(url, seeds, args.at_once))
                if round_ >= 0:
                    seconds_of[name].append((seconds(process) - before) / args.requests)
    return seconds_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=40, help="requests per round")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=list(MODELS), help="measure this model and keep the other model's rows")
    args = parser.parse_args()
    console, records = Console(), []
    if args.only and args.json and args.json.exists():
        records = [row for row in map(json.loads, args.json.read_text().splitlines()) if row["what"] != args.only]
    table = Table(title="CPU time of a request without pruning")
    for column in ("decoder", "server", "ms a request", "over no plugin", "least", "most"):
        table.add_column(column)
    for model, shape in MODELS.items():
        if args.only not in (None, model):
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), **shape)
            (Path(folder) / "template.jinja").write_text(TEMPLATE)
            seconds_of = measure(Path(folder), args, console)
        for name, seconds in seconds_of.items():
            shares = [a / b for a, b in zip(seconds, seconds_of["no plugin"], strict=True)]
            lowest, middle, highest = min(shares), statistics.median(shares), max(shares)
            records.append({"what": model, "server": name, "seconds": seconds, "share": middle})
            milliseconds = f"{1000 * statistics.median(seconds):.1f}"
            table.add_row(model, name, milliseconds, f"{middle:.3f}", f"{lowest:.3f}", f"{highest:.3f}")
        console.print(table)
        if args.json:
            write(args.json, args, records)


if __name__ == "__main__":
    main()
