# SPDX-License-Identifier: Apache-2.0
"""Placeholders that no chat template writes, on models with M-RoPE: with "off" the answers match unpatched vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE, Engine
from tokenprune.errors import OptionError

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_off_matches_vllm(start: Callable[..., Engine], name: str) -> None:
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
            for request in (requests[0], requests[3], requests[4]):
                with pytest.raises(
                    OptionError, match=r"placeholders for|two images follow each other|ends with an image"
                ):
                    engine.generate([request | {"mm_processor_kwargs": {"tokenprune": {"keep": 0.5}}}])
        results = []
        for output in engine.generate(requests):
            answer = output.outputs[0]
            likely = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
            results.append((list(output.prompt_token_ids), list(answer.token_ids), likely))
        return results

    plain, ours = answers(None), answers(DIVPRUNE, {"off": True})
    for expected, actual in zip(plain, ours, strict=True):
        assert actual[:2] == expected[:2]
        assert actual[2] == pytest.approx(expected[2], abs=1e-5)
