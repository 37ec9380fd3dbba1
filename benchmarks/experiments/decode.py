# SPDX-License-Identifier: Apache-2.0
"""Measure the time of a decoding step with a dynamic cache, a static cache, and a static cache with a compiled step.

    python benchmarks/experiments/decode.py --threads 2   # CPU, some minutes: compiles a step for each combination
    python benchmarks/experiments/decode.py               # GPU, where generate compiles by default
    python benchmarks/experiments/decode.py --tiny        # the same code in seconds

The model is a LLaVA with random weights; the raw file is benchmarks/results/DEVICE/decode.jsonl. Each combination of
method and cache has a copy of the model, because a compiled step includes the patch. The combinations take turns. The
time of a step is the time between two words, so the prefill does not count.
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import (
    Rows,
    add_options,
    code_version,
    default_device,
    encoded,
    header,
    ladder,
    llava,
    prompt,
    results_path,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import CompileConfig
from transformers.generation.streamers import BaseStreamer

import tokenprune

METHODS = "divprune,fastv"
CACHES = ("dynamic", "static", "compiled")


class Watch(BaseStreamer):
    """Record the time of each generated word."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, []

    def put(self, value: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def how(cache: str, backend: str) -> dict[str, Any]:
    """Return the arguments of `generate` for a kind of cache."""
    if cache == "dynamic":
        return {}
    if cache == "static":
        return {"cache_implementation": "static", "disable_compile": True}
    settings = CompileConfig(backend=backend, fullgraph=True)
    settings._compile_all_devices = True  # generate compiles on GPUs only by default
    return {"cache_implementation": "static", "compile_config": settings}


def step_ms(model: Any, inputs: dict[str, Any], steps: int, arguments: dict[str, Any]) -> float:
    """Return the median milliseconds of a decoding step."""
    watch = Watch(inputs["input_ids"].device)
    with torch.inference_mode():
        model.generate(
            **inputs, **arguments, streamer=watch, do_sample=False, max_new_tokens=steps + 2, min_new_tokens=steps + 2
        )
    # The first call has the prompt, the second has the word of the prefill.
    return median(1000 * (after - before) for before, after in pairwise(watch.times[2:]))


def measure(args: argparse.Namespace, visual: int) -> list[dict[str, Any]]:
    """Return one record per method and kind of cache. Method None is the unpatched model."""
    device, decoder = torch.device(args.device), "tiny" if args.tiny else args.decoder
    names, backend = (None, *args.methods.split(",")), "eager" if args.tiny else "inductor"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    first, models, kv_bytes = llava(decoder, device, dtype), {}, {}
    for name in names:
        for cache in CACHES:
            shared = {id(param): param for param in first.parameters()}
            models[name, cache] = copy.deepcopy(first, shared)
            if name:
                tokenprune.patch(models[name, cache], name, keep=args.keep, guard="off")
    ids = prompt(visual, device)
    width = models[None, "dynamic"].config.text_config.hidden_size
    features = torch.randn(visual, width, device=device, dtype=dtype)
    times: dict[Any, list[float]] = {way: [] for way in models}
    for round_ in track(range(-1, args.rounds), f"{visual} visual tokens", console=Console(stderr=True)):
        for (name, cache), model in models.items():
            inputs = {"input_ids": ids, "mm_encoder_outputs": {"image": encoded([features])}}
            milliseconds = step_ms(model, inputs, args.steps, how(cache, backend))
            if round_ >= 0:
                times[name, cache].append(milliseconds)
            if name:
                kv_bytes[name, cache] = tokenprune.stats(model).kv_bytes
    unpatched = times[None, "dynamic"]
    return [
        {
            "visual": visual, "method": name or "unpatched", "keep": args.keep if name else 1.0, "cache": cache,
            "step_ms": ladder(step_times), "kv_bytes": kv_bytes.get((name, cache)),
            "speedup": ladder([a / b for a, b in zip(unpatched, step_times, strict=True)]),
            "over_unpatched": ladder([a / b for a, b in zip(times[None, cache], step_times, strict=True)]),
        }
        for (name, cache), step_times in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--visual", type=int, nargs="+", default=[576, 2880])
    parser.add_argument("--decoder", default="100m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16, help="decoding steps of each generate call")
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--tiny", action="store_true", help="check the code in seconds, without a compiler")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/decode.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.tiny:
        args.rounds, args.steps, args.visual = 1, 2, args.visual[:1]
    device = torch.device(args.device)
    decoder = "tiny" if args.tiny else args.decoder
    rows = Rows(
        args.json or results_path(device, "decode", args.tiny),
        header(device, rounds=args.rounds, steps=args.steps, decoder=decoder), args,
        code=code_version(), threads=args.threads, decoder=decoder, rounds=args.rounds,
    )  # fmt: skip
    table = Table(
        "visual tokens", "method", "keep", "cache", "step ms", "speedup over dynamic", "speedup over unpatched"
    )
    for visual in args.visual:
        for row in rows.measure(visual, partial(measure, args, visual)):
            table.add_row(
                str(visual), row["method"], f"{row['keep']:g}", row["cache"], f"{row['step_ms']['p50']:.2f}",
                f"{row['speedup']['p50']:.2f}", f"{row['over_unpatched']['p50']:.2f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
