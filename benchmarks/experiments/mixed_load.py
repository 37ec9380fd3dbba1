# SPDX-License-Identifier: Apache-2.0
"""Ten minutes of mixed load on a vLLM server: answers beside those that settings give alone, and counters.

    .venv-vllm/bin/python benchmarks/experiments/mixed_load.py --json benchmarks/results/mixed_load.jsonl

A few clients, and a burst of many every few seconds, ask without a pause: settings of their own, profiles by key and by
the model's name, images that come again, several in one request, clients that go away before and while they are
answered, images that are none, settings that are wrong. All the while the server's file of profiles changes and is read
again, now and then with a file that is wrong, and the policy under load takes its steps.

Then a second server, without a prefix cache and without a cache of processed images, is asked one by one for what the
first said that it served: the status, the tokens and their log-probabilities (within 1e-4) have to be the same. A
profile has to be one that was in force while the request was on its way. What the server counted has to be what the
clients saw; requests of clients that went before an answer may be counted or not. No status may be 500 or above.
Prints what was compared; exits with 1 if anything differs.

A client that goes away while its image is being read can leave vLLM's two caches of processed images apart, as its
sources say: whoever asks with that image next gets HTTP 500 once, and vLLM mends the cache. Such a request is sent
again once, and counted: look at the count.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import math
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mixed_checks import BASE, LIMITS, OFFERS, WRONG_OFFERS, InForce, Sent, counted, metric_differences, out_of_force
from mixed_requests import Answer, Client, Request, alone, differences, draw

MODEL = Path(__file__).resolve().parents[2] / "demo/tokenprune_demo/models/demo_vlm"


class Reloads:
    """The server's file of profiles, which changes while it runs.

    file: its path. times: the offers, and when each may have been in force. sent: signals, by the result that is due.
    """

    def __init__(self, file: Path, url: str) -> None:
        self.file, self._page = file, url.removesuffix("/v1") + "/metrics"
        self.times, self.sent = [InForce(0, -math.inf)], collections.Counter({"taken": 0, "refused": 0})
        self._number = 0

    @staticmethod
    def write(file: Path, number: int) -> None:
        """Write an offer into the file, in one step."""
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as made:
            made.write(json.dumps(OFFERS[number] | LIMITS))
        os.replace(made.name, file)

    def page(self) -> str:
        return urllib.request.urlopen(self._page, timeout=60).read().decode()

    async def change(self) -> None:
        """Have the next offer read, and wait until the server has counted it."""
        self._number = (self._number + 1) % len(OFFERS)
        self.write(self.file, self._number)
        result = "refused" if self._number in WRONG_OFFERS else "taken"
        begin = time.monotonic()
        self.sent[result] += 1
        os.kill(_server(), signal.SIGHUP)
        while (
            counted(await asyncio.to_thread(self.page), "tokenprune:reloads_total", "result")[(result,)]
            < self.sent[result]
        ):
            await asyncio.sleep(0.1)
        if result == "taken":
            self.times[-1].end = time.monotonic()
            self.times.append(InForce(self._number, begin))


def _server() -> int:
    """Return the process of the API server that this one has started."""
    import psutil

    return next(one.pid for one in psutil.Process().children() if any("api_server" in word for word in one.cmdline()))


def memory() -> int:
    """Return the bytes that this process's descendants hold in memory, the server among them."""
    import psutil

    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


async def under_load(client: Client, asked: Iterator[Request], reloads: Reloads, args: Any, tell: Any) -> list[Sent]:
    """Ask for so many seconds, a few at a time and in bursts, while the profiles change; return what was sent."""
    stop, burst, sent = time.monotonic() + args.seconds, asyncio.Event(), []

    async def ask(number: int) -> None:
        while time.monotonic() < stop:
            if number >= args.at_once and not burst.is_set():
                await asyncio.sleep(0.05)
                continue
            one = Sent(next(asked), time.monotonic())
            sent.append(one)
            one.answer = await client.ask(one.request)
            one.end = time.monotonic()

    async def bursts() -> None:
        while time.monotonic() < stop:
            await asyncio.sleep(args.calm)
            burst.set()
            await asyncio.sleep(args.burst)
            burst.clear()

    async def change() -> None:
        while time.monotonic() < stop:
            await asyncio.sleep(args.reload)
            await reloads.change()
            if reloads.sent.total() % 20 == 0:
                tell(f"{len(sent)} sent, {reloads.sent.total()} reloads, {memory() / 2**20:.0f} MiB")

    async with client:
        await asyncio.gather(bursts(), change(), *map(ask, range(args.most)))
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--at-once", type=int, default=4, help="requests on their way at calm times")
    parser.add_argument("--most", type=int, default=40, help="and in a burst")
    parser.add_argument("--calm", type=float, default=6, help="seconds between bursts")
    parser.add_argument("--burst", type=float, default=3, help="seconds of a burst")
    parser.add_argument("--reload", type=float, default=5, help="seconds between changes of the profiles")
    parser.add_argument("--images", type=int, default=12, help="from how many images the requests choose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write a row into this file")
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="arguments of both servers, last")
    args = parser.parse_args()

    import vllm
    from rich.console import Console
    from serving import served

    from tokenprune_demo.heldout import load_heldout

    examples = load_heldout()
    images = {example.path: example for example in examples}.values()
    examples, questions = list(images)[: args.images], sorted({example.question for example in examples})[:20]
    asked = draw(args.seed, questions, args.images)
    names = ["served", *(f"served:{name}" for name in OFFERS[0]["profiles"])]
    arguments = [
        "--dtype", "float32", "--block-size", "32", "--enforce-eager", "--max-model-len", "640", "--max-num-seqs", "16",
        "--served-model-name", *names, *args.server,
    ]  # fmt: skip

    def setting(**given: Any) -> list[str]:
        return [*arguments, "--mm-processor-kwargs", json.dumps({"tokenprune": BASE | given})]

    console = Console()
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "offer.json"
        Reloads.write(file, 0)
        with served(str(MODEL), setting(reload=str(file)), console) as url:
            reloads = Reloads(file, url)
            sent = asyncio.run(under_load(Client(url, examples), asked, reloads, args, console.log))
            time.sleep(5)  # until requests whose clients are gone have come to their end
            failed = metric_differences(reloads.page(), sent, reloads.sent)
            console.log(f"{memory() / 2**20:.0f} MiB at the end")
    statuses = collections.Counter((one.request.kind, one.answer.status) for one in sent)
    console.log(", ".join(f"{kind} {status}: {count}" for (kind, status), count in sorted(statuses.items())))
    failed += [f"{one.request}: {one.answer.said}" for one in sent if one.answer.status >= 500]
    stayed = [one for one in sent if one.request.leaves is None]
    failed += [f"{one.request}: {said}" for one in stayed if (said := out_of_force(one, reloads.times))]

    answers: dict[str, Answer] = {}
    without = setting(**OFFERS[0], **LIMITS)
    with served(str(MODEL), [*without, "--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"], console) as url:
        failed += asyncio.run(compare(Client(url, examples), stayed, answers))
    for line in failed:
        console.log(line)
    again = sum(one.answer.again for one in sent)
    row = {
        "vllm": vllm.__version__, "seconds": args.seconds, "requests": len(sent), "compared": len(stayed),
        "asked_alone": len(answers), "reloads": dict(reloads.sent), "differ": len(failed), "second_try": again,
        "statuses": {f"{kind} {status}": count for (kind, status), count in sorted(statuses.items())},
        "by": dict(collections.Counter(one.answer.record["by"] for one in sent if one.answer.served)),
    }  # fmt: skip
    console.print(row)
    if args.json:
        args.json.write_text(json.dumps(row) + "\n")
    sys.exit(bool(failed))


async def compare(client: Client, sent: Sequence[Sent], answers: dict[str, Answer]) -> list[str]:
    """Ask alone for what each request was served by, each once, and return the differences in words."""
    failed = []
    async with client:
        for one in sent:
            request = alone(one.request, one.answer)
            if one.answer.status == 400 and one.request.kind in ("name", "profile"):
                continue  # a profile that was not there: `out_of_force` has looked at it
            key = repr(request)
            if key not in answers:
                answers[key] = await client.ask(request)
            failed += [f"{one.request}, {one.answer.served}: {text}" for text in differences(one.answer, answers[key])]
    return failed


if __name__ == "__main__":
    main()
