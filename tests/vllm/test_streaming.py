# SPDX-License-Identifier: Apache-2.0
"""A stream of inputs to one request, as in docs/guides/chats.md: images one by one, with questions between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import stop
from tokenprune_demo import MODELS
from tokenprune_demo.heldout import FOLDER

TAGS = {"demo_vlm": "<image>", "demo_qwen": "<|vision_start|><|image_pad|><|vision_end|>"}
ASKED = ("what color is the circle? ", "how many are there? ")
ANSWER = 4  # tokens
pytestmark = pytest.mark.only_v1("V2 was not tried")


class Streamer:
    """An engine in a separate process that accepts streams."""

    def __init__(self, model: Path, setting: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = dict(dtype="float32", enforce_eager=True, max_num_seqs=2, block_size=32, disable_log_stats=True)
        limits = {"image": 4}
        self.llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                str(model), limit_mm_per_prompt=limits, mm_processor_kwargs={"tokenprune": setting}, **options
            )
        )

    def ids(self, text: str) -> list[int]:
        return self.llm.renderer.get_tokenizer().encode(text, add_special_tokens=False)

    async def input(self, ids: list[int], images: list[Image.Image], override: Any = None) -> Any:
        """Return a prompt, or a part of a prompt, as an input of the engine."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if images:
            prompt |= {"multi_modal_data": {"image": images}, "mm_processor_kwargs": {"tokenprune": override or {}}}
        (rendered,) = await self.llm.renderer.render_cmpl_async([parse_model_prompt(self.llm.model_config, prompt)])
        return rendered

    async def answer(self, prompt: Any, name: str, steps: int = ANSWER) -> list[tuple[int, dict[int, float]]]:
        """Return the generated tokens, each with the log-probabilities of the likeliest tokens.

        A stream returns the tokens of all its inputs. The prefix cache is not used.
        """
        await self.llm.reset_prefix_cache()
        tokens = []
        async for output in self.llm.generate(prompt, params(steps), name):
            (completion,) = output.outputs
            likely = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
            tokens += zip(completion.token_ids, likely, strict=True)
            assert output.num_cached_tokens in (None, 0)
        return tokens


def params(steps: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=steps, logprobs=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


@pytest.mark.parametrize("name", TAGS)
def test_streamed_images_match_one_prompt(name: str) -> None:
    """A question stays in the stream, with its answer except for the last token."""
    stop()
    model = MODELS["demo_vlm"].parent / name
    images = [Image.open(path) for path in sorted(FOLDER.glob("pictures/00[0-2].jpg"))]
    setting = {"method": "divprune", "keep": {"keep": 0.25, "age": [[0, 1.0], [1, 0.5]]}}

    async def run() -> None:
        streamer = Streamer(model, setting)
        try:
            await check(streamer)
        finally:
            streamer.llm.shutdown()

    async def check(streamer: Streamer) -> None:
        from vllm.engine.protocol import StreamingInput

        parts = [f"user: {TAGS[name]} ", f"{TAGS[name]} ", f"{TAGS[name]} "]
        image_inputs = [
            await streamer.input(streamer.ids(part), [image]) for part, image in zip(parts, images, strict=True)
        ]
        questions = [await streamer.input(streamer.ids(question), []) for question in ASKED]

        async def stream() -> AsyncIterator[Any]:
            for stream_input in image_inputs:
                yield StreamingInput(stream_input, params(1))
            for stream_input in questions:
                yield StreamingInput(stream_input, params(ANSWER))

        streamed = await streamer.answer(stream(), "stream")
        assert len(streamed) == len(image_inputs) + 2 * ANSWER
        first, second = streamed[len(image_inputs) : -ANSWER], streamed[-ANSWER:]
        ids = streamer.ids("".join(parts) + ASKED[0])
        second_ids = ids + [token for token, _ in first[:-1]] + streamer.ids(ASKED[1])
        for index, (prompt_ids, actual) in enumerate(((ids, first), (second_ids, second))):
            # Each image enters separately, so no image has aged.
            prompt = await streamer.input(prompt_ids, images, {"keep": 0.25})
            check_same(await streamer.answer(prompt, f"whole {index}"), actual)

    asyncio.run(run())


def check_same(first: list[tuple[int, dict[int, float]]], second: list[tuple[int, dict[int, float]]]) -> None:
    assert [token for token, _ in first] == [token for token, _ in second]
    for (_, first_logprobs), (_, second_logprobs) in zip(first, second, strict=True):
        for token in first_logprobs.keys() & second_logprobs.keys():
            assert first_logprobs[token] == pytest.approx(second_logprobs[token], abs=1e-4)


def test_features_that_vllm_lacks() -> None:
    """Update docs/guides/chats.md if vLLM adds one: sessions can then support more."""
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert [field.name for field in fields(StreamingInput)] == ["prompt", "sampling_params"]
    assert hasattr(Scheduler, "_update_request_as_session")
    lacking = [
        (AsyncLLM, "truncate_session"),
        (AsyncLLM, "evict_session_token_range"),
        (KVCacheManager, "evict_token_range_for_request"),
        (GPUModelRunner, "_post_add_requests"),
    ]
    assert [name for owner, name in lacking if hasattr(owner, name)] == []
