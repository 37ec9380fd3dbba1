# SPDX-License-Identifier: Apache-2.0
"""Changes that invalidate the feature cache, and outputs that it does not store."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

import tokenprune
from asked_again import ROOM, counts
from each import each
from tokenprune.integrations.hf.feature_cache.cache import FeatureCache
from zoo import FAMILIES

# -- changes that encode again -----------------------------------------------------------------------------------------


def change_pixel(inputs: dict) -> dict:
    pixels = inputs["pixel_values"].clone()
    pixels.view(-1)[5] += 1e-6
    return inputs | {"pixel_values": pixels}


def change_dtype(inputs: dict) -> dict:
    return inputs | {"pixel_values": inputs["pixel_values"].double().float().to(torch.bfloat16)}


def change_grid(inputs: dict) -> dict:
    return inputs | {"image_grid_thw": inputs["image_grid_thw"][:, [0, 2, 1]]}


@pytest.mark.parametrize("change", [change_pixel, change_dtype, change_grid])
@torch.no_grad()
def test_other_content_is_encoded_again(change: Callable, build: Callable) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs(only=0, sizes=[(8, 12)])
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        model(**inputs), model(**change(inputs)), model(**inputs)
        assert counts(model) == (1, 2)


@torch.no_grad()
def test_other_encoder_options_are_encoded_again(build: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        want = model(**inputs).logits
        assert not torch.equal(model(**inputs, vision_feature_layer=-1).logits, want)
        assert torch.equal(model(**inputs).logits, want)
        assert counts(model) == (1, 2)


def change_layer(model: Any) -> None:
    model.config.vision_feature_layer = -1


def change_attention(model: Any) -> None:
    model.model.vision_tower.set_attn_implementation("eager")


def add_adapter(model: Any) -> None:
    model.model.vision_tower.active_adapters = ["night"]  # as PEFT marks it


def add_hook(model: Any) -> None:
    model.model.vision_tower.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("change", [change_layer, change_attention, add_adapter, add_hook])
@torch.no_grad()
def test_changed_encoder_encodes_again(change: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs(only=0)
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    model(**inputs), model(**inputs)
    assert counts(model) == (1, 1)
    change(model)
    model(**inputs)
    assert counts(model) == (1, 2)


def load_scaled(tower: Any) -> None:
    tower.load_state_dict({name: value * 2 for name, value in tower.state_dict().items()})


def assign_scaled(tower: Any) -> None:
    tower.load_state_dict({name: value * 2 for name, value in tower.state_dict().items()}, assign=True)


def round_weights(tower: Any) -> None:
    tower.to(torch.bfloat16).to(torch.float32)


def replace_data(tower: Any) -> None:
    for parameter in tower.parameters():
        parameter.data = parameter.data * 2


def scale_in_place(tower: Any) -> None:
    for parameter in tower.parameters():
        parameter.mul_(2)


@each("change", [load_scaled, assign_scaled, round_weights, replace_data, scale_in_place])
@each("part", ["vision_tower", "multi_modal_projector"])
@torch.no_grad()
def test_changed_weights_invalidate_the_cache(change: Callable, part: str) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs(only=0)
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    before = model(**inputs).logits
    change(model.get_submodule(f"model.{part}"))
    after = model(**inputs).logits
    assert counts(model) == (0, 2) and tokenprune.feature_cache(model).counts().entries == 1
    tokenprune.unpatch(model)
    with tokenprune.patched(model, "divprune", keep=0.5):
        assert torch.equal(model(**inputs).logits, after) and not torch.equal(before, after)


@torch.no_grad()
def test_weights_written_outside_autograd_need_a_clear() -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs(only=0)
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    before = model(**inputs).logits
    model.model.multi_modal_projector.linear_1.weight.data.mul_(2)
    tokenprune.feature_cache(model).clear()
    assert tokenprune.feature_cache(model).counts().bytes == 0
    assert not torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_offloaded_weights_hit_the_cache() -> None:
    """accelerate replaces offloaded weights by empty tensors after each call."""
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs(only=0)
    cpu_offload(model, execution_device=torch.device("cpu"))
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    want = model(**inputs).logits
    assert torch.equal(model(**inputs).logits, want) and counts(model) == (1, 1)


@torch.no_grad()
def test_writing_to_features_does_not_change_answers(build: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        stored, returned = (model.model.get_image_features(inputs["pixel_values"]).pooler_output for _ in range(2))
        want = stored[0].clone()
        returned[0].zero_()
        assert torch.equal(model.model.get_image_features(inputs["pixel_values"]).pooler_output[0], want)


# -- outputs that are not stored ---------------------------------------------------------------------------------------


def test_training_and_gradients_bypass_the_cache(build: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(only=0)
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    model(**inputs).logits.sum().backward()
    assert model.model.multi_modal_projector.linear_1.weight.grad is not None
    with torch.no_grad():
        model.train()(**inputs)
        model.eval().requires_grad_(False)
    model(**inputs | {"pixel_values": inputs["pixel_values"].clone().requires_grad_()})
    usage = tokenprune.feature_cache(model).counts()
    assert (usage.hits, usage.misses, usage.not_kept, usage.entries) == (0, 0, 3, 0)
    model(**inputs), model(**inputs)  # gradients are enabled, but no parameter requires them
    assert counts(model) == (1, 1)


def test_inference_mode_entries_are_separate(build: Callable) -> None:
    """Tensors of inference mode cannot be used where gradients are required."""
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(only=0)
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    with torch.inference_mode():
        model(**inputs), model(**inputs)
    model(**inputs).logits.sum().backward()
    assert counts(model) == (1, 2)


@torch.no_grad()
def test_requested_hidden_states(build: Callable) -> None:
    family = FAMILIES["gemma3"]
    model, pixels = copy.deepcopy(build(family)), family.make_inputs(only=0)["pixel_values"]
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        model.model.get_image_features(pixels)
        assert model.model.get_image_features(pixels, output_hidden_states=True).hidden_states is not None
        assert tokenprune.feature_cache(model).counts().not_kept == 1


@torch.no_grad()
def test_limit_rejects_large_entries_and_evicts_oldest(build: Callable) -> None:
    family = FAMILIES["llava"]
    model, images = build(family), [family.make_inputs(only=0, seed=seed) for seed in range(3)]
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        model(**images[0])
        size = tokenprune.feature_cache(model).counts().bytes
        assert size == 36 * 64 * 4
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        model(**family.make_inputs())  # two entries without shared memory
        assert tokenprune.feature_cache(model).counts().bytes == 2 * size
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=size - 1):
        want = model(**images[0]).logits
        assert torch.equal(model(**images[0]).logits, want)
        usage = tokenprune.feature_cache(model).counts()
        assert (usage.hits, usage.misses, usage.not_kept, usage.entries, usage.bytes) == (0, 2, 2, 0, 0)
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=2 * size + 5):
        for index in (0, 1, 0, 2):  # 1 is the least recently used entry when 2 is added
            model(**images[index])
        usage = tokenprune.feature_cache(model).counts()
        assert (usage.hits, usage.misses, usage.evictions, usage.entries) == (1, 3, 1, 2) and usage.bytes == 2 * size
        model(**images[0]), model(**images[2])
        assert counts(model) == (3, 3)
        model(**images[1])
        assert counts(model) == (3, 4)


@torch.no_grad()
def test_tower_values_count_towards_the_limit(build: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    sizes = {}
    for method in ("divprune", "vscan"):
        with tokenprune.patched(model, method, keep=0.5, feature_cache=ROOM):
            model(**inputs)
            sizes[method] = tokenprune.feature_cache(model).counts().bytes
    assert sizes["vscan"] > sizes["divprune"] == 36 * 64 * 4  # without hidden states of the tower


@dataclasses.dataclass
class Entry:
    bytes: int
    intact: bool = True


def test_entries_of_replaced_weights_are_not_stored() -> None:
    cache = FeatureCache(10)
    cache.renew("old weights")
    assert cache.find([b"image", b"image"]) == {}
    cache.renew("new weights")
    cache.keep("old weights", b"image", Entry(1))  # the tower was still running
    assert cache.find([b"image"]) == {} and cache.counts().not_kept == 1
    cache.keep("new weights", b"image", Entry(4))
    cache.keep("new weights", b"image", Entry(3))  # two threads encoded the image
    assert cache.counts().bytes == 3 and list(cache.find([b"image"])) == [b"image"]
    assert (cache.counts().hits, cache.counts().misses) == (2, 2)
