# SPDX-License-Identifier: Apache-2.0
"""`stats(model)` describes the last call with images of the thread that asks."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import tokenprune
from zoo import FAMILIES

LLAVA = FAMILIES["llava"]


def text_of(inputs: Any) -> dict[str, torch.Tensor]:
    ids = torch.full_like(inputs["input_ids"][:, :6], 7)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
@pytest.mark.parametrize("method", ["divprune", "fastv", "tome", "dyrate"])
def test_guidance_keeps_the_statistics_of_the_images(method: str, build) -> None:
    """The unconditional stream of `guidance_scale` reads a prompt without images."""
    model, inputs = build(LLAVA), LLAVA.make_inputs()
    with tokenprune.patched(model, method, keep=0.4) if method != "dyrate" else tokenprune.patched(model, method):
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        want = tokenprune.stats(model).sums() | {"overhead_ms": None}
        model.generate(**inputs, max_new_tokens=3, do_sample=False, guidance_scale=1.5)
        got = tokenprune.stats(model).sums() | {"overhead_ms": None}
    assert got == want and want["visual_tokens_in"]


@torch.no_grad()
def test_a_prompt_of_text_keeps_the_statistics_of_the_images(build) -> None:
    model, inputs = build(LLAVA), LLAVA.make_inputs()
    with tokenprune.patched(model, "divprune", keep=0.4):
        model(**text_of(inputs))
        assert tokenprune.stats(model).visual_tokens_in == 0
        model(**inputs)
        stats = tokenprune.stats(model)
        model.generate(**text_of(inputs), max_new_tokens=2)
        assert tokenprune.stats(model) is stats and stats.visual_tokens_in


@torch.no_grad()
def test_each_thread_sees_its_own_last_call(build) -> None:
    model, prompts = build(LLAVA), [LLAVA.make_inputs(images=(count,)) for count in (1, 2, 3)]
    seen: list[int] = [0] * len(prompts)
    ran = threading.Barrier(len(prompts))

    def run(index: int) -> None:
        with torch.no_grad():
            model.generate(**prompts[index], max_new_tokens=2, do_sample=False)
        ran.wait(60)
        seen[index] = tokenprune.stats(model).visual_tokens_in

    with tokenprune.patched(model, "divprune", keep=0.4):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [int(LLAVA.visual_mask(model, inputs).sum()) for inputs in prompts]
        # This thread ran nothing, as one that reads a TextIteratorStreamer: it sees the last call of another thread.
        assert tokenprune.stats(model).visual_tokens_in in seen
        model(**LLAVA.make_inputs(images=(1,)))
        assert tokenprune.stats(model).visual_tokens_in == seen[0]


@torch.no_grad()
def test_a_copy_starts_with_the_statistics_of_its_original() -> None:
    model, inputs = LLAVA.build(), LLAVA.make_inputs()
    with tokenprune.patched(model, "divprune", keep=0.4):
        model(**inputs)
        other = copy.deepcopy(model)
        model(**LLAVA.make_inputs(images=(2, 1)))
        assert 0 < tokenprune.stats(other).visual_tokens_in < tokenprune.stats(model).visual_tokens_in
