# SPDX-License-Identifier: Apache-2.0
"""Caches used after the call that filled them: later turns, copies, interleaved use, cropping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import tokenprune
from oracle import close, reduced
from tokenprune import UnsupportedSetupError
from tokenprune.integrations.hf.cache.view import CacheView
from tokenprune.integrations.hf.compat import CROP_TAKES_REMOVED_COUNT, RESET_EMPTIES, VERSION
from turns import check_turns, words
from zoo import FAMILIES, Family

METHODS = ["divprune", "fastv", ["pool", "dart"]]
IDS = ["PRE_LLM", "IN_LLM", "both"]


@pytest.mark.few_families
@pytest.mark.pairwise
@pytest.mark.parametrize("method", METHODS, ids=IDS)
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 0}], ids=["ragged", "one row"])
def test_second_turn(method: Any, batch: dict, family: Family, model) -> None:
    cuts = check_turns(family, model, family.make_inputs(**batch), method, steps=(3, 3, 2)).cuts
    assert len(cuts) == (len(method) if isinstance(method, list) else 1)


@torch.no_grad()
def prefill(model: Any, inputs: Any) -> tuple[Any, Tensor]:
    out = model(**inputs, past_key_values=DynamicCache(config=model.config.get_text_config()))
    # Qwen's base model stores the position shift of its last prompt, and prompts alternate here.
    inputs.shift = getattr(model.model, "rope_deltas", None)
    return out.past_key_values, out.logits[:, -1]


@torch.no_grad()
def steps(model: Any, inputs: Any, cache: Any, tokens: Tensor, done: int = 0) -> Tensor:
    """Feed `tokens` one by one after a prefilled prompt and return logits `[B, T, V]`."""
    logits, mask, shift = [], inputs["attention_mask"], getattr(inputs, "shift", None)
    for step in range(done, tokens.shape[1]):
        call = {"attention_mask": torch.nn.functional.pad(mask, (0, step + 1), value=1), "past_key_values": cache}
        if shift is not None:
            call["position_ids"] = (mask.sum(1, keepdim=True) + step + shift).expand(3, -1, -1)
        out = model(input_ids=tokens[:, step : step + 1], **call)
        logits.append(out.logits[:, -1])
    return torch.stack(logits, 1)


@pytest.mark.few_families
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_copies_of_a_cache(method: Any, family: Family, model) -> None:
    inputs = family.make_inputs(images=(1, 2))
    first_text, second_text = words(2, 3, seed=1), words(2, 4, seed=2)

    def run() -> list[Tensor]:
        cache, first = prefill(model, inputs)
        copies = copy.deepcopy(cache), copy.deepcopy(cache)
        results = [steps(model, inputs, copies[0], first_text), steps(model, inputs, copies[1], second_text)]
        assert cache.get_seq_length() == inputs["input_ids"].shape[1]
        assert [c.get_seq_length() - cache.get_seq_length() for c in copies] == [3, 4]
        return [first, *results, steps(model, inputs, cache, second_text)]

    with tokenprune.patched(model, method, keep=0.4, record=True):
        got = run()
        cuts = tokenprune.stats(model).cuts
    assert torch.equal(got[2], got[3])
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want = run()
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.few_families
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_interleaved_caches(method: Any, family: Family, model) -> None:
    jobs = [family.make_inputs(images=(1, 2)), family.make_inputs(images=(2, 0), seed=3)]
    text = words(2, 3)
    with tokenprune.patched(model, method, keep=0.4):
        sequential = [steps(model, job, prefill(model, job)[0], text) for job in jobs]
        caches = [prefill(model, job)[0] for job in jobs]
        interleaved: list[list[Tensor]] = [[], []]
        for step in range(3):
            for index, job in enumerate(jobs):
                interleaved[index].append(steps(model, job, caches[index], text[:, : step + 1], done=step))
    for got, want in zip(interleaved, sequential, strict=True):
        assert torch.equal(torch.cat(got, 1), want)


@torch.no_grad()
def test_a_cache_remembers_its_own_cuts(family: Family, model) -> None:
    """The cuts of a cache are fixed when it is filled; a later patch does not change them."""
    inputs, text = family.make_inputs(images=(1, 2)), words(2, 3)
    with tokenprune.patched(model, "fastv", keep=0.4):
        cache, _ = prefill(model, inputs)
        want = steps(model, inputs, copy.deepcopy(cache), text)
    with tokenprune.patched(model, "dart", layer=1, keep=0.2):
        close(steps(model, inputs, copy.deepcopy(cache), text), want)
    plain, _ = prefill(model, inputs)
    want = steps(model, inputs, copy.deepcopy(plain), text)
    with tokenprune.patched(model, "fastv", keep=0.4):
        assert torch.equal(steps(model, inputs, plain, text), want)


@pytest.mark.few_families
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_crop(method: Any, family: Family, model) -> None:
    if family.name == "gemma3":
        pytest.skip("sliding layers cannot be cropped, patched or not")
    inputs, text = family.make_inputs(images=(1, 2)), words(2, 4)
    length = inputs["input_ids"].shape[1]
    with tokenprune.patched(model, method, keep=0.4):
        cache, _ = prefill(model, inputs)
        want = steps(model, inputs, cache, text)
        cache.crop(-2)
        assert cache.get_seq_length() == length + 2
        assert torch.equal(steps(model, inputs, cache, text, done=2), want[:, 2:])
        cache.crop(0 if CROP_TAKES_REMOVED_COUNT else length + 4)
        assert cache.get_seq_length() == length + 4
        lengths = [layer.keys.shape[-2] for layer in cache.layers]
        for remove in (-(4 + 20), -(length + 4)):
            with pytest.raises(UnsupportedSetupError, match="pruned"):
                cache.crop(remove)
        assert [layer.keys.shape[-2] for layer in cache.layers] == lengths
        assert cache.get_seq_length() == length + 4
        cache.crop(-4)
        assert torch.equal(steps(model, inputs, cache, text), want)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_rows_of_a_cache(method: Any, build) -> None:
    family = FAMILIES["llava_next"]
    model, inputs, text = build(family), family.make_inputs(images=(1, 2)), words(2, 2)
    with tokenprune.patched(model, method, keep=0.4):
        cache, _ = prefill(model, inputs)
        want = steps(model, inputs, copy.deepcopy(cache), text)
        for change, order in (
            (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
            (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        ):
            rows = copy.deepcopy(cache)
            change(rows)
            chosen = {"attention_mask": inputs["attention_mask"][order]}
            close(steps(model, chosen, rows, text[order]), want[order])


@torch.no_grad()
def test_an_emptied_cache_is_an_ordinary_one(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    with tokenprune.patched(model, "fastv", keep=0.4):
        cache, _ = prefill(model, inputs)
        kind, want = type(cache), steps(model, inputs, copy.deepcopy(cache), words(2, 2))
        if not RESET_EMPTIES:
            with pytest.raises(UnsupportedSetupError, match=f"in transformers {VERSION}. Create a new cache"):
                cache.reset()
            return
        cache.reset()
        assert type(cache) is DynamicCache and kind.__name__ == "DynamicCache"
        model(**inputs, past_key_values=cache)
        assert torch.equal(steps(model, inputs, cache, words(2, 2)), want)
    with tokenprune.patched(model, "fastv", keep=1.0):
        assert type(prefill(model, inputs)[0]) is DynamicCache


def test_padding_of_a_call_is_at_the_end_of_the_mask() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]])
    assert CacheView(None).padding(mask, 2).tolist() == [[False, False], [True, False]]
