# SPDX-License-Identifier: Apache-2.0
"""Cuts inside the decoder of every supported family that test_in_llm.py does not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import photo
from conftest import Engine
from runner import IN_LLM
from test_in_llm import build_prompts, check, keep_complete_blocks, setting
from tokenprune.methods.in_llm.dart import Dart
from tokenprune.models.families import SERVED

pytestmark = IN_LLM
# Image sizes with several blocks of tokens. For None, tiles of the tiny model are smaller than two blocks, and the
# prefix cache is off.
SIZES = {
    "llava_next": (112, 112),
    "llava_onevision": (112, 112),
    "mistral3_deep": (224, 224),
    "qwen2_vl": (280, 224),
    "qwen3_vl_deep": (256, 256),
    "internvl": None,
    "idefics3": None,
    "smolvlm": None,
}


def test_all_families_are_covered() -> None:
    tested = len(SIZES) + len(["llava_deep", "qwen2_5_vl"])
    assert tested == sum(family.vllm.in_llm for family in SERVED.values())


@pytest.mark.parametrize("name", SIZES)
def test_answers_match_transformers(start: Callable[..., Engine], reference: Any, name: str) -> None:
    size = SIZES[name]
    method = Dart(layer=3 if name == "qwen3_vl_deep" else 1, pivot_text=0)
    options = dict(disable_chunked_mm_input=True, max_num_batched_tokens=1200, enable_prefix_caching=size is not None)
    engine = start(name, setting(method), **options)
    photos = engine.checkpoint.images if size is None else lambda n: [photo(*size, seed=seed) for seed in range(n)]
    prompts = build_prompts(engine, photos)
    cuts: list[int] = []
    in_llm = engine.model.tokenprune_in_llm
    in_llm._cut = lambda *args, cut=in_llm._cut: cuts.append(1) or cut(*args)
    for is_second_round in (False, True):
        outputs = engine.generate([engine.request(*case) for case in prompts], 8)
        for (prompt, images), output in zip(prompts, outputs, strict=True):
            check(reference(name), output, prompt, images, method if size is None else keep_complete_blocks(method))
        assert all(output.num_cached_tokens > 100 for output in outputs[:3]) == (is_second_round and size is not None)
    # Each image loses tokens whenever it is computed.
    assert len(cuts) == (3 if size is not None else 6)
