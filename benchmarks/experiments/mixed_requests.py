# SPDX-License-Identifier: Apache-2.0
"""Requests of many kinds to a vLLM server, and the comparison of their answers. Used by mixed_load.py."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PROFILES = ("fast", "pooled", "ocr")
OWN = [
    {"keep": 0.5}, {"method": "pool"}, {"off": True}, {"profile": "fast", "keep": 0.3}, {"method": "random", "seed": 3},
]  # fmt: skip
WRONG = [
    {"keep": 0.01}, {"keep": 2.0}, {"keep": 64}, {"method": "fastv"}, {"method": "divprun"}, {"profile": "fsat"},
    "fast", {"profile": "ocr", "min_keep": 0.01}, {"method": [{"method": ["pool"]}]}, {"config": "/etc/passwd"}, None,
    {"x": 1},
]  # fmt: skip
KINDS = {"setting": 4, "profile": 3, "name": 3, "default": 3, "wrong": 2, "broken": 1, "leaves": 2, "gone": 1}
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        kind: A key of KINDS.
        images: Indices of held-out images.
        leaves: Number of events after which the client disconnects, None if it stays. For kind "gone": hundredths of a
            second.
    """

    kind: str
    images: tuple[int, ...]
    question: str
    profile: str | None = None
    asked: Any = field(default=None, hash=False)
    has_asked: bool = False
    leaves: int | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: HTTP status, 0 if the client disconnected earlier.
        tokens: Token ids.
        logprobs: Log-probabilities of the chosen and the most likely tokens, by position and token id.
        said: Text of an error.
        served: The header `x-tokenprune`.
        again: Whether the second try succeeded.
    """

    status: int
    tokens: tuple[int, ...] = ()
    logprobs: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    said: str = ""
    served: str = ""
    again: bool = False

    @property
    def record(self) -> dict[str, str]:
        """The fields of the header, empty without a header."""
        method, _, rest = self.served.partition(";")
        return {"method": method} | dict(part.split("=", 1) for part in rest.split(";")) if method else {}


def draw(seed: int, questions: Sequence[str], images: int) -> Iterator[Request]:
    """Yield an endless sequence of requests of all kinds, reproducible by seed, on a number of images."""
    choice = random.Random(seed)
    while True:
        kind = choice.choices(list(KINDS), list(KINDS.values()))[0]
        # Image 0 is repeated often, and a prompt may have two images.
        indices = tuple(choice.choice([0, choice.randrange(images)]) for _ in range(choice.choice([1, 1, 1, 2])))
        settings = {"setting": OWN, "wrong": WRONG, "profile": [{"profile": profile} for profile in PROFILES]}.get(kind)
        yield Request(
            kind,
            indices,
            choice.choice(questions),
            choice.choice(PROFILES) if kind == "name" else None,
            None if settings is None else choice.choice(settings),
            settings is not None,
            choice.randrange(3) if kind in ("leaves", "gone") else None,
        )


def alone(request: Request, answer: Answer) -> Request:
    """Return a request for the setting that served `request`. The profiles of the server may have changed since."""
    served = answer.record
    named = request.kind in ("name", "profile", "default") or "profile" in (request.asked or {})
    if not served or not named:
        return request
    setting = (
        {"off": True} if served["method"] == "off" else {"method": served["method"], "keep": float(served["keep"])}
    )
    return replace(request, kind="setting", profile=None, asked=setting, has_asked=True)


def differences(answer: Answer, other: Answer) -> list[str]:
    """Describe the differences between two answers to the same request, empty if they are equal."""
    if answer.status != other.status:
        return [f"status {answer.status}, expected {other.status}"]
    if answer.tokens != other.tokens:
        return [f"tokens {answer.tokens}, expected {other.tokens}"]
    common = answer.logprobs.keys() & other.logprobs
    gap = max((abs(answer.logprobs[key] - other.logprobs[key]) for key in common), default=0)
    return [f"log-probabilities differ by {gap:.1e}"] if gap > TOLERANCE else []


# -- client


def _url(image: Any, broken: bool) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = buffer.getvalue()[: 200 if broken else None]
    return "data:image/png;base64," + base64.b64encode(data).decode()


class Client:
    def __init__(self, url: str, examples: Sequence[Any]) -> None:
        import openai

        # The server closes a connection after 5 idle seconds, possibly while a request is being sent on it.
        options: dict[str, Any] = {"timeout": 300, "max_retries": 0, "default_headers": {"Connection": "close"}}
        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", **options)
        self._images = [example.image for example in examples]

    async def ask(self, request: Request) -> Answer:
        """Return the server's answer. Retry once after HTTP 500."""
        answer = await self._once(request)
        return answer if answer.status != 500 else replace(await self._once(request), again=True)

    async def _once(self, request: Request) -> Answer:
        import openai

        urls = [_url(self._images[index], request.kind == "broken") for index in request.images]
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
            if request.kind == "gone":
                call = self._client.chat.completions.create(**arguments)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(call, (request.leaves or 0) / 100)
                return Answer(0)
            if request.leaves is not None:
                raw = await self._client.chat.completions.with_raw_response.create(stream=True, **arguments)
                stream = raw.parse()
                for _ in range(request.leaves):
                    await anext(aiter(stream), None)
                await stream.close()
                return Answer(200, served=raw.headers.get("x-tokenprune", ""))
            raw = await self._client.chat.completions.with_raw_response.create(
                logprobs=True, top_logprobs=3, **arguments
            )
        except openai.APIStatusError as error:
            return Answer(error.status_code, said=str(error))
        steps = raw.parse().choices[0].logprobs.content
        likely = {
            (position, _id(candidate.token)): candidate.logprob
            for position, step in enumerate(steps)
            for candidate in step.top_logprobs
        }
        return Answer(200, tuple(_id(step.token) for step in steps), likely, served=raw.headers.get("x-tokenprune", ""))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))
