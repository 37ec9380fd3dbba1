# SPDX-License-Identifier: Apache-2.0
"""Compare a vLLM server with an overload policy to fixed settings under the same load.

    .venv-vllm/bin/python benchmarks/experiments/overload.py --json benchmarks/results/overload.jsonl

The load is open: requests arrive as a Poisson process, first below the server's unpruned throughput, then above it,
then below it again. One server answers all settings in turn, with the same arrivals and questions. Fixed settings
request a profile by name. "policy" requests none, so that the server chooses by the requests in flight. The script
prints time to first token, share of right answers and profiles used, and the results of a simulated queue with the same
arrivals.
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
# The measured policy, which `steps` simulates: a comparison at each request, without hysteresis or dwell.
BARE = {"release": 1, "rise": 0, "dwell": 0}


@dataclass(frozen=True)
class Served:
    """Result of a request: the profile that served it, seconds to the first token, and whether the answer is right."""

    profile: str
    seconds: float
    right: bool | None = None


def arrivals(phases: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Return ascending arrival times in seconds.

    `phases` has the duration and the requests per second of each phase.
    """
    draw, start, times = random.Random(seed), 0.0, []
    for length, rate in phases:
        time_ = start + draw.expovariate(rate)
        while time_ < start + length:
            times.append(time_)
            time_ += draw.expovariate(rate)
        start += length
    return times


def simulate(
    trace: Sequence[float], choose: Callable[[int], str], seconds: Mapping[str, float], lanes: int = 1
) -> list[Served]:
    """Simulate a first-come-first-served queue and return the result of each request.

    Args:
        trace: Ascending arrival times.
        choose: Return the profile of a request for a number of requests in flight.
        seconds: Seconds that a request of each profile takes.
        lanes: Number of requests that are served at once.
    """
    free, running, out = [0.0] * lanes, [], []
    for arrival in trace:
        while running and running[0] <= arrival:
            heapq.heappop(running)
        profile = choose(len(running))
        done = max(arrival, heapq.heappop(free)) + seconds[profile]
        heapq.heappush(free, done)
        heapq.heappush(running, done)
        out.append(Served(profile, done - arrival))
    return out


def steps(in_flight: Sequence[int], profiles: Sequence[str], default: str) -> Callable[[int], str]:
    """Return the server's overload rule, which maps requests in flight to a profile."""
    names = [default, *profiles]
    return lambda num_running: names[bisect.bisect_right(in_flight, num_running)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as a share of all values."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def row(setting: str, served: Sequence[Served]) -> dict[str, Any]:
    """Summarize the requests of a setting."""
    waits = [request.seconds for request in served]
    right = [request.right for request in served if request.right is not None]
    profiles = collections.Counter(request.profile for request in served)
    return {
        "setting": setting, "requests": len(served), "ttft_p50": percentile(waits, 0.5),
        "ttft_p99": percentile(waits, 0.99), "right": sum(right) / len(right) if right else None,
        "profiles": {name: count / len(served) for name, count in sorted(profiles.items())},
    }  # fmt: skip


# -- client


class Client:
    """Client that asks held-out questions, each time with a new image."""

    def __init__(self, url: str, examples: Sequence[Any], tokens: int) -> None:
        import openai

        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=300, max_retries=0)
        self._examples, self._tokens, self._seen = examples, tokens, itertools.count(1)

    def _image(self, image: Any) -> str:
        """Return an image as a data URL, with two pixels changed so that it is unique in this run."""
        serial, image = next(self._seen), image.copy()
        image.putpixel((0, 0), (serial % 256, serial // 256 % 256, 0))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    async def ask(self, index: int, profile: str) -> Served:
        """Ask a question under a profile, or under the profile that the server's policy chooses."""
        example = self._examples[index % len(self._examples)]
        image = {"type": "image_url", "image_url": {"url": self._image(example.image)}}
        extra: dict[str, Any] = {"add_special_tokens": True}
        if profile != POLICY:
            extra["mm_processor_kwargs"] = {"tokenprune": {"profile": profile}}
        start, first, text = time.perf_counter(), None, ""
        stream = await self._client.chat.completions.create(
            model="served", temperature=0, max_tokens=self._tokens, stream=True, extra_body=extra,
            messages=[{"role": "user", "content": [image, {"type": "text", "text": example.question}]}],
        )  # fmt: skip
        async for event in stream:
            first = time.perf_counter() - start if first is None and event.choices else first
            text += event.choices[0].delta.content or "" if event.choices else ""
        return Served(profile, time.perf_counter() - start if first is None else first, example.is_right(text))

    async def closed(self, count: int, at_once: int, profile: str) -> float:
        """Return requests per second with `at_once` requests always in flight."""
        gate, start = asyncio.Semaphore(at_once), time.perf_counter()

        async def send(index: int) -> None:
            async with gate:
                await self.ask(index, profile)

        await asyncio.gather(*map(send, range(count)))
        return count / (time.perf_counter() - start)

    async def open(self, trace: Sequence[float], profile: str) -> list[Served]:
        """Ask a question at each time of a trace, independent of the earlier answers."""
        start = time.perf_counter()

        async def send(index: int, arrival: float) -> Served:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            return await self.ask(index, profile)

        return await asyncio.gather(*(send(index, arrival) for index, arrival in enumerate(trace)))


def read_counters(url: str) -> collections.Counter[str]:
    """Return the server's number of requests under each profile."""
    page = urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=60).read().decode()
    matches = re.findall(r'^tokenprune:requests_total\{.*?profile="(.*?)".*?\} (\S+)$', page, re.MULTILINE)
    counts: collections.Counter[str] = collections.Counter()
    for name, value in matches:  # one line per reason for the choice of a profile
        counts[name] += int(float(value))
    return counts


async def measure(url: str, args: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a measured and a simulated row for each setting."""
    from tokenprune_demo.heldout import load_heldout

    client = Client(url, load_heldout(), args.tokens)
    await client.closed(8, 4, "full")  # warm-up
    speed = {name: await client.closed(args.calibrate, 8, name) for name in PROFILES}
    say("requests/s, 8 at once: " + ", ".join(f"{name} {value:.1f}" for name, value in speed.items()))
    # Low load, then halfway between the unpruned and the most pruned throughput, then low load.
    calm, busy = speed["full"] / 2, (speed["full"] + speed["tenth"]) / 2
    phases = [(args.seconds * length, rate) for length, rate in ((0.25, calm), (0.5, busy), (0.25, calm))]
    answers, shares = collections.defaultdict(list), collections.defaultdict(collections.Counter)
    simulated = collections.defaultdict(list)
    rule = steps(args.in_flight, args.profiles, "full")
    for round_ in range(args.rounds):
        trace = arrivals(phases, seed=round_)
        if len(trace) > args.most:
            raise SystemExit(f"A round has {len(trace)} requests, more than --most {args.most}.")
        # Settings take turns in a round, so that a slower machine affects every setting.
        for name in (*PROFILES, POLICY)[:: -1 if round_ % 2 else 1]:
            before = read_counters(url)
            answers[name] += await client.open(trace, name)
            shares[name] += read_counters(url) - before
            choose = rule if name == POLICY else lambda num_running, name=name: name
            simulated[name] += simulate(trace, choose, {profile: 1 / value for profile, value in speed.items()})
            say(f"round {round_}, {name}: p99 {percentile([request.seconds for request in answers[name]], 0.99):.2f} s")
    rows = []
    for name, served in answers.items():
        total = sum(shares[name].values())
        profiles = {profile.replace("default", "full"): count / total for profile, count in shares[name].items()}
        more = {"profiles": profiles, "how": "measured", "requests_per_second": speed.get(name)}
        rows.append(row(name, served) | more)
    return rows + [row(name, served) | {"how": "simulated"} for name, served in simulated.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--method", default="divprune")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--profiles", nargs="+", default=["half", "tenth"], choices=list(PROFILES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20, help="duration of the load in each round")
    parser.add_argument("--calibrate", type=int, default=96, help="number of requests to measure each profile's speed")
    parser.add_argument("--most", type=int, default=2000, help="maximum number of requests per round")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="more server arguments, must be last")
    add_options(parser, resume=False)
    args = parser.parse_args()
    args.load = Load(args.allow_load).begin  # the server causes load itself, so only the load before it counts

    from rich.console import Console
    from rich.table import Table
    from serving import served, write

    setting = {
        "off": True,
        "profiles": {
            name: {"method": args.method} | profile if "keep" in profile else profile
            for name, profile in PROFILES.items()
        },
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
    for row in rows:
        right = "" if row["right"] is None else f"{row['right']:.2f}"
        shares = ", ".join(f"{name} {share:.2f}" for name, share in row["profiles"].items())
        table.add_row(
            row["how"], row["setting"], str(row["requests"]), f"{row['ttft_p50']:.2f}", f"{row['ttft_p99']:.2f}",
            right, shares,
        )  # fmt: skip
    console.print(table)
    if args.json:
        args.model = Path(args.model).name  # without the path on this machine
        write(args.json, args, rows)


if __name__ == "__main__":
    main()
