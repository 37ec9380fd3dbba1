# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/long_chats.py: its counts equal a loop over single tokens, and the page shows them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("long_chats")


def test_cache_misses_equal_a_count_of_single_tokens(script: Any) -> None:
    for way in script.WAYS:
        cached: list[Any] = []
        computed = 0
        for turns in range(1, script.TURNS + 1):
            prompt = [(item, offset) for item in way.prompt(turns) for offset in range(item[2])]
            hits = next((n for n, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), len(cached))
            computed += len(prompt) - min(hits, len(prompt))
            cached = prompt
        assert f"| {way.name} | {computed:,} |" in script.table()


def test_engine_computes_the_misses_of_a_cache_of_blocks(script: Any) -> None:
    """The engine computes more than a cache of single tokens, by less than a block per turn, and encodes only new
    images."""
    lines = (script.PAGE.parents[2] / "benchmarks/results/long_chats_vllm.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["way"] for record in records] == [way.name for way in script.WAYS]
    for way, record in zip(script.WAYS, records, strict=True):
        prompts = [way.prompt(turns) for turns in range(1, script.TURNS + 1)]
        recomputed = sum(script.tokens(after) - script.shared(before, after) for before, after in pairwise(prompts))
        assert 0 <= record["computed"] - script.tokens(prompts[0]) - recomputed < script.TURNS * record["block_size"]
        assert record["prompt_tokens"] == sum(map(script.tokens, prompts))
        assert record["encoded"] == len({item for prompt in prompts for item in prompt if item[0] == "image"})


def test_the_page_is_current(script: Any) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.table() in text, "run python benchmarks/experiments/long_chats.py --page"
