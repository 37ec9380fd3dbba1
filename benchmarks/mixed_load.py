# SPDX-License-Identifier: Apache-2.0
"""Mixed requests on a vLLM server: does each get the answer that it gets alone, on a server without caches?

    .venv-vllm/bin/python benchmarks/mixed_load.py --rounds 3 --requests 200

A bounded number of requests is always on its way: settings of their own, profiles by key and by the model's name,
images that come again, several in one request, clients that go away, images that are none, settings that are wrong.
Then a second server, without a prefix cache and without a cache of processed images, gets the same requests one by
one. Both have to say the same: the status, the tokens, and their log-probabilities within 1e-4. No status may be 500 or
above. Prints what was compared, and the memory of the server's processes after each round; exits with 1 if anything
differs.

A client that goes away while its image is being read can leave vLLM's two caches of processed images apart, as its
sources say: whoever asks with that image next gets HTTP 500 once, and vLLM mends the cache. That this is the cause of
the one 500 that was seen is a guess. Such a request is sent again once, and counted: look at the count.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import io
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parent.parent / "demo/tokenprune_demo/models/demo_vlm"
PROFILES = {"fast": {"keep": 0.11}, "pooled": {"method": "pool", "keep": 0.25}, "ocr": {"off": True}}
SERVER = {"method": "uniform", "keep": 0.25, "profiles": PROFILES, "min_keep": 0.1}
OWN = [
    {"keep": 0.5}, {"method": "pool"}, {"off": True}, {"profile": "fast", "keep": 0.3}, {"method": "random", "seed": 3},
]  # fmt: skip
WRONG = [
    {"keep": 0.01}, {"keep": 2.0}, {"keep": 64}, {"method": "fastv"}, {"method": "divprun"}, {"profile": "fsat"},
    "fast", {"profile": "ocr", "min_keep": 0.01}, {"method": [{"method": ["pool"]}]}, {"config": "/etc/passwd"}, None,
    {"x": 1},
]  # fmt: skip
KINDS = {"setting": 4, "profile": 3, "name": 3, "default": 3, "wrong": 2, "broken": 1, "leaves": 2}
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    """One request. kind: one of KINDS. images: numbers of held-out images. leaves: after how many events its client
    goes away; None: it stays."""

    kind: str
    images: tuple[int, ...]
    question: str
    profile: str | None = None
    asked: Any = field(default=None, hash=False)
    has_asked: bool = False
    leaves: int | None = None


@dataclass(frozen=True)
class Answer:
    """status: of HTTP. tokens: the ids. logprobs: of the chosen token and the likeliest, by position and id. said: what
    stands in a refusal. again: whether it was answered at the second try."""

    status: int
    tokens: tuple[int, ...] = ()
    logprobs: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    said: str = ""
    again: bool = False


def draw(count: int, seed: int, questions: Sequence[str], images: int) -> list[Request]:
    """Return so many requests of all kinds, the same for the same seed. images: from how many they choose."""
    choice = random.Random(seed)
    made = []
    for _ in range(count):
        kind = choice.choices(list(KINDS), list(KINDS.values()))[0]
        # One image is asked about again and again, and two may be in one prompt.
        numbers = tuple(choice.choice([0, choice.randrange(images)]) for _ in range(choice.choice([1, 1, 1, 2])))
        asked = {"setting": OWN, "wrong": WRONG, "profile": [{"profile": one} for one in PROFILES]}.get(kind)
        made.append(
            Request(
                kind,
                numbers,
                choice.choice(questions),
                choice.choice(list(PROFILES)) if kind == "name" else None,
                None if asked is None else choice.choice(asked),
                asked is not None,
                choice.randrange(3) if kind == "leaves" else None,
            )
        )
    return made


def differences(one: Answer, other: Answer) -> list[str]:
    """Return how two answers to one request differ, in words; empty if they do not."""
    if one.status != other.status:
        return [f"status {one.status}, alone {other.status}"]
    if one.tokens != other.tokens:
        return [f"tokens {one.tokens}, alone {other.tokens}"]
    gap = max((abs(one.logprobs[key] - other.logprobs[key]) for key in one.logprobs.keys() & other.logprobs), default=0)
    return [f"log-probabilities {gap:.1e} apart"] if gap > TOLERANCE else []


# -- against a server


def _url(image: Any, broken: bool) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = buffer.getvalue()[: 200 if broken else None]
    return "data:image/png;base64," + base64.b64encode(data).decode()


class Client:
    def __init__(self, url: str, examples: Sequence[Any]) -> None:
        import openai

        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=300, max_retries=0)
        self._images = [example.image for example in examples]

    async def ask(self, request: Request) -> Answer:
        """Return what the server says, at the second try if it was no fault of the request; of one whose client goes
        away, nothing."""
        answer = await self._once(request)
        return answer if answer.status != 500 else replace(await self._once(request), again=True)

    async def _once(self, request: Request) -> Answer:
        import openai

        urls = [_url(self._images[number], request.kind == "broken") for number in request.images]
        content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": request.question})
        extra: dict[str, Any] = {"add_special_tokens": True, "return_tokens_as_token_ids": True}
        if request.has_asked:
            extra["mm_processor_kwargs"] = {"tokenprune": request.asked}
        arguments: dict[str, Any] = dict(
            model="served" + (f":{request.profile}" if request.profile else ""), temperature=0, max_tokens=6,
            messages=[{"role": "user", "content": content}], extra_body=extra,
        )  # fmt: skip
        try:
            if request.leaves is not None:
                stream = await self._client.chat.completions.create(stream=True, **arguments)
                for _ in range(request.leaves):
                    await anext(aiter(stream), None)
                await stream.close()
                return Answer(200)
            reply = await self._client.chat.completions.create(logprobs=True, top_logprobs=3, **arguments)
        except openai.APIStatusError as error:
            return Answer(error.status_code, said=str(error))
        steps = reply.choices[0].logprobs.content
        likely = {(place, _id(one.token)): one.logprob for place, step in enumerate(steps) for one in step.top_logprobs}
        return Answer(200, tuple(_id(step.token) for step in steps), likely)

    async def all(self, requests: Sequence[Request], at_once: int) -> list[Answer]:
        """Ask all, so many at a time; then the client is closed."""
        gate = asyncio.Semaphore(at_once)

        async def one(request: Request) -> Answer:
            async with gate:
                return await self.ask(request)

        async with self._client:
            return await asyncio.gather(*map(one, requests))


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="in each round")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--images", type=int, default=12, help="from how many images the requests choose")
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="arguments of both servers, last")
    args = parser.parse_args()

    from rich.console import Console
    from serving import served

    from tokenprune_demo.heldout import load_heldout

    examples = load_heldout()
    images = {example.path: example for example in examples}.values()
    examples, questions = list(images)[: args.images], sorted({example.question for example in examples})[:20]
    names = ["served", *(f"served:{name}" for name in PROFILES)]
    arguments = [
        "--dtype", "float32", "--block-size", "32", "--enforce-eager", "--max-model-len", "640", "--max-num-seqs", "16",
        "--served-model-name", *names, "--mm-processor-kwargs", json.dumps({"tokenprune": SERVER}), *args.server,
    ]  # fmt: skip
    console, rounds = Console(), []
    with served(str(MODEL), arguments, console) as url:
        for number in range(args.rounds):
            asked = draw(args.requests, number, questions, args.images)
            client = Client(url, examples)
            rounds.append((asked, asyncio.run(client.all(asked, args.at_once))))
            console.log(f"round {number}: {memory() / 2**20:.0f} MiB")
            statuses = collections.Counter((one.kind, answer.status) for one, answer in zip(*rounds[-1], strict=True))
            console.log(", ".join(f"{kind} {status}: {count}" for (kind, status), count in sorted(statuses.items())))
    pairs = [pair for asked, answers in rounds for pair in zip(asked, answers, strict=True)]
    failed, compared = [f"{one}: {answer.said}" for one, answer in pairs if answer.status >= 500], 0
    without = [*arguments, "--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]
    with served(str(MODEL), without, console) as url:
        for number, (asked, answers) in enumerate(rounds):
            kept = [pair for pair in zip(asked, answers, strict=True) if pair[0].leaves is None]
            alone = asyncio.run(Client(url, examples).all([request for request, _ in kept], 1))
            for (request, answer), other in zip(kept, alone, strict=True):
                compared += 1
                failed += [f"round {number}, {request}: {text}" for text in differences(answer, other)]
    for line in failed:
        console.log(line)
    again = sum(answer.again for _, answer in pairs)
    console.print(f"{compared} answers compared, {len(failed)} differ, {again} came at the second try")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
