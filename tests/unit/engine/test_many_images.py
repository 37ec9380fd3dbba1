# SPDX-License-Identifier: Apache-2.0
"""What methods do with a prompt of many small images, counted without a clock: the entries that their operations read
or write, and the multiply-adds of their products."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tokenprune
from basics import MODEL_METHODS
from tokenprune.integrations.hf.engine import cuts, engine
from zoo import FAMILIES, VISION, tower

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES, MOST = 50, 4  # of 16 tokens; times the unpatched prefill
LLAVA = FAMILIES["llava"]
SMALL = {"vision_config": tower("clip_vision_model", 16, projection_dim=VISION), "image_seq_length": 16}
FAMILY = replace(LLAVA, config={**LLAVA.config, **SMALL}, sizes=(16,))
aten = torch.ops.aten
# The place of the argument whose last axis is summed over.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class Work(TorchDispatchMode):
    """Counts within: `done` is the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet in _PRODUCTS:
            self.done += made.numel() * args[_PRODUCTS[packet]].shape[-1]
        elif not function.is_view:
            leaves = tree_leaves((args, kwargs, made))
            self.done += max((x.numel() for x in leaves if isinstance(x, torch.Tensor)), default=0)
        return made


@contextmanager
def counted_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Count what is done to choose, and not what the model does."""
    work = Work()
    for module in (engine, cuts):

        def choose(*args: Any, original: Any = module.select_tokens) -> Any:
            with work:
                return original(*args)

        monkeypatch.setattr(module, "select_tokens", choose)
    yield work


@cache
def model() -> Any:
    return FAMILY.build("eager")


@cache
@torch.no_grad()
def unpatched() -> int:
    with Work() as work:
        model()(**FAMILY.make_inputs(images=(IMAGES,)))
    return work.done


@pytest.mark.parametrize("name", MODEL_METHODS)
@torch.no_grad()
def test_choosing_among_many_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = FAMILY.make_inputs(images=(IMAGES,))
    with tokenprune.patched(model(), name, keep=0.6), counted_choices(monkeypatch) as work:
        model()(**inputs)
    assert work.done <= MOST * unpatched(), f"{work.done / unpatched():.1f} times the unpatched prefill"
