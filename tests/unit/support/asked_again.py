# SPDX-License-Identifier: Apache-2.0
"""Repeated questions about the same images, and a count of the vision tower's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import tokenprune
from zoo import FIRST_TEXT_ID, VOCAB, Inputs

ROOM = 2**24  # cache size in bytes, large enough for all images of a test


def another_question(inputs: dict[str, Any], index: int) -> Inputs:
    """Return the same images with other words around them."""
    ids = inputs["input_ids"]
    words = (ids - FIRST_TEXT_ID + 7 * index) % (VOCAB - FIRST_TEXT_ID) + FIRST_TEXT_ID
    other = Inputs(inputs | {"input_ids": torch.where(ids >= FIRST_TEXT_ID, words, ids)})
    other.counts = inputs.counts
    return other


@contextmanager
def tower_calls(model: Any) -> Iterator[list[int]]:
    """Record the number of patches (or image tiles) of each vision tower call within this context."""
    base, calls = model.model, []
    tower = next(getattr(base, name) for name in ("vision_tower", "visual", "vision_model") if hasattr(base, name))

    def count(module: nn.Module, args: tuple, kwargs: dict) -> None:
        calls.append(len(args[0] if args else kwargs["pixel_values"]))

    with tower.register_forward_pre_hook(count, with_kwargs=True):
        yield calls


def counts(model: Any) -> tuple[int, int]:
    """Return (hits, misses) of a model's feature cache."""
    counts = tokenprune.feature_cache(model).counts()
    return counts.hits, counts.misses
