# SPDX-License-Identifier: Apache-2.0
"""A stream of inputs to one request, as docs/guides/chats.md says of it: images enter one by one, and questions
between."""

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
    """An engine that takes streams, in a process of its own."""

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
        """Return a prompt, or a part of one, as the engine takes it."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if images:
            prompt |= {"multi_modal_data": {"image": images}, "mm_processor_kwargs": {"tokenprune": override or {}}}
        (made,) = await self.llm.renderer.render_cmpl_async([parse_model_prompt(self.llm.model_config, prompt)])
        return made

    async def answer(self, prompt: Any, name: str, steps: int = ANSWER) -> list[tuple[int, dict[int, float]]]:
        """Return the tokens written, each with the log-probabilities of the likeliest; of a stream those of all its
        inputs. Nothing comes from the prefix cache."""
        await self.llm.reset_prefix_cache()
        found = []
        async for output in self.llm.generate(prompt, params(steps), name):
            (one,) = output.outputs
            likely = [{token: each.logprob for token, each in place.items()} for place in one.logprobs]
            found += zip(one.token_ids, likely, strict=True)
            assert output.num_cached_tokens in (None, 0)
        return found


def params(steps: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=steps, logprobs=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


@pytest.mark.parametrize("name", TAGS)
def test_images_that_come_one_by_one_are_answered_as_one_prompt(name: str) -> None:
    """A question stays in the stream, with its answer but for the last token."""
    stop()
    model = MODELS["demo_vlm"].parent / name
    images = [Image.open(one) for one in sorted(FOLDER.glob("pictures/00[0-2].jpg"))]
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
        shown = [await streamer.input(streamer.ids(part), [one]) for part, one in zip(parts, images, strict=True)]
        questions = [await streamer.input(streamer.ids(one), []) for one in ASKED]

        async def stream() -> AsyncIterator[Any]:
            for one in shown:
                yield StreamingInput(one, params(1))
            for one in questions:
                yield StreamingInput(one, params(ANSWER))

        streamed = await streamer.answer(stream(), "stream")
        assert len(streamed) == len(shown) + 2 * ANSWER
        first, second = streamed[len(shown) : -ANSWER], streamed[-ANSWER:]
        ids = streamer.ids("".join(parts) + ASKED[0])
        again = ids + [token for token, _ in first[:-1]] + streamer.ids(ASKED[1])
        for number, (whole, found) in enumerate(((ids, first), (again, second))):
            # Each image came alone, so none of them has aged.
            prompt = await streamer.input(whole, images, {"keep": 0.25})
            same(await streamer.answer(prompt, f"whole {number}"), found)

    asyncio.run(run())


def same(one: list[tuple[int, dict[int, float]]], other: list[tuple[int, dict[int, float]]]) -> None:
    assert [token for token, _ in one] == [token for token, _ in other]
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        for token in mine.keys() & theirs.keys():
            assert mine[token] == pytest.approx(theirs[token], abs=1e-4)


def test_what_the_page_says_is_lacking() -> None:
    """Where one of these is there, docs/guides/chats.md is to be written anew, and more of a session can be had."""
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert [one.name for one in fields(StreamingInput)] == ["prompt", "sampling_params"]
    assert hasattr(Scheduler, "_update_request_as_session")
    lacking = [
        (AsyncLLM, "truncate_session"),
        (AsyncLLM, "evict_session_token_range"),
        (KVCacheManager, "evict_token_range_for_request"),
        (GPUModelRunner, "_post_add_requests"),
    ]
    assert [name for owner, name in lacking if hasattr(owner, name)] == []
