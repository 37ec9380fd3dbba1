# SPDX-License-Identifier: Apache-2.0
"""benchmarks/experiments/long_chats.py: its counts by a loop over single tokens, and that the page has them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("long_chats")


def test_what_a_cache_cannot_give_is_counted_token_by_token(script: Any) -> None:
    for way in script.WAYS:
        cached: list[Any] = []
        computed = 0
        for turns in range(1, script.TURNS + 1):
            prompt = [(item, place) for item in way.prompt(turns) for place in range(item[2])]
            hits = next((n for n, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), len(cached))
            computed += len(prompt) - min(hits, len(prompt))
            cached = prompt
        assert f"| {way.name} | {computed:,} |" in script.table()


def test_the_engine_computes_what_a_cache_of_blocks_has_to(script: Any) -> None:
    """More than a cache of single tokens, by less than a block a turn; and it encodes what it has not seen."""
    lines = (script.PAGE.parents[2] / "benchmarks/results/long_chats_vllm.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [one["way"] for one in records] == [way.name for way in script.WAYS]
    for way, one in zip(script.WAYS, records, strict=True):
        prompts = [way.prompt(turns) for turns in range(1, script.TURNS + 1)]
        again = sum(script.tokens(now) - script.shared(before, now) for before, now in pairwise(prompts))
        assert 0 <= one["computed"] - script.tokens(prompts[0]) - again < script.TURNS * one["block_size"]
        assert one["prompt_tokens"] == sum(map(script.tokens, prompts))
        assert one["encoded"] == len({item for prompt in prompts for item in prompt if item[0] == "image"})


def test_the_page_is_current(script: Any) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.table() in text, "run python benchmarks/experiments/long_chats.py --page"
