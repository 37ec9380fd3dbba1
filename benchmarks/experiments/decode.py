# SPDX-License-Identifier: Apache-2.0
"""Time of a step of decoding: with a cache that grows, with a static one, and with that and a compiled step.

    python benchmarks/experiments/decode.py --threads 2   # on a CPU, some minutes: a step is compiled for each way
    python benchmarks/experiments/decode.py               # on a GPU: generate compiles there by itself
    python benchmarks/experiments/decode.py --tiny        # the same code in seconds

A LLaVA with random weights. Every way is a `generate` of a model of its own, since a step that is compiled knows the
patch of its model; they take turns, and a step's time is the one between two words. What is compared is a step: the
prefill, which is never compiled, is left out.
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
    """Notes when each word came."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, []

    def put(self, value: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def how(cache: str, backend: str) -> dict[str, Any]:
    """Arguments of `generate`."""
    if cache == "dynamic":
        return {}
    if cache == "static":
        return {"cache_implementation": "static", "disable_compile": True}
    settings = CompileConfig(backend=backend, fullgraph=True)
    settings._compile_all_devices = True  # by itself, generate compiles on GPUs only
    return {"cache_implementation": "static", "compile_config": settings}


def step_ms(model: Any, given: dict[str, Any], steps: int, arguments: dict[str, Any]) -> float:
    """Median milliseconds of a step."""
    watch = Watch(given["input_ids"].device)
    with torch.inference_mode():
        model.generate(
            **given, **arguments, streamer=watch, do_sample=False, max_new_tokens=steps + 2, min_new_tokens=steps + 2
        )
    # First comes the prompt, then the word that the prefill gives.
    return median(1000 * (after - before) for before, after in pairwise(watch.times[2:]))


def measure(args: argparse.Namespace, visual: int) -> list[dict[str, Any]]:
    """One record for each method and kind of cache; None is the unpatched model."""
    device, decoder = torch.device(args.device), "tiny" if args.tiny else args.decoder
    names, backend = (None, *args.methods.split(",")), "eager" if args.tiny else "inductor"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    first, models, told = llava(decoder, device, dtype), {}, {}
    for name in names:
        for cache in CACHES:
            shared = {id(one): one for one in first.parameters()}
            models[name, cache] = copy.deepcopy(first, shared)
            if name:
                tokenprune.patch(models[name, cache], name, keep=args.keep, guard="off")
    ids = prompt(visual, device)
    width = models[None, "dynamic"].config.text_config.hidden_size
    features = torch.randn(visual, width, device=device, dtype=dtype)
    times: dict[Any, list[float]] = {way: [] for way in models}
    for round_ in track(range(-1, args.rounds), f"{visual} visual tokens", console=Console(stderr=True)):
        for (name, cache), model in models.items():
            given = {"input_ids": ids, "mm_encoder_outputs": {"image": encoded([features])}}
            one = step_ms(model, given, args.steps, how(cache, backend))
            if round_ >= 0:
                times[name, cache].append(one)
            if name:
                told[name, cache] = tokenprune.stats(model).kv_bytes
    whole = times[None, "dynamic"]
    return [
        {
            "visual": visual, "method": name or "unpatched", "keep": args.keep if name else 1.0, "cache": cache,
            "step_ms": ladder(each), "kv_bytes": told.get((name, cache)),
            "speedup": ladder([a / b for a, b in zip(whole, each, strict=True)]),
            "over_unpatched": ladder([a / b for a, b in zip(times[None, cache], each, strict=True)]),
        }
        for (name, cache), each in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--visual", type=int, nargs="+", default=[576, 2880])
    parser.add_argument("--decoder", default="100m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16, help="of each generate")
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds, without a compiler")
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
    table = Table("visual tokens", "method", "keep", "cache", "step ms", "of the first", "of the unpatched")
    for visual in args.visual:
        for one in rows.measure(visual, partial(measure, args, visual)):
            table.add_row(
                str(visual), one["method"], f"{one['keep']:g}", one["cache"], f"{one['step_ms']['p50']:.2f}",
                f"{one['speedup']['p50']:.2f}", f"{one['over_unpatched']['p50']:.2f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
