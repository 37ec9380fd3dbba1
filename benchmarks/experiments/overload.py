# SPDX-License-Identifier: Apache-2.0
"""Does it help to keep less under load? A vLLM server with an overload policy, beside fixed settings, on the same load.

    .venv-vllm/bin/python benchmarks/experiments/overload.py --json benchmarks/results/overload.jsonl

The load is open: requests come when they come (a Poisson process), whether or not the ones before are answered, first
below what the server can answer without reduction, then above it, then below it again. One server answers all settings,
in turn, on the same arrivals and the same questions: fixed ones ask for a profile by name, and "policy" asks for none,
so that the server chooses by the requests in flight. Prints the time to the first token, the share of right answers and
what was kept, and beside them what a simulation of a queue says of the same arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import bisect
import collections
import heapq
import io
import itertools
import json
import os
import random
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import Load, add_options

MODEL = Path(__file__).resolve().parents[2] / "demo/tokenprune_demo/models/demo_vlm"
PROFILES = {"full": {"off": True}, "half": {"keep": 0.5}, "tenth": {"keep": 0.11}}
POLICY = "policy"
# What was measured, and what `steps` simulates: a comparison at each request, without hysteresis or dwell.
BARE = {"release": 1, "rise": 0, "dwell": 0}


@dataclass(frozen=True)
class Served:
    """What became of a request. profile: under which it was served. seconds: to its first token."""

    profile: str
    seconds: float
    right: bool | None = None


def arrivals(phases: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Return when requests come, in seconds from the start, ascending. phases: seconds that each lasts, and its
    requests per second."""
    draw, start, made = random.Random(seed), 0.0, []
    for length, rate in phases:
        at = start + draw.expovariate(rate)
        while at < start + length:
            made.append(at)
            at += draw.expovariate(rate)
        start += length
    return made


def simulate(
    trace: Sequence[float], choose: Callable[[int], str], seconds: Mapping[str, float], lanes: int = 1
) -> list[Served]:
    """Return what becomes of each request of a trace, first come, first served.

    trace: when they come, ascending. choose: the profile of a request that finds so many others in flight. seconds: how
    long a request of each profile occupies one of `lanes` alike.
    """
    free, running, out = [0.0] * lanes, [], []
    for at in trace:
        while running and running[0] <= at:
            heapq.heappop(running)
        profile = choose(len(running))
        done = max(at, heapq.heappop(free)) + seconds[profile]
        heapq.heappush(free, done)
        heapq.heappush(running, done)
        out.append(Served(profile, done - at))
    return out


def steps(in_flight: Sequence[int], profiles: Sequence[str], default: str) -> Callable[[int], str]:
    """Return the rule of the server's "overload": from so many requests in flight on, that profile."""
    names = [default, *profiles]
    return lambda number: names[bisect.bisect_right(in_flight, number)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all reach."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def row(setting: str, served: Sequence[Served]) -> dict[str, Any]:
    """Sum up the requests of one setting."""
    waits = [one.seconds for one in served]
    right = [one.right for one in served if one.right is not None]
    profiles = collections.Counter(one.profile for one in served)
    return {
        "setting": setting, "requests": len(served), "ttft_p50": percentile(waits, 0.5),
        "ttft_p99": percentile(waits, 0.99), "right": sum(right) / len(right) if right else None,
        "profiles": {name: count / len(served) for name, count in sorted(profiles.items())},
    }  # fmt: skip


# -- against a server


class Client:
    """Asks the questions of the held-out set, each time with an image that no cache has seen."""

    def __init__(self, url: str, examples: Sequence[Any], tokens: int) -> None:
        import openai

        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=300, max_retries=0)
        self._examples, self._tokens, self._seen = examples, tokens, itertools.count(1)

    def _image(self, image: Any) -> str:
        """Return an image with two pixels changed, as no other of this run has them, as a data URL."""
        number, image = next(self._seen), image.copy()
        image.putpixel((0, 0), (number % 256, number // 256 % 256, 0))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    async def ask(self, number: int, profile: str) -> Served:
        """Ask one question under a profile, or under what the server's policy chooses."""
        example = self._examples[number % len(self._examples)]
        image = {"type": "image_url", "image_url": {"url": self._image(example.image)}}
        extra: dict[str, Any] = {"add_special_tokens": True}
        if profile != POLICY:
            extra["mm_processor_kwargs"] = {"tokenprune": {"profile": profile}}
        start, first, said = time.perf_counter(), None, ""
        stream = await self._client.chat.completions.create(
            model="served", temperature=0, max_tokens=self._tokens, stream=True, extra_body=extra,
            messages=[{"role": "user", "content": [image, {"type": "text", "text": example.question}]}],
        )  # fmt: skip
        async for event in stream:
            first = time.perf_counter() - start if first is None and event.choices else first
            said += event.choices[0].delta.content or "" if event.choices else ""
        return Served(profile, time.perf_counter() - start if first is None else first, example.is_right(said))

    async def closed(self, count: int, at_once: int, profile: str) -> float:
        """Return requests per second when `at_once` are always on their way."""
        gate, start = asyncio.Semaphore(at_once), time.perf_counter()

        async def one(number: int) -> None:
            async with gate:
                await self.ask(number, profile)

        await asyncio.gather(*map(one, range(count)))
        return count / (time.perf_counter() - start)

    async def open(self, trace: Sequence[float], profile: str) -> list[Served]:
        """Ask one question at each time of a trace, whatever became of those before."""
        start = time.perf_counter()

        async def one(number: int, at: float) -> Served:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            return await self.ask(number, profile)

        return await asyncio.gather(*(one(number, at) for number, at in enumerate(trace)))


def counted(url: str) -> collections.Counter[str]:
    """Return how many requests the server had under each profile."""
    page = urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=60).read().decode()
    found = re.findall(r'^tokenprune:requests_total\{.*?profile="(.*?)".*?\} (\S+)$', page, re.MULTILINE)
    counts: collections.Counter[str] = collections.Counter()
    for name, value in found:  # a profile is chosen in several ways
        counts[name] += int(float(value))
    return counts


async def measure(url: str, args: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row for each setting, measured, and one as simulated."""
    from tokenprune_demo.heldout import load_heldout

    client = Client(url, load_heldout(), args.tokens)
    await client.closed(8, 4, "full")  # to warm up
    speed = {name: await client.closed(args.calibrate, 8, name) for name in PROFILES}
    say("requests/s, 8 at once: " + ", ".join(f"{name} {value:.1f}" for name, value in speed.items()))
    # Calm; then halfway between what the server can answer without reduction and with most of it; then calm.
    calm, busy = speed["full"] / 2, (speed["full"] + speed["tenth"]) / 2
    phases = [(args.seconds * length, rate) for length, rate in ((0.25, calm), (0.5, busy), (0.25, calm))]
    answers, shares = collections.defaultdict(list), collections.defaultdict(collections.Counter)
    simulated = collections.defaultdict(list)
    rule = steps(args.in_flight, args.profiles, "full")
    for round_ in range(args.rounds):
        trace = arrivals(phases, seed=round_)
        if len(trace) > args.most:
            raise SystemExit(f"{len(trace)} requests a round: more than --most {args.most}")
        # A server that slows down slows down all settings alike.
        for name in (*PROFILES, POLICY)[:: -1 if round_ % 2 else 1]:
            before = counted(url)
            answers[name] += await client.open(trace, name)
            shares[name] += counted(url) - before
            choose = rule if name == POLICY else lambda number, name=name: name
            simulated[name] += simulate(trace, choose, {one: 1 / value for one, value in speed.items()})
            say(f"round {round_}, {name}: p99 {percentile([one.seconds for one in answers[name]], 0.99):.2f} s")
    rows = []
    for name, served in answers.items():
        total = sum(shares[name].values())
        profiles = {profile.replace("default", "full"): count / total for profile, count in shares[name].items()}
        found = {"profiles": profiles, "how": "measured", "requests_per_second": speed.get(name)}
        rows.append(row(name, served) | found)
    return rows + [row(name, served) | {"how": "simulated"} for name, served in simulated.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--method", default="divprune")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--profiles", nargs="+", default=["half", "tenth"], choices=list(PROFILES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20, help="how long requests come in each round")
    parser.add_argument("--calibrate", type=int, default=96, help="requests that measure each profile's speed")
    parser.add_argument("--most", type=int, default=2000, help="requests in a round, at most")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="further arguments of the server, last")
    add_options(parser, resume=False)
    args = parser.parse_args()
    args.load = Load(args.allow_load).begin  # of other work: what a server takes is what is measured

    from rich.console import Console
    from rich.table import Table
    from serving import served, write

    setting = {
        "off": True,
        "profiles": {name: {"method": args.method} | one if "keep" in one else one for name, one in PROFILES.items()},
        "overload": {"in_flight": args.in_flight, "profiles": args.profiles} | BARE,
    }  # fmt: skip
    small = ["--dtype", "float32", "--block-size", "32", "--enforce-eager", "--max-model-len", "512"]
    extra = [*(small if args.model == str(MODEL) else []), "--mm-processor-kwargs", json.dumps({"tokenprune": setting})]
    console = Console()
    with served(args.model, [*extra, *args.server], console) as url:
        rows = asyncio.run(measure(url, args, console.log))
    table = Table(title=f"{args.method}, {Path(args.model).name}, {os.cpu_count()} cores")
    for column in ("", "setting", "requests", "TTFT p50, s", "p99, s", "right", "profiles"):
        table.add_column(column)
    for one in rows:
        right = "" if one["right"] is None else f"{one['right']:.2f}"
        shares = ", ".join(f"{name} {share:.2f}" for name, share in one["profiles"].items())
        table.add_row(
            one["how"], one["setting"], str(one["requests"]), f"{one['ttft_p50']:.2f}", f"{one['ttft_p99']:.2f}",
            right, shares,
        )  # fmt: skip
    console.print(table)
    if args.json:
        args.model = Path(args.model).name  # not where it lies on this machine
        write(args.json, args, rows)


if __name__ == "__main__":
    main()
