# SPDX-License-Identifier: Apache-2.0
"""Attaching and undoing: whatever goes on comes off, in any order, and what was there before is there again."""

from __future__ import annotations

import copy
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

import tokenprune
from basics import snapshot
from each import each
from families import FAMILIES
from processors import build_for, llava, tokenizer
from tests.unit.api.test_patch import forget_rope_deltas
from tokenprune import Budget
from tokenprune.integrations.hf.guard.settings import Guard
from tokenprune.integrations.hf.patch import build_hf_parts
from tokenprune.integrations.hf.pixels.marker import find_patch
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune_bench.lmms_eval.measure import measure_calls


class Says:
    """Stands before a method, and adds its name to what that says."""

    def __init__(self, original: Any, name: str) -> None:
        self.original, self.name = original, name

    def __call__(self) -> str:
        return self.original() + self.name


class Greeter(nn.Module):
    def greet(self) -> str:
        return "-"


class Wrap(Attachable):
    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.name = module, name

    def _attach(self) -> None:
        self.wrap(self.module, "greet", partial(Says, name=self.name))


class Swap(Attachable):
    def __init__(self, instance: Any, cls: type) -> None:
        super().__init__()
        self.instance, self.cls = instance, cls

    def _attach(self) -> None:
        self.swap_class(self.instance, self.cls)


@each("own", [False, True])
@each("order", list(permutations("abc")))
def test_wrappers_of_one_method_detach_in_any_order(order: tuple[str, ...], own: bool) -> None:
    module = Greeter()
    if own:
        module.greet = lambda: "+"
    was, left = snapshot(module), "abc"
    parts = {name: Wrap(module, name) for name in left}
    for part in parts.values():
        part.attach()
    assert module.greet() == "-+"[own] + "abc"
    for name in order:
        parts[name].detach()
        left = left.replace(name, "")
        assert module.greet() == "-+"[own] + left
    assert snapshot(module) == was
    parts["a"].detach()  # done already
    assert snapshot(module) == was


def test_copy_has_independent_wrappers() -> None:
    module = Greeter()
    module.parts = [Wrap(module, "a"), Wrap(module, "b")]
    for part in module.parts:
        part.attach()
    other = copy.deepcopy(module)
    module.parts[0].detach()
    assert (module.greet(), other.greet()) == ("-b", "-ab")
    other.parts[1].detach()
    other.parts[0].detach()
    assert (module.greet(), other.greet()) == ("-b", "-") and "greet" not in vars(other)


@pytest.mark.parametrize("first", [0, 1])
def test_foreign_wrapper_between_two_is_kept(first: int) -> None:
    module = Greeter()
    parts = [Wrap(module, "a"), Wrap(module, "b")]
    parts[0].attach()
    theirs = module.greet = Says(module.greet, "?")
    parts[1].attach()
    assert module.greet() == "-a?b"
    parts[first].detach()
    assert module.greet() == ("-a?b" if first == 0 else "-a?")  # theirs holds on to the one below it
    parts[1 - first].detach()
    assert module.greet is theirs if first == 0 else module.greet() == "-"


def test_removed_wrapper_is_not_restored() -> None:
    module = Greeter()
    was = snapshot(module)
    module.greet = lambda: "+"
    part = Wrap(module, "a")
    part.attach()
    del module.greet
    part.detach()
    assert snapshot(module) == was and module.greet() == "-"


def test_class_is_restored() -> None:
    class Thing: ...

    class Ours(Thing): ...

    class Above(Ours): ...

    class Mixed(Greeter, Thing): ...

    class Other(Thing): ...

    def detached(found: type, put: type, since: type | None) -> type:
        thing = object.__new__(found)
        part = Swap(thing, put)
        part.attach()
        assert type(thing) is put
        if since is not None:
            thing.__class__ = since
        part.detach()
        after = type(thing)
        part.detach()  # once more
        assert type(thing) is after
        return after

    assert detached(Thing, Ours, None) is Thing
    assert detached(Thing, Ours, Above) is Thing  # put over ours: not ours, which would stay for good
    assert detached(Other, type("Other", (Other,), {}), Thing) is Thing  # ours was taken away: nothing to give back
    assert detached(Mixed, type("Mixed", (Mixed,), {}), None) is Mixed


class Several(Attachable):
    """The parts of a patch, without the record that a model has of it: it has one at a time."""

    def __init__(self, model: Any, method: str) -> None:
        super().__init__()
        off = Guard(mode="off")
        self.parts = build_hf_parts(model, [tokenprune.method(method)], [Budget(keep=0.5)], False, None, off)

    def _attach(self) -> None:
        for part in self.parts:
            self.attach_part(part)


@pytest.mark.parametrize("first", ["divprune", "tome"])
@pytest.mark.parametrize("gone", ["divprune", "tome"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "llava_next"])
@torch.no_grad()
def test_parts_of_one_model_detach_in_any_order(name: str, gone: str, first: str, build: Any) -> None:
    model, inputs = FAMILIES[name].prepare(build)
    plain, was = model(**inputs).logits, snapshot(model)
    each, alone = {"divprune": Several(model, "divprune"), "tome": Several(model.model, "tome")}, {}
    for method, parts in each.items():
        with parts:
            alone[method] = model(**inputs).logits
    stays = "tome" if gone == "divprune" else "divprune"
    for method in sorted(each, key=lambda method: method != first):
        each[method].attach()
    try:
        each[gone].detach()
        assert torch.equal(model(**inputs).logits, alone[stays])
    finally:
        each[stays].detach()
    assert forget_rope_deltas(snapshot(model)) == forget_rope_deltas(was)
    assert torch.equal(model(**inputs).logits, plain)


@torch.no_grad()
def test_measuring_restores_generate(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    mine = model.generate = partial(model.generate, max_new_tokens=2)
    try:
        was, want = snapshot(model), model.generate(**inputs)
        with measure_calls(model) as tally:
            assert torch.equal(model.generate(**inputs), want)
        assert tally.calls == 1 and model.generate is mine
        assert snapshot(model) == was
    finally:
        del model.generate


def test_processor_class_is_restored_below_other_wrappers() -> None:
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer(), Qwen2VLVideoProcessor())
    found = type(processor.image_processor)
    tokenprune.patch_processor(processor, keep=0.5)
    ours = type(processor.image_processor)
    processor.image_processor.__class__ = type("Logged", (ours,), {})
    tokenprune.unpatch_processor(processor)
    assert type(processor.image_processor) is found
    tokenprune.patch_processor(processor, keep=0.5)  # and can be patched anew
    tokenprune.unpatch_processor(processor)
    assert type(processor.image_processor) is found


def test_failing_pixel_patch_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = llava()
    model = build_for(FAMILIES["llava"], processor)
    was, classes = snapshot(model), (type(processor), type(processor.image_processor))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(model.model.vision_tower, "register_forward_pre_hook", fail)
    with pytest.raises(RuntimeError, match="no more hooks"):
        tokenprune.patch(model, "downsample", keep=0.5, processor=processor)
    monkeypatch.undo()
    assert (type(processor), type(processor.image_processor)) == classes
    assert snapshot(model) == was and find_patch(processor) is None
