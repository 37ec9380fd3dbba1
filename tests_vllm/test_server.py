# SPDX-License-Identifier: Apache-2.0
"""The OpenAI server with its engine in a process of its own, spoken to as a client does."""

from __future__ import annotations

import base64
import io
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE, stop

NAME = "qwen2_5_vl"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
STEPS = 4


@pytest.fixture(scope="module")
def server(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    stop()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = tmp_path_factory.mktemp("server")
    (place / "template.jinja").write_text(TEMPLATE)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder(NAME)),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", "32",
        "--max-num-batched-tokens", "256", "--chat-template", str(place / "template.jinja"),
        "--trust-request-mm-kwargs",
        "--mm-processor-kwargs", '{"tokenprune": {"method": "divprune", "keep": 0.25}}',
    ]  # fmt: skip
    with (place / "log").open("w") as log:
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 420
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    alive = process.poll() is None and time.monotonic() < deadline
                    assert alive, (place / "log").read_text()[-4000:]
                    time.sleep(1)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300, max_retries=0)
        finally:
            process.terminate()
            process.wait(60)


def ask(server: openai.OpenAI, images: list[Any], text: str, override: Any = None) -> Any:
    content: list[dict[str, Any]] = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": text})
    extra: dict[str, Any] = {"return_tokens_as_token_ids": True, "ignore_eos": True}
    if override is not None:
        extra["mm_processor_kwargs"] = {"tokenprune": override}
    return server.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=STEPS, logprobs=True,
        top_logprobs=5, extra_body=extra,
    )  # fmt: skip


def prompt(images: int, text: str) -> str:
    return "\n".join([CHECKPOINTS[NAME].picture] * images + [text])


def check(reply: Any, reference: Any, images: list[Any], text: str, override: Any) -> None:
    setting = None if (override or {}).get("off") else DIVPRUNE | (override or {})
    tokens, logprobs = reference(NAME).greedy(prompt(len(images), text), images, STEPS, setting)
    steps = reply.choices[0].logprobs.content
    assert [int(step.token.removeprefix("token_id:")) for step in steps] == tokens
    for number, step in enumerate(steps):
        for likely in step.top_logprobs:
            token = int(likely.token.removeprefix("token_id:"))
            assert likely.logprob == pytest.approx(float(logprobs[number, token]), abs=1e-4)


def test_requests_override_the_server(server: openai.OpenAI, reference: Any) -> None:
    images = CHECKPOINTS[NAME].pictures(2)
    lengths = []
    for override in (None, {"keep": 0.5}, {"method": "pool", "keep": 5}, {"off": True}):
        reply = ask(server, images, "what is it? ", override)
        check(reply, reference, images, "what is it? ", override)
        lengths.append(reply.usage.prompt_tokens)
    full = reference(NAME).inputs(prompt(2, "what is it? "), images)["input_ids"]
    pads = int((full == reference(NAME).model.config.image_token_id).sum())
    assert pads == 70  # 35 each
    text = full.numel() - pads
    assert lengths == [text + 2 * 9, text + 2 * 18, text + 2 * 5, text + 70]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"method": "divprun"}, "did you mean 'divprune'"),
        ({"method": "fastv"}, "cannot be served by vLLM"),
        ({"keep": 1.5}, "is no share"),
        ({"keep": "half"}, "must be a number"),
        ({"keep": None}, "keep=None"),
        ({"method": {"a": 1}}, "unknown method"),
        ([1, 2], "must be an object"),
        ("divprune", "must be an object"),
        ({"x": "y" * 100_000}, "characters long"),
        ({"seed": 3}, "no option 'seed'"),
    ],
)
def test_bad_input_is_answered(server: openai.OpenAI, reference: Any, override: Any, says: str) -> None:
    """With HTTP 400 and our words; and the server lives on."""
    images = CHECKPOINTS[NAME].pictures(1)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, images, "what? ", override)
    assert caught.value.status_code == 400 and says in str(caught.value)
    check(ask(server, images, "what? "), reference, images, "what? ", None)


def test_a_hundred_at_once(server: openai.OpenAI, reference: Any) -> None:
    draw = random.Random(0)
    overrides = [None, {"keep": 0.5}, {"off": True}, {"method": "uniform"}, {"method": "pool", "keep": 6}, {"keep": 30}]
    cases = [(draw.randrange(3), draw.randrange(1, 3), draw.choice(overrides)) for _ in range(100)]

    def answer(case: Any) -> Any:
        seed, count, override = case
        return ask(server, CHECKPOINTS[NAME].pictures(count, seed=seed), "and? ", override)

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(answer, cases))
    seen = set()
    for (seed, count, override), reply in zip(cases, replies, strict=True):
        key = (seed, count, str(override))
        text = str([step.token for step in reply.choices[0].logprobs.content])
        if key not in {one[0] for one in seen}:
            check(reply, reference, CHECKPOINTS[NAME].pictures(count, seed=seed), "and? ", override)
        seen.add((key, text))
    assert len(seen) == len({key for key, _ in seen}), "one request was answered in two ways"
