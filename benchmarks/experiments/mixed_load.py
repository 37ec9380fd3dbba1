# SPDX-License-Identifier: Apache-2.0
"""Send ten minutes of mixed load to a vLLM server, and compare answers and counters with the expected ones.

    .venv-vllm/bin/python benchmarks/experiments/mixed_load.py --json benchmarks/results/mixed_load.jsonl

A few clients, and many in a burst every few seconds, send requests without a pause: with custom settings, with profiles
by key and by model name, with repeated images, and with several images. Some clients disconnect before or during the
answer, some images are broken, and some settings are invalid. Meanwhile the profile file changes and is reloaded,
sometimes with an invalid file, and the overload policy switches profiles.

Then a second server without prefix cache and without processor cache answers the same settings one by one. Status and
tokens must be equal, and log-probabilities must agree within 1e-4. A profile must have been in force during the
request. The server's counters must match the clients' observations; requests of disconnected clients may be counted or
not. A status of 500 or above is an error. The script prints the comparison and exits with 1 on any difference.

A client that disconnects while its image is being read can bring vLLM's two caches of processed images out of step, as
vLLM's source documents. The next request with that image gets HTTP 500 once, and vLLM repairs the cache. The script
repeats such a request once and counts it as `second_try`.
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
    """The server's profile file, which changes while the server runs.

    Attributes:
        file: Path of the file.
        times: The offers, with the intervals in which they may have been in force.
        sent: Number of signals by expected result.
    """

    def __init__(self, file: Path, url: str) -> None:
        self.file, self._page = file, url.removesuffix("/v1") + "/metrics"
        self.times, self.sent = [InForce(0, -math.inf)], collections.Counter({"taken": 0, "refused": 0})
        self._number = 0

    @staticmethod
    def write(file: Path, index: int) -> None:
        """Write an offer into the file atomically."""
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(json.dumps(OFFERS[index] | LIMITS))
        os.replace(temporary.name, file)

    def page(self) -> str:
        return urllib.request.urlopen(self._page, timeout=60).read().decode()

    async def change(self) -> None:
        """Write the next offer, signal the server, and wait until the server has counted the reload."""
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
    """Return the process id of the API server, a child of this process."""
    import psutil

    return next(
        process.pid
        for process in psutil.Process().children()
        if any("api_server" in word for word in process.cmdline())
    )


def memory() -> int:
    """Return the resident bytes of all descendants of this process, including the server."""
    import psutil

    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


async def under_load(client: Client, requests: Iterator[Request], reloads: Reloads, args: Any, tell: Any) -> list[Sent]:
    """Send requests for `args.seconds`, a few at a time and in bursts, while the profiles change.

    Return the requests.
    """
    stop, burst, sent = time.monotonic() + args.seconds, asyncio.Event(), []

    async def ask(index: int) -> None:
        while time.monotonic() < stop:
            if index >= args.at_once and not burst.is_set():
                await asyncio.sleep(0.05)
                continue
            request = Sent(next(requests), time.monotonic())
            sent.append(request)
            request.answer = await client.ask(request.request)
            request.end = time.monotonic()

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
    parser.add_argument("--at-once", type=int, default=4, help="concurrent requests between bursts")
    parser.add_argument("--most", type=int, default=40, help="concurrent requests in a burst")
    parser.add_argument("--calm", type=float, default=6, help="seconds between bursts")
    parser.add_argument("--burst", type=float, default=3, help="seconds per burst")
    parser.add_argument("--reload", type=float, default=5, help="seconds between changes of the profiles")
    parser.add_argument("--images", type=int, default=12, help="number of different images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write a row into this file")
    parser.add_argument(
        "--server", nargs=argparse.REMAINDER, default=[], help="arguments of both servers, must be last"
    )
    args = parser.parse_args()

    import vllm
    from rich.console import Console
    from serving import served

    from tokenprune_demo.heldout import load_heldout

    examples = load_heldout()
    images = {example.path: example for example in examples}.values()
    examples, questions = list(images)[: args.images], sorted({example.question for example in examples})[:20]
    requests = draw(args.seed, questions, args.images)
    names = ["served", *(f"served:{name}" for name in OFFERS[0]["profiles"])]
    arguments = [
        "--dtype", "float32", "--block-size", "32", "--enforce-eager", "--max-model-len", "640", "--max-num-seqs", "16",
        "--served-model-name", *names, *args.server,
    ]  # fmt: skip

    def setting(**options: Any) -> list[str]:
        return [*arguments, "--mm-processor-kwargs", json.dumps({"tokenprune": BASE | options})]

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "offer.json"
        Reloads.write(file, 0)
        with served(str(MODEL), setting(reload=str(file)), console) as url:
            reloads = Reloads(file, url)
            sent = asyncio.run(under_load(Client(url, examples), requests, reloads, args, console.log))
            time.sleep(5)  # requests of disconnected clients need to end
            failed = metric_differences(reloads.page(), sent, reloads.sent)
            console.log(f"{memory() / 2**20:.0f} MiB at the end")
    statuses = collections.Counter((request.request.kind, request.answer.status) for request in sent)
    console.log(", ".join(f"{kind} {status}: {count}" for (kind, status), count in sorted(statuses.items())))
    failed += [f"{request.request}: {request.answer.said}" for request in sent if request.answer.status >= 500]
    stayed = [request for request in sent if request.request.leaves is None]
    failed += [
        f"{request.request}: {problem}" for request in stayed if (problem := out_of_force(request, reloads.times))
    ]

    answers: dict[str, Answer] = {}
    without = setting(**OFFERS[0], **LIMITS)
    with served(str(MODEL), [*without, "--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"], console) as url:
        failed += asyncio.run(compare(Client(url, examples), stayed, answers))
    for line in failed:
        console.log(line)
    retries = sum(request.answer.again for request in sent)
    row = {
        "vllm": vllm.__version__, "seconds": args.seconds, "requests": len(sent), "compared": len(stayed),
        "asked_alone": len(answers), "reloads": dict(reloads.sent), "differ": len(failed), "second_try": retries,
        "statuses": {f"{kind} {status}": count for (kind, status), count in sorted(statuses.items())},
        "by": dict(collections.Counter(request.answer.record["by"] for request in sent if request.answer.served)),
    }  # fmt: skip
    console.print(row)
    if args.json:
        args.json.write_text(json.dumps(row) + "\n")
    sys.exit(bool(failed))


async def compare(client: Client, sent: Sequence[Sent], answers: dict[str, Answer]) -> list[str]:
    """Ask for the setting of each answer again, each request once, and describe the differences."""
    failed = []
    async with client:
        for earlier in sent:
            request = alone(earlier.request, earlier.answer)
            if earlier.answer.status == 400 and earlier.request.kind in ("name", "profile"):
                continue  # a profile that did not exist, which `out_of_force` has checked
            key = repr(request)
            if key not in answers:
                answers[key] = await client.ask(request)
            failed += [
                f"{earlier.request}, {earlier.answer.served}: {text}"
                for text in differences(earlier.answer, answers[key])
            ]
    return failed


if __name__ == "__main__":
    main()
