# SPDX-License-Identifier: Apache-2.0
"""benchmarks/long_chats.py: its counts by a loop over single tokens, and that the page has them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("long_chats")


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


def test_the_page_is_current(script: Any) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.table() in text, "run python benchmarks/long_chats.py --page"
