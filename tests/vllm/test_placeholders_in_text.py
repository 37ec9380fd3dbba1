# SPDX-License-Identifier: Apache-2.0
"""Placeholders where a chat template puts none, on models with M-RoPE: at "off" the answers are those of vLLM alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE, Engine
from tokenprune.errors import OptionError

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_off_is_what_vllm_has(start: Callable[..., Engine], name: str) -> None:
    checkpoint = CHECKPOINTS[name]
    prompts = [
        (1, checkpoint.prompt(1, f"what does {IMAGE} mean? ")),
        (1, checkpoint.prompt(1, f"and {IMAGE}{IMAGE}{VIDEO}? ")),
        (0, f"what does {IMAGE} mean? "),
        (2, f"look: {IMAGE}{IMAGE} what is it? "),
        (1, f"look: {IMAGE}"),
        (2, checkpoint.prompt(2, "what is it? ")),
    ]

    def answers(setting: Any, override: Any = None) -> list[tuple[list[int], list[int], list[float]]]:
        engine = start(name, setting)
        requests = [engine.request(prompt, checkpoint.images(count), override) for count, prompt in prompts]
        if setting is not None:
            for one in (requests[0], requests[3], requests[4]):
                with pytest.raises(
                    OptionError, match=r"placeholders for|two images follow each other|ends with an image"
                ):
                    engine.generate([one | {"mm_processor_kwargs": {"tokenprune": {"keep": 0.5}}}])
        found = []
        for output in engine.generate(requests):
            answer = output.outputs[0]
            likely = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
            found.append((list(output.prompt_token_ids), list(answer.token_ids), likely))
        return found

    alone, ours = answers(None), answers(DIVPRUNE, {"off": True})
    for wanted, found in zip(alone, ours, strict=True):
        assert found[:2] == wanted[:2]
        assert found[2] == pytest.approx(wanted[2], abs=1e-5)
