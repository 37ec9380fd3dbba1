# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of a request on a vLLM server that removes nothing: with the plugin, and without it.

    .venv-vllm/bin/python benchmarks/experiments/overhead.py --json benchmarks/results/overhead.jsonl

Three servers of one model at once, each of which rests while another answers: without the plugin (`VLLM_PLUGINS`
names none), with it and without a setting, and with it and `{"off": true}`. In each round each server gets the same
requests, each with an image that it has not seen, in another order from round to round. What counts is the CPU time of
all of a server's processes, so other work on the machine is not in it; a share is the median over rounds of a server's
time over that of the server without the plugin, with its least and most.

The models are random LLaVAs with 576 visual tokens an image: one with a decoder so small that what is not the model
weighs most, and one of 100 M parameters.
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
# The sizes of their decoders, where they are not those of `write_model`.
MODELS: dict[str, dict[str, int]] = {
    "next to none": SMALL | {"num_key_value_heads": 2},
    "100 M parameters": {},
}
# The plugins that vLLM loads, and its processor's arguments.
SERVERS = {"no plugin": ("", "{}"), "no setting": (None, "{}"), "off": (None, '{"tokenprune": {"off": true}}')}


@contextlib.contextmanager
def running(model: Path, name: str, console: Console) -> Iterator[tuple[str, psutil.Process]]:
    """Start one of the servers; yield its address and its process."""
    plugins, given = SERVERS[name]
    before = {one.pid for one in psutil.Process().children()}
    environment = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    extra = ["--max-model-len", "1024", "--dtype", "float32", "--block-size", "32", "--enforce-eager"]
    extra += ["--chat-template", str(model / "template.jinja"), "--mm-processor-kwargs", given]
    with served(str(model), extra, console) as url:
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


def measure(model: Path, args: argparse.Namespace, console: Console) -> dict[str, list[float]]:
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
    parser.add_argument("--only", choices=list(MODELS), help="measure one of the two, and leave the other's rows")
    args = parser.parse_args()
    console, records = Console(), []
    if args.only and args.json and args.json.exists():
        records = [one for one in map(json.loads, args.json.read_text().splitlines()) if one["what"] != args.only]
    table = Table(title="CPU time of a request that loses nothing")
    for column in ("decoder", "server", "ms a request", "over no plugin", "least", "most"):
        table.add_column(column)
    for model, shape in MODELS.items():
        if args.only not in (None, model):
            continue
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place), **shape)
            (Path(place) / "template.jinja").write_text(TEMPLATE)
            found = measure(Path(place), args, console)
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
