# SPDX-License-Identifier: Apache-2.0
"""Clients of vLLM's OpenAI server: a clip, requests with it, concurrent clients, and the summary of their answers."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

QUESTION = "What happens in the video?"
_PREFIX = b"data: "
# Histograms of vLLM's /metrics, by the key of a row that has their mean.
STAGES = {
    "queue_ms": "vllm:request_queue_time_seconds",
    "prefill_ms": "vllm:request_prefill_time_seconds",
    "decode_ms": "vllm:request_decode_time_seconds",
}


def draw_clip(path: Path, width: int, height: int, frames: int, fps: float) -> bytes:
    """Write an mp4 with a still ground, a moving disc and a flickering corner, and return its bytes."""
    import cv2
    import numpy as np

    rng = np.random.default_rng(0)

    def blocks(columns: int, rows: int, size: tuple[int, int]) -> Any:
        return cv2.resize(rng.integers(0, 256, (rows, columns, 3), dtype=np.uint8), size)

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, (width, height))
    ground = blocks(32, 18, (width, height))
    for index in range(frames):
        frame = ground.copy()
        frame[: height // 4, : width // 4] = blocks(16, 9, (width // 4, height // 4))
        center = (width * index // frames, height // 2)
        cv2.circle(frame, center, height // 6, (20, 200, 240), -1)
        writer.write(frame)
    writer.release()
    return path.read_bytes()


def build_body(model: str, answer: int, clip: bytes | None, uuid: str | None) -> bytes:
    """Return the JSON of a chat request that writes exactly `answer` tokens.

    Args:
        model: Name of the served model, with a profile.
        answer: Number of tokens to write.
        clip: The file of the video, or None for a video that the server has preprocessed under `uuid`.
        uuid: The name of the video in the server's caches. None: the hash of its content.
    """
    url = None if clip is None else {"url": "data:video/mp4;base64," + base64.b64encode(clip).decode()}
    video = {"type": "video_url", "video_url": url} | ({} if uuid is None else {"uuid": uuid})
    content = [video, {"type": "text", "text": QUESTION}]
    body = {
        "model": model, "messages": [{"role": "user", "content": content}], "max_tokens": answer, "temperature": 0.0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(body).encode()


class Answer(NamedTuple):
    """Times of a request, in seconds of one clock: sent, first token, last token; and its tokens."""

    sent: float
    first: float
    last: float
    prompt: int
    tokens: int


class Reader:
    """Read the events of one streamed answer."""

    def __init__(self, sent: float) -> None:
        self.sent, self.first, self.last, self.usage = sent, 0.0, 0.0, None

    def feed(self, line: bytes, now: float) -> None:
        """Read a line. Raises RuntimeError if the server reports an error."""
        if not line.startswith(_PREFIX) or line.startswith(b"data: [DONE]"):
            return
        # Thousands of events are tokens. They are not parsed, as the client must not be the bottleneck.
        event = json.loads(line.removeprefix(_PREFIX)) if b'"choices":[]' in line or b'"error"' in line else {}
        if "error" in event:
            raise RuntimeError(f"the server answered {event['error']}")
        if event.get("usage"):
            self.usage = event["usage"]
        else:
            self.first, self.last = self.first or now, now

    def answer(self, expected: int) -> Answer:
        """Return the answer. Raises RuntimeError unless it has the expected number of tokens."""
        tokens = self.usage["completion_tokens"] if self.usage else 0
        if tokens != expected:
            raise RuntimeError(f"the answer has {tokens} tokens instead of {expected}")
        return Answer(self.sent, self.first, self.last, self.usage["prompt_tokens"], tokens)


async def _ask(session: Any, url: str, body: bytes, expected: int) -> Answer:
    reader = Reader(time.perf_counter())
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            reader.feed(line, time.perf_counter())
    return reader.answer(expected)


def ask_all(url: str, bodies: Sequence[bytes], clients: int, expected: int) -> list[Answer]:
    """Send requests from concurrent clients. A client sends its next request after its last answer."""
    import aiohttp

    async def run() -> list[Answer]:
        waiting, answers = iter(bodies), []

        async def client(session: Any) -> None:
            for body in waiting:
                try:
                    answers.append(await _ask(session, url, body, expected))
                except aiohttp.ClientError as error:
                    raise RuntimeError(f"the connection broke: {error!r}") from error

        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))
        return answers

    return asyncio.run(run())


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def summarize(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return throughput and times of a pass: from the first request sent to the last token of all requests."""
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    first = [1000 * (answer.first - answer.sent) for answer in answers]
    steps = [1000 * (answer.last - answer.first) / max(1, answer.tokens - 1) for answer in answers]
    return {
        "requests": len(answers), "prompt": round(statistics.mean(answer.prompt for answer in answers)),
        "rate": len(answers) / seconds, "token_rate": sum(answer.tokens for answer in answers) / seconds,
        "first_p50_ms": percentile(first, 0.5), "first_p99_ms": percentile(first, 0.99),
        "step_p50_ms": percentile(steps, 0.5), "step_p99_ms": percentile(steps, 0.99),
    }  # fmt: skip


def read_totals(page: str) -> dict[str, tuple[float, float]]:
    """Return sum and count of each histogram of `STAGES` in the text of /metrics, over all labels."""
    totals = {}
    for name in STAGES.values():
        sums = [re.findall(rf"^{name}_{kind}(?:{{.*}})? (\S+)$", page, re.MULTILINE) for kind in ("sum", "count")]
        totals[name] = tuple(sum(map(float, values)) for values in sums)
    return totals


def mean_stages(before: str, after: str) -> dict[str, float]:
    """Return vLLM's mean milliseconds per request between two texts of /metrics, by stage."""
    first, last = read_totals(before), read_totals(after)
    means = {}
    for key, name in STAGES.items():
        seconds, count = (end - begin for begin, end in zip(first[name], last[name], strict=True))
        means[key] = 1000 * seconds / count if count else 0.0
    return means
