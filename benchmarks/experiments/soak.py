# SPDX-License-Identifier: Apache-2.0
"""Resident memory of a vLLM server with the plugin under minutes of mixed load: does it reach a plateau?

    .venv-vllm/bin/python benchmarks/experiments/soak.py --json benchmarks/results/cpu/soak.jsonl
    .venv-vllm/bin/python experiments/soak.py --cache-gb 4 --blocks 8000 --seconds 60    # vLLM's caches still fill

The server is a random LLaVA of 0.5 M parameters. Every request has its own image and one of several settings: methods
before the language model and in the tower, 18 budgets, and settings that the server refuses; some clients disconnect
before their answer ends. A sample each `--every` seconds holds the requests so far, and the resident memory of the API
server and of the engine.

Two of vLLM's own caches grow for a long time: processed images are kept up to `--mm-processor-cache-gb`, 4 GB by
default, and on CPUs a block of the KV cache takes memory when it is first used. Here both are small (`--cache-gb`,
`--blocks`). A third one is oneDNN's, of up to 1,024 matrix shapes: fewer tokens make prompts of many lengths. With
`ONEDNN_PRIMITIVE_CACHE_CAPACITY=8` in the environment (soak-onednn.jsonl), or with `--off` (soak-off.jsonl), the engine
stops growing within a minute.

`growth` compares the medians of the last two quarters of the run;
a leak of a kilobyte a request would add a megabyte for a thousand requests.
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
    """Return the setting of a request: 1 of 10 is refused, 2 of 10 keep all tokens."""
    kind = chance.randrange(10)
    if kind == 0:
        return chance.choice(REFUSED)
    if kind < 3:
        return {"off": True}
    return {"method": chance.choice(METHODS), "keep": chance.randrange(1, 19) / 20}


def resident() -> dict[str, float]:
    """Return the resident megabytes of the server's processes below this one: "api" and "engine"."""
    (server,) = psutil.Process().children()
    below = sum(child.memory_info().rss for child in server.children(recursive=True))
    return {"api": server.memory_info().rss / 1e6, "engine": below / 1e6}


async def client_loop(
    url: str, until: float, seeds: Any, counts: dict[str, int], args: argparse.Namespace, number: int
) -> None:
    """Send requests one after another until the time is over, and count the outcomes."""
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    chance = random.Random(number)
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
        asyncio.create_task(client_loop(url, start + args.seconds, seeds, counts, args, number))
        for number in range(args.clients)
    ]
    samples = list[dict[str, Any]]()
    while any(not client.done() for client in clients):
        samples.append({"second": round(time.monotonic() - start, 1)} | counts | resident())
        console.log(samples[-1])
        await asyncio.sleep(args.every)
    await asyncio.gather(*clients)  # raises the errors of clients
    return samples


def summarize(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the growth of both processes between the medians of the last two quarters of the samples."""
    quarter = len(samples) // 4
    third, last = samples[2 * quarter : 3 * quarter], samples[3 * quarter :]
    requests = sum(statistics.mean(one[key] for one in last) - statistics.mean(one[key] for one in third)
                   for key in ("answered", "refused", "left"))  # fmt: skip
    summary: dict[str, Any] = {"requests_between": round(requests)}
    for process in ("api", "engine"):
        middles = [statistics.median(one[process] for one in part) for part in (third, last)]
        summary |= {f"{process}_mb": middles, f"{process}_growth_mb": middles[1] - middles[0]}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=10, help="seconds between two samples")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--size", type=int, default=112, help="edge of an image in pixels, as sent")
    parser.add_argument("--cache-gb", type=float, default=0.1, help="vLLM's --mm-processor-cache-gb")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of the KV cache, of 128 tokens each")
    parser.add_argument("--off", action="store_true", help="for comparison: no request drops tokens or is refused")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as place:
        folder, template = Path(place) / "model", Path(place) / "template.jinja"
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
