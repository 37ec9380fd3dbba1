# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of a request on a vLLM server that removes nothing: with the plugin, and without it.

    .venv-vllm/bin/python benchmarks/overhead.py --json benchmarks/results/overhead.jsonl

Three servers of one model at once, each of which rests while another answers: without the plugin (`VLLM_PLUGINS`
names none), with it and without a setting, and with it and `{"off": true}`. In each round each server gets the same
requests, each with an image that it has not seen, in another order from round to round. What counts is the CPU time of
all of a server's processes, so other work on the machine is not in it; a share is the median over rounds of a server's
time over that of the server without the plugin, with its least and most.

The model that ships has 16 visual tokens an image, so that what is not the model weighs most; the other is a random
LLaVA of 100 M parameters and 576 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import openai
import psutil
from rich.console import Console
from rich.table import Table
from serving import QUESTION, noise_image, served, write

SHIPPED = Path(__file__).resolve().parent.parent / "demo/tokenprune_demo/models/demo_vlm"
MODELS: dict[str, str | None] = {"demo_vlm": str(SHIPPED), "100 M parameters": None}
# The plugins that vLLM loads, and its processor's arguments.
SERVERS = {"no plugin": ("", "{}"), "no setting": (None, "{}"), "off": (None, '{"tokenprune": {"off": true}}')}


@contextlib.contextmanager
def running(model: str | None, name: str, console: Console) -> Iterator[tuple[str, psutil.Process]]:
    """Start one of the servers; yield its address and its process."""
    plugins, given = SERVERS[name]
    before = {one.pid for one in psutil.Process().children()}
    environment = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    length = ["--max-model-len", "1024"] if model is None else ["--max-model-len", "640"]
    extra = [*length, "--dtype", "float32", "--block-size", "32", "--enforce-eager", "--mm-processor-kwargs", given]
    with served(model, extra, console) as url:
        os.environ.clear()
        os.environ.update(environment)
        (process,) = (one for one in psutil.Process().children() if one.pid not in before)
        yield url, process


def seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and all below it."""
    times = [one.cpu_times() for one in [process, *process.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


async def ask(url: str, seeds: range, at_once: int) -> None:
    """Ask with an image for each seed, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(client: openai.AsyncOpenAI, seed: int) -> None:
        content: Any = [noise_image(seed, 336), {"type": "text", "text": QUESTION}]
        async with gate:
            await client.chat.completions.create(
                model="served", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=4,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
        await asyncio.gather(*(one(client, seed) for seed in seeds))


def measure(model: str | None, args: argparse.Namespace, console: Console) -> dict[str, list[float]]:
    """Return the CPU seconds a request of each server, round by round."""
    found: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(running(model, name, console)) for name in SERVERS}
        for round_ in range(-1, args.rounds):  # one round to warm up
            seeds = range((round_ + 1) * args.requests, (round_ + 2) * args.requests)
            turn = round_ % len(SERVERS)
            for name in [*SERVERS][turn:] + [*SERVERS][:turn]:
                url, process = servers[name]
                before = seconds(process)
                asyncio.run(ask(url, seeds, args.at_once))
                if round_ >= 0:
                    found[name].append((seconds(process) - before) / args.requests)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=40, help="in each round")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, records = Console(), []
    table = Table(title="CPU time of a request that loses nothing")
    for column in ("model", "server", "ms a request", "over no plugin", "least", "most"):
        table.add_column(column)
    for model, path in MODELS.items():
        found = measure(path, args, console)
        for name, each in found.items():
            shares = [a / b for a, b in zip(each, found["no plugin"], strict=True)]
            least, middle, most = min(shares), statistics.median(shares), max(shares)
            records.append({"what": model, "server": name, "seconds": each, "share": middle})
            milliseconds = f"{1000 * statistics.median(each):.1f}"
            table.add_row(model, name, milliseconds, f"{middle:.3f}", f"{least:.3f}", f"{most:.3f}")
    console.print(table)
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
