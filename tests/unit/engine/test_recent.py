# SPDX-License-Identifier: Apache-2.0
"""Cached properties of a prompt are reused for prompts of the same shape only."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import StaticCache

import tokenprune
from far_device import Far, counting, far_inputs, to_far
from pruned import run_pruned
from tokenprune.integrations.hf.forward import plan
from tokenprune.kernels.transfer import FIFOCache
from tokenprune.methods import tiles
from zoo import FAMILIES

FAMILY = FAMILIES["llava"]


@torch.no_grad()
def compute_logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs, use_cache=True).logits


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Record the device of each search for segments."""
    devices: list[torch.device] = []
    search = plan.find_segments

    def record(masks: Any, outputs: Any, per: str, device: torch.device, *rest: Any) -> Any:
        devices.append(device)
        return search(masks, outputs, per, device, *rest)

    monkeypatch.setattr(plan, "find_segments", record)
    return devices


def test_cache_evicts_the_oldest_entry() -> None:
    recent = FIFOCache()
    for key in range(3 * FIFOCache.MAX_ENTRIES):
        assert recent.get(key, lambda key=key: str(key)) == str(key)
    assert len(recent._entries) == FIFOCache.MAX_ENTRIES
    assert recent.get(key, pytest.fail) == str(key)
    assert recent.get(0, lambda: "new") == "new"
    assert not copy.deepcopy(recent)._entries and not pickle.loads(pickle.dumps(recent))._entries


def test_a_prompt_of_the_same_shape_is_searched_once(searches: list[torch.device]) -> None:
    model, inputs = FAMILY.build(), FAMILY.make_inputs(images=(1, 2))
    tokenprune.patch(model, "divprune", keep=0.5)
    first = compute_logits(model, inputs)
    others = inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}
    text = inputs["input_ids"] != model.config.image_token_id
    others["input_ids"] = inputs["input_ids"].where(~text, inputs["input_ids"].roll(1, -1).where(text.roll(1, -1), 5))
    assert not torch.equal(compute_logits(model, others), first) and len(searches) == 1
    assert torch.equal(compute_logits(model, inputs), first) and len(searches) == 1


OTHERS: dict[str, Any] = {
    "other images": lambda family, inputs: family.make_inputs(images=(2, 1)),
    "other padding": lambda family, inputs: (
        inputs | {"attention_mask": inputs["attention_mask"].index_fill(1, torch.tensor([0]), 0)}
    ),
    "no mask": lambda family, inputs: {name: value for name, value in inputs.items() if name != "attention_mask"},
    "longer": lambda family, inputs: inputs | {
        name: torch.cat([inputs[name], inputs[name][:, -1:]], 1) for name in ("input_ids", "attention_mask")
    },
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_another_prompt_is_searched_again(change: str, searches: list[torch.device]) -> None:
    inputs = FAMILY.make_inputs(images=(1, 2))
    other = OTHERS[change](FAMILY, inputs)
    fresh, model = FAMILY.build(), FAMILY.build()
    for patched in (fresh, model):
        tokenprune.patch(patched, "fastv", keep=0.5)
    expected = compute_logits(fresh, other)
    searches.clear()
    compute_logits(model, inputs)
    assert torch.equal(compute_logits(model, other), expected) and len(searches) == 2


def test_image_shapes_are_part_of_the_key(searches: list[torch.device]) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = tokenprune.patch(family.build(), "divprune", keep=0.5)
    wide, high = (family.make_inputs(images=(1,), sizes=(size,)) for size in ((8, 16), (16, 8)))
    assert torch.equal(wide["input_ids"], high["input_ids"])
    for inputs in (wide, high):
        compute_logits(model, inputs)
    assert len(searches) == 2


def test_another_budget_is_planned_again() -> None:
    model, inputs = FAMILY.prepare(images=(1, 2))
    for keep in (0.5, 0.25):
        stats = run_pruned(model, inputs, "fastv", keep)[1]
        assert stats.visual_tokens_out == keep * stats.visual_tokens_in


def test_cached_values_of_inference_serve_training() -> None:
    model, inputs = FAMILY.build(), FAMILY.make_inputs(images=(1, 2))
    tokenprune.patch(model, "visionzip", keep=0.5)
    recent = FIFOCache()
    with torch.inference_mode():
        assert not recent.get(0, lambda: torch.zeros(1)).is_inference()
        first = model(**inputs).logits
    second = model(**inputs).logits
    second.sum().backward()
    assert torch.equal(first, second)


def test_moved_model_has_new_entries(searches: list[torch.device]) -> None:
    inputs = FAMILY.make_inputs(images=(1, 2))
    model = FAMILY.build("eager")
    tokenprune.patch(model, "fastv", keep=0.5)
    first = compute_logits(model, inputs)
    half = compute_logits(model.to(torch.bfloat16), inputs | {"pixel_values": inputs["pixel_values"].bfloat16()})
    assert half.dtype == torch.bfloat16
    model.float()
    far = to_far(model)
    with counting():
        actual = compute_logits(far, far_inputs(inputs))
    assert isinstance(actual, Far) and actual.shape == first.shape
    assert [device.type for device in searches] == ["cpu", "far"]


def test_threads_with_different_prompts_get_their_own_answers() -> None:
    prompts = [FAMILY.make_inputs(images=images) for images in ((1,), (2,), (1, 2), (2, 1))]
    model = tokenprune.patch(FAMILY.build(), "divprune", keep=0.5)
    expected = [compute_logits(model, inputs) for inputs in prompts]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda turn: compute_logits(model, prompts[turn % 4]), range(32)))
    assert all(torch.equal(answer, expected[turn % 4]) for turn, answer in enumerate(answers))


@torch.no_grad()
def test_a_static_cache_goes_on_under_a_later_patch() -> None:
    """Steps with a static cache need other masks, and layers are observed from the first static cache on."""
    model, inputs = FAMILY.prepare(images=(1, 2))
    rows, length = inputs["input_ids"].shape
    step = {"input_ids": torch.full((rows, 1), 20)}
    step["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=length + 4)
    with tokenprune.patched(model, "divprune", keep=0.5):
        model(**inputs, past_key_values=cache, use_cache=True)
        later = copy.deepcopy(cache)
        first = model(**step, past_key_values=cache, use_cache=True).logits
    with tokenprune.patched(model, "divprune", keep=0.5):
        second = model(**step, past_key_values=later, use_cache=True).logits
    assert torch.equal(first, second)


def test_tiles_share_their_budget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one shape share the patch indices and the budget of each tile, which depend on sizes only."""
    num_tiles: list[int] = []

    def record(weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        num_tiles.append(len(weight))
        return split_budget(weight, *rest)

    split_budget = tiles.split_budget
    monkeypatch.setattr(tiles, "split_budget", record)
    model = tokenprune.patch(FAMILY.build(), "visionzip", keep=0.5)
    for images in ((1, 2), (1, 2), (1, 1), (1, 2)):
        compute_logits(model, FAMILY.make_inputs(images=images))
    assert num_tiles == [3, 2]
