# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of assisted generation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tokenprune
from basics import snapshot
from tests.unit.engine.test_drafts import watch
from zoo import FAMILIES, Family

STEPS, DRAFTED = 11, 4


@contextmanager
def helped(model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield an assistant that drafts `DRAFTED` tokens per round, regardless of its confidence."""
    assistant = tokenprune.assistant(model, *args, **kwargs)
    assistant.generation_config.num_assistant_tokens = DRAFTED
    assistant.generation_config.assistant_confidence_threshold = 0.0
    try:
        yield assistant
    finally:
        tokenprune.unpatch(assistant)


def lengths_of(model: Any, family: Family, inputs: Any, assistant: Any) -> tuple[Any, list[int]]:
    """Return the output of an assisted `generate` and the length of each forward of the target."""
    lengths: list[int] = []
    handle = watch(model, family, lengths)
    try:
        return model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), lengths
    finally:
        handle.remove()


def same(model: Any, before: dict[str, Any]) -> bool:
    """Return whether the patchable state of a model equals a snapshot, except for the rope deltas of Qwen's last
    prompt."""
    after = snapshot(model)
    return all(after.get(key) == before.get(key) for key in after.keys() | before.keys() if "rope_deltas" not in key)


def small_llava() -> Any:
    """Build a model for the prompts of the zoo's LLaVA, with a smaller decoder and another tower of the same
    geometry."""
    family = FAMILIES["llava"]
    config = copy.deepcopy(family.config)
    config["text_config"] |= dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2)
    config["text_config"] |= dict(num_key_value_heads=1)
    return Family("llava", config, family.image, family.sizes).build()


def tower_runs(model: Any, family: Family, inputs: Any, assistant: Any) -> int:
    """Return the number of runs of both vision towers during an assisted `generate`."""
    runs: list[Any] = []
    handles = [
        owner.model.vision_tower.register_forward_hook(lambda *call: runs.append(call)) for owner in (model, assistant)
    ]
    model.generate(**inputs, max_new_tokens=3, assistant_model=assistant)
    for handle in handles:
        handle.remove()
    return len(runs)
