# SPDX-License-Identifier: Apache-2.0
"""Repeated images are encoded once, and the answers match encoding them again."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenprune
from asked_again import ROOM, another_question, counts, tower_calls
from basics import check_takes
from oracle import close, generate_logits
from tokenprune import NotPatchedError, TokenPruneError
from tokenprune.integrations.hf.feature_cache.part import ONE_BY_ONE
from tokenprune.integrations.hf.sequence.record import get_record
from zoo import FAMILIES, Family

# Methods that read the tower, features or the question, or act in the decoder, in the tower or while decoding.
KINDS: dict[str, dict[str, Any]] = {
    "vscan": {}, "divprune": {}, "cdpruner": {}, "fastv": {}, "tome": {}, "dyrate": {"layer": 2},
}  # fmt: skip


def read_stats(model: Any) -> dict[str, Any]:
    """Return the statistics of a call without times and cache counts."""
    return tokenprune.stats(model).as_dict() | {"feature_cache": None, "overhead_ms": None}


@pytest.mark.few_families
@pytest.mark.parametrize("method", KINDS)
@torch.no_grad()
def test_answers_match_encoding_again(family: Family, model, method: str) -> None:
    check_takes(family, method)
    inputs = family.make_inputs(images=(2, 1))
    questions = [inputs, inputs, another_question(inputs, 1)]
    with tokenprune.patched(model, method, keep=0.4, record=True, **KINDS[method]):
        want = [(*generate_logits(model, question, 2)[:2], read_stats(model)) for question in questions]
    assert not torch.equal(want[0][0], want[2][0])
    with tokenprune.patched(model, method, keep=0.4, record=True, feature_cache=ROOM, **KINDS[method]):
        with tower_calls(model) as calls:
            for question, (logits, tokens, stats) in zip(questions, want, strict=True):
                again, same, _ = generate_logits(model, question, 2)
                assert torch.equal(again, logits) and torch.equal(same, tokens)
                assert read_stats(model) == stats
        assert len(calls) == 1
        hits, misses = counts(model)
        assert misses and hits == 2 * misses


@pytest.mark.parametrize("method", ["dart", "tome"])
@torch.no_grad()
def test_videos(method: str, build: Callable, name: str = "qwen2_5_vl") -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(1, 0), video=(True, 5))
    with tokenprune.patched(model, method, keep=0.4):
        want = generate_logits(model, inputs, 2)[0]
    with tokenprune.patched(model, method, keep=0.4, feature_cache=ROOM):
        got = [generate_logits(model, inputs, 2)[0] for _ in range(3)]
        assert all(torch.equal(logits, want) for logits in got)
        hits, misses = counts(model)
        assert hits == 2 * misses


@torch.no_grad()
def test_the_tower_runs_once_for_ten_questions(build: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, "cdpruner", keep=0.5, feature_cache=ROOM), tower_calls(model) as calls:
        for index in range(10):
            model.generate(**another_question(inputs, index), max_new_tokens=2)
        usage = tokenprune.stats(model).feature_cache
        assert len(calls) == 1 and (usage.hits, usage.misses, usage.entries, usage.evictions) == (9, 1, 1, 0)
        assert 0 < usage.bytes <= usage.limit == ROOM
        assert "feature cache: 9 hits, 1 misses" in repr(tokenprune.stats(model))
        assert f"tokenprune: feature_cache={ROOM}" in repr(model)


# -- images one by one -------------------------------------------------------------------------------------------------


def make_prompts(family: Family) -> tuple[dict, dict, dict]:
    """Return prompts with one image, with the same and a second image, and with both in reverse order."""
    first = family.make_inputs(images=(1, 1), only=0, sizes=family.sizes[:1] * 2)
    both = family.make_inputs(images=(1, 1), sizes=family.sizes[:1] * 2)
    swapped = {name: value.flip(0) for name, value in both.items()}
    if "image_grid_thw" in both:
        swapped["pixel_values"] = torch.cat(both["pixel_values"].chunk(2)[::-1])
    return first, both, swapped


@pytest.mark.parametrize("method", ["divprune", "vscan"])
@pytest.mark.parametrize("name", sorted(ONE_BY_ONE))
@torch.no_grad()
def test_only_new_images_are_encoded(name: str, method: str, build: Callable) -> None:
    family = FAMILIES[name]
    model, (first, both, swapped) = build(family), make_prompts(family)
    with tokenprune.patched(model, method, keep=0.4):
        want = [model(**prompt).logits for prompt in (first, both, swapped)]
    with tokenprune.patched(model, method, keep=0.4, feature_cache=ROOM), tower_calls(model) as calls:
        logits = model(**first).logits
        assert torch.equal(logits, want[0])
        entries = tokenprune.feature_cache(model).counts().entries
        close(model(**both).logits, want[1])
        assert tokenprune.feature_cache(model).counts().entries == 2 * entries
        assert calls == [calls[0]] * 2  # the same as for the first
        close(model(**swapped).logits, want[2])
        assert len(calls) == 2
        assert torch.equal(model(**first).logits, logits)
        assert counts(model) == (entries + 2 * entries + entries, 2 * entries)


def read_looks(record: Any) -> list[float] | None:
    """Return the statistics that the guard recorded for the images."""
    return None if record.looks is None else [record.looks.count, *record.looks.read()]


@pytest.mark.parametrize("name", ["llava_next", "internvl", "qwen2_5_vl"])
@torch.no_grad()
def test_tower_values_are_joined(name: str, build: Callable) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    image_inputs = {key: inputs[key] for key in ("pixel_values", "image_sizes", "image_grid_thw") if key in inputs}
    with tokenprune.patched(model, "vscan", keep=0.5, guard="warn"):
        want = get_record(model.model.get_image_features(**image_inputs))
    with tokenprune.patched(model, "vscan", keep=0.5, guard="warn", feature_cache=ROOM):
        for _ in range(2):
            got = get_record(model.model.get_image_features(**image_inputs))
            assert torch.equal(got.encoded.tokens.cells, want.encoded.tokens.cells)
            assert got.encoded.tokens.tiles == want.encoded.tokens.tiles and got.grids == want.grids
            assert got.encoded.values.keys() == want.encoded.values.keys()
            assert all(torch.equal(value, want.encoded.values[key]) for key, value in got.encoded.values.items())
            assert read_looks(got) == read_looks(want)


@torch.no_grad()
def test_repeated_image_is_encoded_once(build: Callable) -> None:
    family = FAMILIES["gemma3"]
    model, inputs = build(family), family.make_inputs(only=0)
    twice = {name: torch.cat([value, value]) for name, value in inputs.items()}
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM), tower_calls(model) as calls:
        logits = model(**twice).logits
        assert torch.equal(logits[0], logits[1]) and calls == [1]
        assert counts(model) == (1, 1)


@torch.no_grad()
def test_padding_tiles_hit_the_cache(build: Callable) -> None:
    """LLaVA-NeXT pads the tiles of a prompt's images to the number of tiles of the largest image."""
    family = FAMILIES["llava_next"]
    model, inputs = build(family), family.make_inputs(only=0)
    padded = inputs | {"pixel_values": torch.nn.functional.pad(inputs["pixel_values"], (0, 0) * 3 + (0, 2))}
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        assert torch.equal(model(**inputs).logits, model(**padded).logits)
        assert counts(model) == (1, 1)


@pytest.mark.parametrize("images", [(2, 1), (2, 0)])
@torch.no_grad()
def test_several_images_in_a_row_of_onevision(images: tuple[int, int], build: Callable) -> None:
    """Several images are not cut into tiles, so the same image has other features."""
    family = FAMILIES["llava_onevision"]
    model, inputs = build(family), family.make_inputs(images=images)
    with tokenprune.patched(model, "divprune", keep=0.5):
        want = model(**inputs).logits
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=ROOM):
        assert all(torch.equal(model(**inputs).logits, want) for _ in range(2))
        assert counts(model) == (1, 1)  # the whole call


# -- threads, beams, copies, unpatch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [ROOM, 36 * 64 * 4])  # room for all images, and for one
def test_two_threads(limit: int, build: Callable) -> None:
    family = FAMILIES["llava"]
    model, images = build(family), [family.make_inputs(only=0, seed=seed) for seed in range(3)]
    with torch.no_grad(), tokenprune.patched(model, "vscan", keep=0.5):
        want = [model(**inputs).logits for inputs in images]
    wrong: list[Any] = []

    @torch.no_grad()
    def ask(order: tuple[int, ...]) -> None:
        for index in order * 3:
            try:
                if not torch.equal(model(**images[index]).logits, want[index]):
                    wrong.append(index)
            except Exception as error:
                wrong.append(error)

    with tokenprune.patched(model, "vscan", keep=0.5, feature_cache=limit):
        threads = [threading.Thread(target=ask, args=(order,)) for order in ((0, 1, 2), (2, 0, 1))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        usage = tokenprune.feature_cache(model).counts()
    assert not wrong
    assert usage.hits + usage.misses == 18 and usage.bytes <= limit
    assert usage.misses >= 3 and (limit < ROOM or usage.hits >= 12)


@torch.no_grad()
def test_beams_then_single_answer(build: Callable) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    options = [{"num_beams": 2}, {}, {"num_beams": 2}]
    with tokenprune.patched(model, "vscan", keep=0.4):
        want = [model.generate(**inputs, max_new_tokens=3, **option) for option in options]
    with tokenprune.patched(model, "vscan", keep=0.4, feature_cache=ROOM):
        got = [model.generate(**inputs, max_new_tokens=3, **option) for option in options]
        assert counts(model) == (6, 3)
    assert all(map(torch.equal, got, want))


@torch.no_grad()
def test_unpatch_frees_the_memory(build: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    cache, features = tokenprune.feature_cache(model), None
    features = weakref.ref(model.model.get_image_features(inputs["pixel_values"]).pooler_output[0])
    assert features() is not None and cache.counts().entries == 1
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM, replace=True)
    assert features() is None and cache.counts().bytes == 0 and counts(model) == (0, 0)
    model(**inputs)
    cache = tokenprune.feature_cache(model)
    tokenprune.unpatch(model)
    assert cache.counts().bytes == 0
    with pytest.raises(NotPatchedError):
        tokenprune.feature_cache(model)
    with tokenprune.patched(model, "divprune"), pytest.raises(NotPatchedError, match="feature_cache="):
        tokenprune.feature_cache(model)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copy_has_a_separate_cache(make_copy: Callable) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs(only=0)
    tokenprune.patch(model, "divprune", keep=0.5, feature_cache=ROOM)
    other = make_copy(model)  # the model has not run, see docs/start/questions.md
    want = model(**inputs).logits
    assert counts(model) == (0, 1) and counts(other) == (0, 0)
    assert all(torch.equal(other(**inputs).logits, want) for _ in range(2))
    assert counts(model) == (0, 1) and counts(other) == (1, 1)
    assert counts(copy.deepcopy(other)) == (0, 0) and tokenprune.feature_cache(other).counts().limit == ROOM


# -- unsupported setups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1e9, "64 MB"])
def test_limit_is_in_bytes(value: Any, build: Callable) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(tokenprune.OptionError, match=r"feature_cache=.*an int >= 1"):
        tokenprune.patch(model, "divprune", feature_cache=value)
    assert not tokenprune.is_patched(model)


def test_models_without_get_image_features_raise(build: Callable) -> None:
    from families import FAMILIES as ALL

    model = build(ALL["instructblip"])
    with pytest.raises(TokenPruneError, match="get_image_features"):
        tokenprune.patch(model, "divprune", feature_cache=ROOM)
    assert not tokenprune.is_patched(model)


def test_settings_reject_the_cache(build: Callable) -> None:
    from tokenprune.integrations.vllm.settings.parse import parse_setting

    setting = {"method": "divprune", "keep": 0.5}
    for read in (tokenprune.read_config, parse_setting):
        with pytest.raises(tokenprune.OptionError, match="vLLM has its own cache"):
            read(setting | {"feature_cache": ROOM})
    with tokenprune.patched(build(FAMILIES["llava"]), config=setting, feature_cache=ROOM) as model:
        assert dataclasses.astuple(tokenprune.feature_cache(model).counts()) == (0, 0, 0, 0, 0, 0, ROOM)
