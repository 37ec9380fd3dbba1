# SPDX-License-Identifier: Apache-2.0
"""Patches attach and detach in any order, and detaching restores the previous state."""

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


class Appending:
    """Wraps a method and appends a name to its result."""

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
        self.wrap(self.module, "greet", partial(Appending, name=self.name))


class Swap(Attachable):
    def __init__(self, instance: Any, cls: type) -> None:
        super().__init__()
        self.instance, self.cls = instance, cls

    def _attach(self) -> None:
        self.swap_class(self.instance, self.cls)


@each("has_instance_method", [False, True])
@each("order", list(permutations("abc")))
def test_wrappers_of_one_method_detach_in_any_order(order: tuple[str, ...], has_instance_method: bool) -> None:
    module = Greeter()
    if has_instance_method:
        module.greet = lambda: "+"
    before, names = snapshot(module), "abc"
    parts = {name: Wrap(module, name) for name in names}
    for part in parts.values():
        part.attach()
    assert module.greet() == "-+"[has_instance_method] + "abc"
    for name in order:
        parts[name].detach()
        names = names.replace(name, "")
        assert module.greet() == "-+"[has_instance_method] + names
    assert snapshot(module) == before
    parts["a"].detach()  # done already
    assert snapshot(module) == before


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
    foreign = module.greet = Appending(module.greet, "?")
    parts[1].attach()
    assert module.greet() == "-a?b"
    parts[first].detach()
    assert module.greet() == ("-a?b" if first == 0 else "-a?")  # the foreign wrapper still calls the wrapper below it
    parts[1 - first].detach()
    assert module.greet is foreign if first == 0 else module.greet() == "-"


def test_removed_wrapper_is_not_restored() -> None:
    module = Greeter()
    before = snapshot(module)
    module.greet = lambda: "+"
    part = Wrap(module, "a")
    part.attach()
    del module.greet
    part.detach()
    assert snapshot(module) == before and module.greet() == "-"


def test_class_is_restored() -> None:
    class Thing: ...

    class Ours(Thing): ...

    class Above(Ours): ...

    class Mixed(Greeter, Thing): ...

    class Other(Thing): ...

    def attach_and_detach(original: type, replacement: type, changed_to: type | None) -> type:
        thing = object.__new__(original)
        part = Swap(thing, replacement)
        part.attach()
        assert type(thing) is replacement
        if changed_to is not None:
            thing.__class__ = changed_to
        part.detach()
        after = type(thing)
        part.detach()  # a second detach has no effect
        assert type(thing) is after
        return after

    assert attach_and_detach(Thing, Ours, None) is Thing
    # a subclass of our class was assigned later; our class must not remain
    assert attach_and_detach(Thing, Ours, Above) is Thing
    # our class was replaced, so the class stays as it was set
    assert attach_and_detach(Other, type("Other", (Other,), {}), Thing) is Thing
    assert attach_and_detach(Mixed, type("Mixed", (Mixed,), {}), None) is Mixed


class ModelParts(Attachable):
    """The parts of a patch without the record on the model, which allows only one patch at a time."""

    def __init__(self, model: Any, method: str) -> None:
        super().__init__()
        off = Guard(mode="off")
        self.parts = build_hf_parts(model, [tokenprune.method(method)], [Budget(keep=0.5)], False, None, off)

    def _attach(self) -> None:
        for part in self.parts:
            self.attach_part(part)


@pytest.mark.parametrize("first", ["divprune", "tome"])
@pytest.mark.parametrize("detached", ["divprune", "tome"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "llava_next"])
@torch.no_grad()
def test_parts_of_one_model_detach_in_any_order(name: str, detached: str, first: str, build: Any) -> None:
    model, inputs = FAMILIES[name].prepare(build)
    unpatched, before = model(**inputs).logits, snapshot(model)
    parts_by_method, expected = {"divprune": ModelParts(model, "divprune"), "tome": ModelParts(model.model, "tome")}, {}
    for method, parts in parts_by_method.items():
        with parts:
            expected[method] = model(**inputs).logits
    attached = "tome" if detached == "divprune" else "divprune"
    for method in sorted(parts_by_method, key=lambda method: method != first):
        parts_by_method[method].attach()
    try:
        parts_by_method[detached].detach()
        assert torch.equal(model(**inputs).logits, expected[attached])
    finally:
        parts_by_method[attached].detach()
    assert forget_rope_deltas(snapshot(model)) == forget_rope_deltas(before)
    assert torch.equal(model(**inputs).logits, unpatched)


@torch.no_grad()
def test_measuring_restores_generate(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    custom_generate = model.generate = partial(model.generate, max_new_tokens=2)
    try:
        before, expected = snapshot(model), model.generate(**inputs)
        with measure_calls(model) as tally:
            assert torch.equal(model.generate(**inputs), expected)
        assert tally.calls == 1 and model.generate is custom_generate
        assert snapshot(model) == before
    finally:
        del model.generate


def test_processor_class_is_restored_below_other_wrappers() -> None:
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer(), Qwen2VLVideoProcessor())
    original = type(processor.image_processor)
    tokenprune.patch_processor(processor, keep=0.5)
    patched = type(processor.image_processor)
    processor.image_processor.__class__ = type("Logged", (patched,), {})
    tokenprune.unpatch_processor(processor)
    assert type(processor.image_processor) is original
    tokenprune.patch_processor(processor, keep=0.5)  # can be patched again
    tokenprune.unpatch_processor(processor)
    assert type(processor.image_processor) is original


def test_failing_pixel_patch_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = llava()
    model = build_for(FAMILIES["llava"], processor)
    before, classes = snapshot(model), (type(processor), type(processor.image_processor))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(model.model.vision_tower, "register_forward_pre_hook", fail)
    with pytest.raises(RuntimeError, match="no more hooks"):
        tokenprune.patch(model, "downsample", keep=0.5, processor=processor)
    monkeypatch.undo()
    assert (type(processor), type(processor.image_processor)) == classes
    assert snapshot(model) == before and find_patch(processor) is None
