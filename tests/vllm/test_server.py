# SPDX-License-Identifier: Apache-2.0
"""The OpenAI server with its engine in a separate process, called like a client."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from server import CALL, Server, serve, write_messages
from tokenprune import available_methods, method_info
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.settings import Setting
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_bench.vllm_backend import VllmBackend
from tokenprune_bench.vllm_server import ServerEngine

NAME = "qwen2_5_vl"
STEPS = 4


@pytest.fixture(scope="module")
def server(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log_folder = tmp_path_factory.mktemp("server")
    with serve(folder(NAME), log_folder, DIVPRUNE, "--trust-request-mm-kwargs") as running:
        yield running


def ask(server: Server, images: list[Any], text: str, override: Any = None, model: str = "tiny", **more: Any) -> Any:
    extra: dict[str, Any] = {"return_tokens_as_token_ids": True, "ignore_eos": True} | more
    if override is not None:
        extra["mm_processor_kwargs"] = {"tokenprune": override}
    return server.ask(
        model=model, messages=write_messages(images, text), temperature=0, max_tokens=STEPS, logprobs=True,
        top_logprobs=5, extra_body=extra,
    )  # fmt: skip


def prompt(images: int, text: str) -> str:
    return "\n".join([CHECKPOINTS[NAME].image] * images + [text])


def check(reply: Any, reference: Any, images: list[Any], text: str, override: Any) -> None:
    setting = None if (override or {}).get("off") else DIVPRUNE | (override or {})
    tokens, logprobs = reference(NAME).greedy(prompt(len(images), text), images, STEPS, setting)
    steps = reply.choices[0].logprobs.content
    assert [int(step.token.removeprefix("token_id:")) for step in steps] == tokens
    for step_index, step in enumerate(steps):
        for likely in step.top_logprobs:
            token = int(likely.token.removeprefix("token_id:"))
            assert likely.logprob == pytest.approx(float(logprobs[step_index, token]), abs=1e-4)


def test_requests_override_the_server(server: Server, reference: Any) -> None:
    images = CHECKPOINTS[NAME].images(2)
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
        ({"keep": "half"}, "must be a number"),
        ([1, 2], "must be an object"),
        ({"x": "y" * 100_000}, "characters"),
        ({"method": "view_select"}, "needs all images of a prompt"),
    ],
)
def test_bad_settings_are_refused(server: Server, reference: Any, override: Any, says: str) -> None:
    """With HTTP 400, and the server continues. tests/unit/vllm/test_serving.py has all refusals."""
    images = CHECKPOINTS[NAME].images(1)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, images, "what? ", override)
    assert caught.value.status_code == 400 and says in str(caught.value)
    check(ask(server, images, "what? "), reference, images, "what? ", None)


def post_setting(server: Server, setting: str, model: str = "tiny") -> int:
    """Send a setting as JSON that a client would not write; return the status."""
    body = {"model": model, "messages": write_messages(CHECKPOINTS[NAME].images(1), "what? "), "max_tokens": 1}
    text = json.dumps(body | {"mm_processor_kwargs": {"tokenprune": "SETTING"}}).replace('"SETTING"', setting)
    status, _, answer = server.post("/v1/chat/completions", text.encode())
    assert status == 200 or "root:" not in answer, answer
    return status


def test_files_in_requests_are_refused(server: Server, reference: Any, tmp_path: Path) -> None:
    """At any level of a setting. Reading a pipe would block, and the error must not reveal whether a file exists."""
    os.mkfifo(tmp_path / "pipe")
    messages = set()
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", "/etc/passwd", "/dev/zero"):
        dymu = {"method": "dymu", "exact": True, "thresholds": str(path)}
        for setting in (dymu, {"method": dymu}, {"method": [dymu]}, {"method": ["dynres", dymu], "keep": 0.5},
                        {"method": {"method": "dyrate", "rate": "predictor", "predictor": str(path)}}):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match="names a file") as caught:
                ask(server, CHECKPOINTS[NAME].images(1), "what? ", setting)
            messages.add(str(caught.value).replace("predictor of dyrate", "thresholds of dymu"))
    assert len(messages) == 1, messages
    images = CHECKPOINTS[NAME].images(1)
    check(ask(server, images, "what? "), reference, images, "what? ", None)


LITERALS = [
    "0", "1", "-1", "7", "0.5", "1.0", "-0.0", "1e-300", "1e400", "NaN", "-Infinity", "1" + "0" * 400,
    "9223372036854775807", "true", "false", "null", '""', '"x"', '"/etc/passwd"', '"\\ud800"', '"\\u0000"', '"frame"',
    "[]", "{}", "[" * 50 + "]" * 50,
]  # fmt: skip


def draw_setting(draw: random.Random, depth: int = 0) -> str:
    """Draw a setting as JSON: methods and options of this package, and wrong values at any level."""
    options = sorted({option for name in available_methods() for option in method_info(name).options})
    kind = draw.random()
    if depth and kind < 0.5:
        return draw.choice(LITERALS)
    if depth and kind < 0.6:
        return json.dumps(draw.choice(available_methods()))
    if depth and kind < 0.75:
        return "[" + ",".join(draw_setting(draw, depth + 1) for _ in range(draw.randrange(4))) + "]"
    pairs = {}
    if draw.random() < 0.8:
        name = json.dumps(draw.choice(available_methods()))
        pairs["method"] = name if draw.random() < 0.5 else draw_setting(draw, depth + 1)
    for _ in range(draw.randrange(4)):
        key = draw.choice([*options, "keep", "keep", "per", "off", "experimental_in_llm", "config", "\ud800", "x"])
        pairs[key] = draw_setting(draw, depth + 1)
    return "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in pairs.items()) + "}"


def test_random_nested_settings(server: Server, reference: Any) -> None:
    draw = random.Random(0)
    deep, long = "[" * 5000 + "]" * 5000, "[" + "0," * 10**5 + "0]"
    settings = [draw_setting(draw) for _ in range(100)]
    settings += [f'{{"keep": {literal}}}' for literal in [*LITERALS, deep, json.dumps("x" * 100_000)]]
    settings += [f'{{"method": "random", "seed": {literal}}}' for literal in [*LITERALS, deep, long]]
    answered = {setting: post_setting(server, setting) for setting in settings}
    wrong = {setting[:500]: status for setting, status in answered.items() if status not in (200, 400)}
    assert not wrong, server.story(str(wrong))
    assert set(answered.values()) == {200, 400}
    images = CHECKPOINTS[NAME].images(1)
    check(ask(server, images, "what? "), reference, images, "what? ", None)


@pytest.mark.parametrize(
    "wrong", [{"keep": 7.0}, {"method": "divprun"}, {"method": "fastv"}, {"profile": "fsat"}, [1], "divprune"]
)
def test_wrong_setting_is_refused_with_text_only(server: Server, wrong: Any) -> None:
    messages = []
    for images in (CHECKPOINTS[NAME].images(1), []):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, images, "what? ", wrong)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    ask(server, [], "what? ", {"keep": 0.5})


def test_visual_tokens_are_counted(server: Server) -> None:
    """At /metrics, once per request, whether or not a cache has its images. Each image has 35 tokens."""
    name = "tokenprune:visual_tokens_total"
    images = CHECKPOINTS[NAME].images(2, seed=75)

    def added(call: Callable[[], Any]) -> dict[str, float]:
        before = server.counted(name)
        call()
        after = server.counted(name)
        grown = {labels: value - before.get(labels, 0) for labels, value in after.items()}
        return {
            stage: sum(grown[labels] for labels in grown if f'stage="{stage}"' in labels) for stage in ("in", "out")
        }

    for _ in range(2):
        assert added(lambda: ask(server, images, "how many? ")) == {"in": 70, "out": 18}
    assert added(lambda: ask(server, images[:1], "how many? ", {"keep": 5})) == {"in": 35, "out": 5}
    assert added(lambda: ask(server, images, "how many? ", {"off": True})) == {"in": 70, "out": 70}
    assert added(lambda: ask(server, [], "how many? ")) == {"in": 0, "out": 0}

    lengths = []
    small = {"method": ["downsample", "uniform"], "keep": [0.5, 0.5]}
    counted = added(lambda: lengths.append(ask(server, images, "how many? ", small).usage.prompt_tokens))
    lengths.append(ask(server, images, "how many? ", {"off": True}).usage.prompt_tokens)
    assert counted["in"] == 70 and counted["out"] == 70 - (lengths[1] - lengths[0]) < 20

    def refused() -> None:
        with pytest.raises(openai.BadRequestError):
            ask(server, images, "how many? ", {"keep": 7.0})

    assert added(refused) == {"in": 0, "out": 0}


def test_benchmark_of_a_server(server: Server, reference: Any) -> None:
    engine = ServerEngine(f"{server.url}/v1", "tiny")
    images = [CHECKPOINTS[NAME].images(1, seed=seed)[0] for seed in (30, 33, 36)]  # of equal size
    questions = [
        SimpleNamespace(images=(image,), question="what is it? ", answers=("?",), kind="all", is_video=False)
        for image in images
    ]
    backend = VllmBackend(engine, "", 12)
    plan = BenchPlan(methods=("pool",), keeps=(0.25,), batch_size=3, seeds=(0,), repeats=1)
    records = list(Bench(backend, plan, questions=questions).records())
    assert [record["record"] for record in records] == ["header"] + ["result"] * 4
    _, base, random, downsample, pool = records
    assert base["stats"]["visual_tokens_in"] == base["stats"]["visual_tokens_out"] == 3 * 35
    assert random["stats"]["visual_tokens_per_layer"] == pool["stats"]["visual_tokens_per_layer"] == [27] * 3
    assert 0 < downsample["stats"]["visual_tokens_out"] < 50 and downsample["stats"]["visual_tokens_in"] == 105
    shape = DecoderShape.from_config(reference(NAME).model.config.get_text_config())
    text = reference(NAME).inputs(prompt(1, "what is it? "), images[:1])["input_ids"].numel() - 35
    assert pool["stats"]["kv_bytes"] == shape.kv_bytes([3 * (text + 9)] * 3, 4)
    assert all(pool["timing"][name]["p50"] > 0 for name in ("ttft_ms", "token_ms", "ttft_ratio"))
    decode = reference(NAME).processor.tokenizer.decode
    for setting in (None, {"method": "pool", "keep": 0.25}):
        with backend.answering(None if setting is None else Setting.from_json(setting)) as answer:
            answers, _ = answer(0, questions)
        for image, actual in zip(images, answers, strict=True):
            tokens, _ = reference(NAME).greedy(prompt(1, "what is it? "), [image], 12, setting)
            # vLLM omits bytes at the end that are not a complete character.
            assert actual == decode(tokens, skip_special_tokens=True).rstrip("\ufffd").strip() != ""
    engine.close()


def test_a_hundred_at_once(server: Server, reference: Any) -> None:
    draw = random.Random(0)
    overrides = [None, {"keep": 0.5}, {"off": True}, {"method": "uniform"}, {"method": "pool", "keep": 6}, {"keep": 30}]
    overrides += [{"method": "downsample", "keep": 0.4}, {"method": "dynres", "keep": 0.5}]
    cases = [(draw.randrange(3), draw.randrange(1, 3), draw.choice(overrides)) for _ in range(100)]

    def answer(case: Any) -> Any:
        seed, count, override = case
        return ask(server, CHECKPOINTS[NAME].images(count, seed=seed), "and? ", override)

    pool = ThreadPoolExecutor(16)
    try:
        replies = list(pool.map(answer, cases, timeout=2 * CALL))
    except TimeoutError as error:
        raise AssertionError(server.story("not all requests were answered in time")) from error
    finally:
        pool.shutdown(cancel_futures=True)
    answers = set()
    for (seed, count, override), reply in zip(cases, replies, strict=True):
        key = (seed, count, str(override))
        text = str([step.token for step in reply.choices[0].logprobs.content])
        if key not in {answered[0] for answered in answers}:
            check(reply, reference, CHECKPOINTS[NAME].images(count, seed=seed), "and? ", override)
        answers.add((key, text))
    assert len(answers) == len({key for key, _ in answers}), "one request was answered in two ways"
