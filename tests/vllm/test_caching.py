# SPDX-License-Identifier: Apache-2.0
"""Caches and chunked prefill: chunks of 24 tokens split every image, and the prefix cache keeps their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoints import Checkpoint
from conftest import DIVPRUNE, ORIGINAL, Engine

CHUNK, BLOCK = 24, 32
ONE = {"keep": 30}  # more than a chunk in every family
VSCAN = {"method": "vscan", "stage2": False}  # reads the tower
TOME = {"method": "tome", "keep": 0.7}  # merges in the tower


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine]) -> Engine:
    # Mistral 3 has text within an image; with original positions, its positions do not change.
    setting = DIVPRUNE | (ORIGINAL if request.param == "mistral3" else {})
    return start(request.param, setting, max_num_batched_tokens=CHUNK)


def test_chunks_split_images(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    engine.forget()
    prompt, images = checkpoint.prompt(2), checkpoint.images(2)
    overrides = [ONE, {"off": True}, {}, VSCAN, *([] if checkpoint.name == "mistral3" else [TOME])]
    engine.check(reference, [(prompt, images, override) for override in overrides])


def test_chunks_split_videos(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.video is None:
        pytest.skip(f"{checkpoint.name} takes no video here")
    engine.forget()
    cases = [checkpoint.video_case(override) for override in ({"keep": 0.5}, {}, {"keep": 0.5, "per": "frame"})]
    for _ in range(2):  # the second round hits the prefix cache
        outputs = engine.check(reference, cases)
    assert all(output.num_cached_tokens >= BLOCK for output in outputs)


def test_a_second_time_from_the_cache(
    engine: Engine, reference: Any, checkpoint: Checkpoint, encoder_calls: list[int]
) -> None:
    prompt, images = checkpoint.prompt(1, "what is it, and where? "), checkpoint.images(1)
    hits = []
    for _ in range(2):
        (output,) = engine.check(reference, [(prompt, images, ONE)])
        hits.append(output.num_cached_tokens)
    assert hits[0] == 0 and hits[1] >= BLOCK, hits
    assert encoder_calls == [1]

    # The same image with another question. Kept tokens stay in the cache, even if the hit ends within the image.
    other = checkpoint.prompt(1, "something else altogether? ")
    (output,) = engine.check(reference, [(other, images, ONE)])
    assert output.num_cached_tokens >= BLOCK


def test_settings_share_no_cache(
    engine: Engine, reference: Any, checkpoint: Checkpoint, encoder_calls: list[int]
) -> None:
    """Blocks contain only placeholders of the same id, so only the item's hash separates settings."""
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    settings = [ONE, {"keep": 31}, {"method": "uniform", "keep": 30}, {"method": "pool", "keep": 30}, {"off": True}]
    for override in settings:
        (output,) = engine.check(reference, [(prompt, images, override)])
        assert output.num_cached_tokens == 0
    assert encoder_calls == [1] * len(settings)
    # Another spelling of the first setting.
    (output,) = engine.generate([engine.request(prompt, images, {"method": "divprune", "keep": 30})])
    assert output.num_cached_tokens >= BLOCK


def test_the_encoder_gets_what_its_memory_was_measured_for(
    engine: Engine, checkpoint: Checkpoint, encoder_calls: list[int]
) -> None:
    """Both pruned images fit into a chunk and into the scheduler's budget, which one unpruned image fills."""
    engine.generate([engine.request(checkpoint.prompt(2), checkpoint.images(2), {"keep": 2})])
    assert encoder_calls == [1, 1]


def test_batched_requests_match_single_requests(engine: Engine, checkpoint: Checkpoint) -> None:
    overrides = [{}, ONE, {"off": True}, {"method": "pool", "keep": 0.5}, {"method": "random", "seed": 2}, VSCAN] * 2
    requests = []
    for i, override in enumerate(overrides):
        prompt, images = checkpoint.prompt(1 + i % 3, f"case {i % 4}? "), checkpoint.images(1 + i % 3, seed=i)
        requests.append(engine.request(prompt, images, override))
    engine.forget()
    batched = engine.generate(requests)
    for request, answer in zip(requests, batched, strict=True):
        engine.forget()
        (single,) = engine.generate([request])
        assert list(single.prompt_token_ids) == list(answer.prompt_token_ids)
        for single_step, batched_step in zip(single.outputs[0].logprobs, answer.outputs[0].logprobs, strict=True):
            for token in single_step.keys() & batched_step.keys():
                assert single_step[token].logprob == pytest.approx(batched_step[token].logprob, abs=1e-4)
        assert list(single.outputs[0].token_ids) == list(answer.outputs[0].token_ids)


@pytest.mark.only_v1("V2 was not tried")
def test_reloaded_weights(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    """Reload weights after a sleep of level 2. On a CPU vLLM keeps them, so the test overwrites them."""
    prompt, images = checkpoint.prompt(2), checkpoint.images(2)
    requests = [engine.request(prompt, images, override) for override in ({}, VSCAN)]
    engine.generate(requests, 1)
    engine.llm.sleep(2)
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.fill_(float("nan"))
    engine.llm.wake_up()
    engine.llm.collective_rpc("reload_weights")
    engine.llm.llm_engine.reset_mm_cache()
    for override, output in zip(({}, VSCAN), engine.generate(requests), strict=True):
        engine.compare(reference, output, prompt, images, override)
        assert output.num_cached_tokens == 0
