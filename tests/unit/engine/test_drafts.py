# SPDX-License-Identifier: Apache-2.0
"""Assisted generation, and caches that record their past, give the answers of unassisted generation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerationMixin

import tokenprune
from basics import METHODS, TILE_METHODS, VIDEO_METHODS, snapshot
from families.special import FAMILIES as SPECIAL
from oracle import close, generate_logits
from tests.unit.families.test_families_special import PROBES, NextProbe
from tests.unit.tower.test_packed_encoder import photos, small_processor
from tokenprune import Site
from tokenprune.integrations.hf.cache.reduced_cache import get_reduction
from tokenprune_bench.calibration import calibrate
from turns import words
from zoo import FAMILIES, Family

NAMES = ["llava", "qwen2_5_vl", "gemma3"]
# Methods that act on pixels run in the processor, so the patched model is unchanged.
ACTING = [name for name in METHODS if tokenprune.method_info(name).site is not Site.PRE_ENCODER]
# Unsupported combinations: averages over a patch grid after the tower, unknown grids, families without video or
# thumbnail, and towers of two blocks. `docprune` and `erase` need a processor for colours.
REFUSED = {
    "llava": ["docprune", "earlytom", "erase", "ipcv", "pevlm", "pixelprune", "towerdrop", *VIDEO_METHODS],
    "qwen2_5_vl": ["docprune", "earlytom", "erase", *TILE_METHODS],
    "gemma3": ["docprune", "dymu", "earlytom", "erase", "ipcv", "pevlm", "pixelprune", "tome", *VIDEO_METHODS],
    "gemma4": ["pixelprune", "tome", "vscan"],
    "exaone4_5": ["tome", "vscan"],
}
SLIDING = {name: {**FAMILIES, **SPECIAL}[name] for name in ("gemma3", "gemma4", "exaone4_5")}
RECORDED = [
    "divprune", "fastv", "pool", "vscan", ["pool", "dart"], "tome",
    *(tokenprune.method("dyrate", layer=2, rate="schedule", schedule=[0.6, 0.8], mode=mode, k_min=0.05)
      for mode in ("evict", "mask")),
]  # fmt: skip
RECORDED_IDS = ["divprune", "fastv", "pool", "vscan", "pool+dart", "tome", "evict", "mask"]


def settings(model: Any, method: Any, inputs: Any) -> dict[str, Any]:
    """Return options that make a method act on the zoo's models."""
    if method == "dymu":
        calibration_inputs = (
            inputs["pixel_values"] if model.config.model_type == "llava" else photos([(48, 64), (64, 40)])
        )
        processor = None if model.config.model_type == "llava" else small_processor()
        return dict(
            keep=0.5, thresholds=calibrate(model, calibration_inputs, processor=processor, keep=0.5, progress=False)
        )
    if method == "ipcv":
        return dict(keep=0.4, layer=1)
    if method == "pevlm":
        return dict(sink_frames=1, block_frames=2, min_frames=3)
    return dict(keep=0.4, **(dict(layer=2, warmup=0, update_every=1) if method == "dyrate" else {}))


def skip_refused(name: str, method: Any) -> None:
    if method in REFUSED.get(name, ()):
        tests = "test_encoder_models.py, test_pevlm_composed.py, test_frames.py, test_families.py"
        pytest.skip(f"{name} does not support {method} ({tests})")


# -- caches that record their past ---------------------------------------------------------------------------------


@torch.no_grad()
def answer(model: Any, inputs: Any, text: Tensor, record: bool, restrict: bool = True) -> tuple[list[Tensor], Any, Any]:
    """Return the logits of a prompt and of `text` after it, the cache, and the statistics of the prompt.

    `restrict` calls `crop(0)` before each step, as `generate` does.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    if record:
        cache.activate_past_recording()
    out = model(**inputs, past_key_values=cache)
    stats, logits, mask = tokenprune.stats(model), [out.logits[:, -1]], inputs["attention_mask"]
    for step in range(text.shape[1]):
        if record and restrict:
            cache.crop(0)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        out = model(input_ids=text[:, step : step + 1], attention_mask=mask, past_key_values=cache)
        logits.append(out.logits[:, 0])
    return logits, cache, stats


@pytest.mark.pairwise(runs=lambda name, method, batch: method not in REFUSED.get(name, ()))
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 0}], ids=["ragged", "one row"])
@pytest.mark.parametrize("method", RECORDED, ids=RECORDED_IDS)
@pytest.mark.parametrize("name", SLIDING)
def test_a_cache_that_records_its_past(name: str, method: Any, batch: dict, build) -> None:
    """It stores more slots of a sliding layer than it returns; logits and statistics are unchanged."""
    model, inputs = SLIDING[name].prepare(build, **batch)
    text = words(len(inputs["input_ids"]), 6)
    skip_refused(name, method)
    with tokenprune.patched(model, method, keep=0.4):
        want, _, plain_stats = answer(model, inputs, text, record=False)
        for restrict in (True, False):
            got, recorded, stats = answer(model, inputs, text, record=True, restrict=restrict)
            for actual, expected in zip(got, want, strict=True):
                close(actual, expected)
            assert stats.kv_bytes_full == plain_stats.kv_bytes_full
            assert stats.kv_bytes == plain_stats.kv_bytes
        recorded.crop(-2)  # recording makes this crop possible
        assert recorded.get_seq_length() == inputs["input_ids"].shape[1] + text.shape[1] - 2


@torch.no_grad()
@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_cropped_tokens_do_not_affect_later_text(method: str, build) -> None:
    """Text after a crop gives the logits of a cache without the cropped tokens, also beyond the window."""
    model, inputs = FAMILIES["gemma3"].prepare(build, images=(2, 1))
    text = words(2, 6)
    with tokenprune.patched(model, method, keep=0.4):
        want, _, _ = answer(model, inputs, text, record=True)
        draft_text = torch.cat([text[:, :3], words(2, 3, seed=9)], 1)
        _, cache, _ = answer(model, inputs, draft_text, record=True, restrict=False)
        cache.crop(-3)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 6), value=1)
        got = model(input_ids=text[:, 3:], attention_mask=mask, past_key_values=cache).logits
    close(got, torch.stack(want[4:], 1))


@torch.no_grad()
@pytest.mark.parametrize("method", [*PROBES, NextProbe(layer=2)], ids=["PRE_LLM", "IN_LLM", "next", "next sliding"])
@pytest.mark.parametrize("name", ["exaone4_5", "gemma4"])
def test_second_image_after_a_recorded_past(name: str, method: Any, build) -> None:
    family = SPECIAL[name]
    model, answers = build(family), []
    first, second = family.make_inputs(only=0), family.make_inputs(only=0, seed=5)
    second["attention_mask"] = torch.cat([first["attention_mask"], second["attention_mask"]], 1)
    with tokenprune.patched(model, method, keep=0.3):
        for record in (False, True):
            cache = DynamicCache(config=model.config.get_text_config())
            if record:
                cache.activate_past_recording()
            model(**first, past_key_values=cache)
            answers.append(model(**second, past_key_values=cache).logits[:, -1])
    close(*answers)


@torch.no_grad()
def test_crop_of_zero_tokens_frees_recorded_slots(build) -> None:
    """`generate` crops after every step, also by 0 tokens: this bounds the memory."""
    model, inputs = FAMILIES["gemma3"].prepare(build, only=0)
    with tokenprune.patched(model, "fastv", keep=0.4):
        _, cache, _ = answer(model, inputs, words(1, 6), record=True)
        cache.crop(0)
        plain = answer(model, inputs, words(1, 6), record=False)[1]
    assert get_reduction(cache) is not None
    assert [layer.keys.shape for layer in cache.layers] == [layer.keys.shape for layer in plain.layers]


# -- assisted generation -------------------------------------------------------------------------------------------


def draft_of(model: Any) -> Any:
    """Return a draft with slightly different weights, so that the model accepts some of its tokens."""
    draft = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for parameter in draft.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)
    return draft


def watch(model: Any, family: Family, lengths: list[int]) -> Any:
    """Append the length of every forward of the decoder to `lengths` until the handle is removed."""

    def enter(module: Any, args: tuple, kwargs: dict) -> None:
        lengths.append(kwargs["inputs_embeds"].shape[1])

    return model.get_submodule(family.decoder).register_forward_pre_hook(enter, with_kwargs=True)


HELP = {
    "assistant": lambda draft: dict(assistant_model=draft),
    "prompt lookup": lambda draft: dict(prompt_lookup_num_tokens=3),
}


@pytest.mark.pairwise(runs=lambda name, method, help_: method not in REFUSED.get(name, ()))
@pytest.mark.parametrize("help_", HELP)
@pytest.mark.parametrize("method", ACTING)
@pytest.mark.parametrize("name", NAMES)
def test_assisted_equals_unassisted(name: str, method: str, help_: str, build) -> None:
    skip_refused(name, method)
    family = FAMILIES[name]
    model = build(family)
    video = method == "pevlm" and family.video is not None
    inputs = family.make_inputs(only=0, **(dict(images=(0, 0), video=8) if video else {}))
    extra = HELP[help_](draft_of(model))
    snapshot_before = snapshot(model)
    with tokenprune.patched(model, method, **settings(model, method, inputs)):
        want, tokens, _ = generate_logits(model, inputs, 10)
        before = tokenprune.stats(model)
        got, assisted, _ = generate_logits(model, inputs, 10, **extra)
        after = tokenprune.stats(model)
    assert torch.equal(assisted, tokens)
    close(got, want)
    assert after.visual_tokens_per_layer == before.visual_tokens_per_layer
    assert after.prefill_flops_ratio == before.prefill_flops_ratio
    assert after.decode_kept == before.decode_kept
    changed = {
        key
        for key, value in snapshot(model).items()
        if snapshot_before.get(key, value) != value and "rope_deltas" not in key
    }
    assert not changed and "_get_candidate_generator" not in vars(model)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_accepted(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(only=0)
    draft, forwards = copy.deepcopy(model), []
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    handle = watch(model, family, forwards)
    # The draft reads the prompt without its image. For a text prompt, it writes the tokens of the model.
    text = family.make_inputs(images=0, rows=1)
    try:
        with tokenprune.patched(model, "fastv", keep=0.3):
            model.generate(**inputs, max_new_tokens=10, assistant_model=draft)
            assert forwards[0] == inputs["input_ids"].shape[1]  # only the prompt
            assert max(forwards[1:]) > 1  # then draft tokens
            forwards.clear()
            model.generate(**text, max_new_tokens=10, assistant_model=draft)
    finally:
        handle.remove()
    assert forwards[0] == text["input_ids"].shape[1] and len(forwards) <= 4


# A draft only supplies tokens. The risk is its cache, which is cropped after each rejection.
@pytest.mark.parametrize(
    ("name", "method"),
    [*(("llava", method) for method in ("divprune", "pool", "fastv", "vscan", "dyrate")), ("gemma3", "fastv"),
     ("qwen2_5_vl", "fastv")],
)  # fmt: skip
def test_a_patched_draft(name: str, method: str, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, only=0)
    _, want, _ = generate_logits(model, inputs, 10)
    draft = tokenprune.patch(draft_of(model), method, **settings(model, method, inputs))
    _, got, _ = generate_logits(model, inputs, 10, assistant_model=draft)
    assert torch.equal(got, want)
    with tokenprune.patched(model, method, **settings(model, method, inputs)):
        _, want, _ = generate_logits(model, inputs, 10)
        _, got, _ = generate_logits(model, inputs, 10, assistant_model=draft)
    assert torch.equal(got, want)


def test_a_method_that_decides_while_decoding_takes_no_drafts(build, caplog) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, only=0)
    with tokenprune.patched(model, "dyrate", **settings(model, "dyrate", inputs)):
        model.generate(**inputs, max_new_tokens=3)
        assert not tokenprune.stats(model).notes
        model.generate(**inputs, max_new_tokens=3, prompt_lookup_num_tokens=3)
        (note,) = tokenprune.stats(model).notes
        assert "dyrate" in note and "draft" in note
        assert any("draft" in record.getMessage() for record in caplog.records)
        model.generate(**inputs, max_new_tokens=3)
        assert not tokenprune.stats(model).notes


def test_a_version_without_the_private_name(monkeypatch, build) -> None:
    """A note reports that drafts cannot be excluded from the prompt's forward."""
    model, inputs = FAMILIES["llava"].prepare(build, only=0)
    monkeypatch.delattr(GenerationMixin, "_get_candidate_generator")
    with tokenprune.patched(model, "fastv", keep=0.5):
        model.generate(**inputs, max_new_tokens=2)
        (note,) = tokenprune.stats(model).notes
    assert "assist" in note
    with tokenprune.patched(model, "fastv", keep=1.0):  # keep=1.0 drops no tokens
        model.generate(**inputs, max_new_tokens=2)
        assert not tokenprune.stats(model).notes


def test_copies_and_pickles_keep_drafts_out(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs(only=0)  # a model that has run cannot be pickled, patched or not
    with tokenprune.patched(model, "fastv", keep=0.3):
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        _, want, _ = generate_logits(model, inputs, 8)
        for other in others:
            forwards: list[int] = []
            watch(other, family, forwards)
            _, got, _ = generate_logits(other, inputs, 8, prompt_lookup_num_tokens=3)
            assert torch.equal(got, want) and forwards[0] == inputs["input_ids"].shape[1]
