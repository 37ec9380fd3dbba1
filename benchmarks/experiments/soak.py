# SPDX-License-Identifier: Apache-2.0
"""Measure whether the resident memory of a vLLM server with the plugin reaches a plateau under mixed load.

    .venv-vllm/bin/python benchmarks/experiments/soak.py --json benchmarks/results/cpu/soak.jsonl
    .venv-vllm/bin/python experiments/soak.py --cache-gb 4 --blocks 8000 --seconds 60    # vLLM's caches still grow

The server is a random LLaVA of 0.5 M parameters. Every request has a new image and one of several settings: methods
before the language model and in the tower, 18 budgets, and invalid settings. Some clients disconnect before their
answer ends. Every `--every` seconds, the script records the number of requests, and the resident memory of the API
server and of the engine.

Two caches of vLLM grow for a long time: processed images are kept up to `--mm-processor-cache-gb` (4 GB by default),
and on CPUs a block of the KV cache takes memory at its first use. Both are small here (`--cache-gb`, `--blocks`). A
third cache is oneDNN's, with up to 1,024 matrix shapes: pruned prompts have many lengths. With
`ONEDNN_PRIMITIVE_CACHE_CAPACITY=8` in the environment (soak-onednn.jsonl) or with `--off` (soak-off.jsonl), the engine
stops growing within a minute.

`growth` compares the medians of the last two quarters of the run. A leak of a kilobyte per request would add a megabyte
in a thousand requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import openai
import psutil
from rich.console import Console
from serving import QUESTION, TEMPLATE, noise_image, served, write, write_model

SHAPE = dict(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
METHODS = ("divprune", "uniform", "visionzip", "dart", "pool", "tome")
REFUSED = [{"method": "no such method"}, {"keep": 0}, {"profile": "no such profile"}]


def draw_setting(chance: random.Random) -> dict[str, Any]:
    """Draw the setting of a request: 1 of 10 is invalid, 2 of 10 keep all tokens."""
    kind = chance.randrange(10)
    if kind == 0:
        return chance.choice(REFUSED)
    if kind < 3:
        return {"off": True}
    return {"method": chance.choice(METHODS), "keep": chance.randrange(1, 19) / 20}


def resident() -> dict[str, float]:
    """Return the resident megabytes of the API server and of its engine processes."""
    (server,) = psutil.Process().children()
    below = sum(child.memory_info().rss for child in server.children(recursive=True))
    return {"api": server.memory_info().rss / 1e6, "engine": below / 1e6}


async def client_loop(
    url: str, until: float, seeds: Any, counts: dict[str, int], args: argparse.Namespace, seed: int
) -> None:
    """Send requests until the time is over, and count their outcomes."""
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    chance = random.Random(seed)
    while time.monotonic() < until:
        part, setting = noise_image(next(seeds), args.size), {"off": True} if args.off else draw_setting(chance)
        try:
            stream = await client.chat.completions.create(
                model="served", temperature=0, max_tokens=chance.choice([1, 4, 16]), stream=True,
                messages=[{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}],
                extra_body={"ignore_eos": True, "mm_processor_kwargs": {"tokenprune": setting}},
            )  # fmt: skip
            if leaves := chance.random() < 0.1:
                await stream.close()
            else:
                async for _ in stream:
                    pass
            counts["left" if leaves else "answered"] += 1
        except openai.BadRequestError:
            counts["refused"] += 1


async def soak(url: str, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Load the server for `--seconds` and return the samples."""
    start, seeds = time.monotonic(), itertools.count()
    counts = {"answered": 0, "refused": 0, "left": 0}
    clients = [
        asyncio.create_task(client_loop(url, start + args.seconds, seeds, counts, args, index))
        for index in range(args.clients)
    ]
    samples = list[dict[str, Any]]()
    while any(not client.done() for client in clients):
        samples.append({"second": round(time.monotonic() - start, 1)} | counts | resident())
        console.log(samples[-1])
        await asyncio.sleep(args.every)
    await asyncio.gather(*clients)  # raises the clients' errors
    return samples


def summarize(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the growth of both processes between the medians of the last two quarters of the samples."""
    quarter = len(samples) // 4
    third, last = samples[2 * quarter : 3 * quarter], samples[3 * quarter :]
    requests = sum(statistics.mean(sample[key] for sample in last) - statistics.mean(sample[key] for sample in third)
                   for key in ("answered", "refused", "left"))  # fmt: skip
    summary: dict[str, Any] = {"requests_between": round(requests)}
    for process in ("api", "engine"):
        middles = [statistics.median(sample[process] for sample in part) for part in (third, last)]
        summary |= {f"{process}_mb": middles, f"{process}_growth_mb": middles[1] - middles[0]}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=10, help="seconds between two samples")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--size", type=int, default=112, help="edge of the images in pixels")
    parser.add_argument("--cache-gb", type=float, default=0.1, help="vLLM's --mm-processor-cache-gb")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of the KV cache, of 128 tokens each")
    parser.add_argument("--off", action="store_true", help="for comparison: all requests keep all tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        folder, template = Path(temporary) / "model", Path(temporary) / "template.jinja"
        write_model(folder, **SHAPE)
        template.write_text(TEMPLATE)
        extra = [
            "--chat-template", str(template), "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager",
            "--mm-processor-cache-gb", str(args.cache_gb), "--num-gpu-blocks-override", str(args.blocks),
        ]  # fmt: skip
        with served(str(folder), extra, console) as url:
            samples = asyncio.run(soak(url, args, console))
    summary = summarize(samples)
    console.print(summary)
    if args.json:
        write(args.json, args, [summary, *samples])


if __name__ == "__main__":
    main()
