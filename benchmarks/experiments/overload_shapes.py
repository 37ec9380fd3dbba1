# SPDX-License-Identifier: Apache-2.0
"""Simulate how often the overload policy changes the profile, and its effect on waiting times. No server is needed.

    python benchmarks/experiments/overload_shapes.py --json benchmarks/results/overload_shapes.jsonl

10,000 requests arrive one by one (a Poisson process) or in bursts (Gamma-distributed gaps with the same mean), in turn
below, at and above the unpruned throughput. The rule is the plugin's code: with its defaults, and as a plain comparison
at each request. Each fixed profile is simulated, too. The simulated server answers 8 requests at once and takes one
second for an unpruned image. Results are reproducible by seed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401

from tokenprune.integrations.vllm.settings.overload import Overload, OverloadState

NUMBER, LANES, STEPS = 10_000, 8, (8, 32)
SECONDS, KEEP = (1.0, 0.5, 0.3), (1.0, 0.5, 0.25)  # per request, at each step
RATES, LENGTH = (6.0, 8.0, 10.7, 8.0), 500  # successive requests per second, and requests at each rate
CV = 2.24  # coefficient of variation of the gaps between bursts
ARRIVALS: dict[str, Callable[[random.Random, float], float]] = {
    "one by one": lambda draw, rate: draw.expovariate(rate),
    "in bursts": lambda draw, rate: draw.gammavariate(1 / CV**2, CV**2 / rate),
}
Choose = Callable[[int, float], int]


def settings() -> dict[str, Choose]:
    """Return for each setting a function from (requests in flight, time) to the step of a request."""
    names = ("half", "quarter")
    bare = Overload(STEPS, names, release=1.0, rise=0.0, dwell=0.0)
    fixed: dict[str, Choose] = {name: lambda *_, step=step: step for step, name in enumerate(("whole", *names))}
    return fixed | {"compared anew": OverloadState(bare).take, "policy": OverloadState(Overload(STEPS, names)).take}


def arrivals(gap: Callable[[random.Random, float], float], seed: int) -> list[float]:
    """Return ascending arrival times in seconds."""
    draw, now, times = random.Random(seed), 0.0, []
    for index in range(NUMBER):
        now += gap(draw, RATES[index // LENGTH % len(RATES)])
        times.append(now)
    return times


def simulate(times: Sequence[float], choose: Choose) -> dict[str, Any]:
    """Simulate a first-come-first-served queue and summarize it."""
    free, running, waits, served, changes = [0.0] * LANES, [], [], [0] * len(KEEP), []
    before = None
    for arrival in times:
        while running and running[0] <= arrival:
            heapq.heappop(running)
        step = choose(len(running), arrival)
        if before is not None and step != before:
            changes.append(arrival)
        before = step
        done = max(arrival, heapq.heappop(free)) + SECONDS[step]
        heapq.heappush(free, done)
        heapq.heappush(running, done)
        waits.append(done - arrival)
        served[step] += 1
    within = max((sum(start <= change < start + 60 for change in changes) for start in changes), default=0)
    return {
        "p99": round(sorted(waits)[math.ceil(0.99 * len(waits)) - 1], 3),
        "kept": round(sum(count * keep for count, keep in zip(served, KEEP, strict=True)) / len(times), 4),
        "changes_a_minute": round(60 * len(changes) / (times[-1] - times[0]), 2),
        "most_within_a_minute": within,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write; default: print only")
    args = parser.parse_args()

    from rich.console import Console

    lines = []
    for name, gap in ARRIVALS.items():
        times = arrivals(gap, args.seed)
        for setting, choose in settings().items():
            row = {"arrivals": name, "setting": setting, "requests": NUMBER, "seed": args.seed}
            lines.append(json.dumps(row | simulate(times, choose)))
    Console().print("\n".join(lines), markup=False, soft_wrap=True)
    if args.json:
        args.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
