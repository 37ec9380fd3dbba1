# SPDX-License-Identifier: Apache-2.0
"""Notes about calls that prune less than expected, and the thread and call of statistics."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import tokenprune
from pruned import run_pruned
from zoo import FAMILIES, Family


def merge_features(model: Any, family: Family, inputs: Any) -> dict[str, Any]:
    """Return embeddings with image features at the placeholders."""
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    features = model.model.get_image_features(inputs["pixel_values"]).pooler_output
    features = torch.cat(list(features)).view(-1, embeds.shape[-1])
    visual = family.visual_mask(model, inputs)[..., None]
    return {
        "inputs_embeds": embeds.masked_scatter(visual, features.to(embeds.dtype)),
        "attention_mask": inputs["attention_mask"],
    }


def list_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tokenprune"]


@pytest.mark.parametrize("method", ["divprune", "fastv"])
@pytest.mark.parametrize("name", ["llava", "internvl"])
@torch.no_grad()
def test_features_that_the_caller_merged_are_not_pruned(name: str, method: str, build, caplog) -> None:
    family = FAMILIES[name]
    model = build(family)
    embeds = merge_features(model, family, family.make_inputs())
    want, answer = model(**embeds).logits, model.generate(**embeds, max_new_tokens=3)
    with tokenprune.patched(model, method, keep=0.3):
        assert torch.equal(model(**embeds).logits, want)
        assert torch.equal(model.generate(**embeds, max_new_tokens=3), answer)
        (note,) = tokenprune.stats(model).notes
        assert "no tokens were pruned" in note and "pixel_values" in note
        assert list_messages(caplog) == [note]
        model(**family.make_inputs())  # with pixels
        model(input_ids=torch.full((1, 4), 30))  # text
        assert not tokenprune.stats(model).notes
    with tokenprune.patched(model, method, keep=1.0):  # keep=1.0 drops no tokens
        model(**embeds)
        assert not tokenprune.stats(model).notes
    assert list_messages(caplog) == [note]


@torch.no_grad()
def test_embeddings_of_placeholders_beside_pixels_are_pruned(build, caplog) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    with tokenprune.patched(model, "divprune", keep=0.5):
        model(**inputs)
        assert tokenprune.stats(model).keep_ratio == 0.5 and not tokenprune.stats(model).notes
    assert not list_messages(caplog)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_without_a_cache_each_step_chooses_anew(name: str, build, caplog) -> None:
    """The last token is new in each step; a method that ignores the question keeps the same tokens."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs()
    for method in ("divprune", "fastv"):
        kept_per_step: list[list[int]] = []

        def note_cut(*_: Any, kept_per_step: list[list[int]] = kept_per_step) -> None:
            visual = family.visual_mask(model, inputs)[0].nonzero()[:, 0].tolist()
            kept_per_step.append([index for index in tokenprune.stats(model).cuts[0].kept[0] if index in visual])

        with tokenprune.patched(model, method, keep=0.3, record=True):
            model(**inputs, use_cache=False)
            assert not tokenprune.stats(model).notes  # a forward by itself
            with model.register_forward_hook(note_cut):
                model.generate(**inputs, max_new_tokens=4, use_cache=False)
            notes = tokenprune.stats(model).notes
        assert len(kept_per_step) == 4
        assert (kept_per_step[1:] == kept_per_step[:1] * 3) is (method == "divprune")
        assert [("fastv" in note and "use_cache=True" in note) for note in notes] == [True] * (method == "fastv")
    assert list_messages(caplog) == notes


def list_kept_visual(model: Any, family: Family, inputs: Any) -> list[list[int]]:
    """Return the visual tokens kept by the last cut, per row and from the row's first visual token."""
    rows = []
    for visual, kept in zip(family.visual_mask(model, inputs), tokenprune.stats(model).cuts[-1].kept, strict=True):
        first = int(visual.nonzero()[0])
        rows.append([index - first for index in kept if visual[index]])
    return rows


@pytest.mark.parametrize("method", ["dart", "ivc_prune"])
@torch.no_grad()
def test_left_padding_without_position_ids_is_noted(method: str, build, caplog) -> None:
    """Rotated keys then count the padding; `position_ids` or `generate` exclude it."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(rows=3, images=1)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with tokenprune.patched(model, method, keep=0.3, record=True):
        unpadded = []
        for row in range(3):
            row_inputs = family.make_inputs(rows=3, images=1, only=row)
            model(**row_inputs)
            assert not tokenprune.stats(model).notes
            unpadded += list_kept_visual(model, family, row_inputs)
        model(**inputs)
        (note,) = tokenprune.stats(model).notes
        assert note.startswith(method) and "position_ids" in note and list_messages(caplog) == [note]
        assert list_kept_visual(model, family, inputs) != unpadded
        model(**inputs, position_ids=positions)
        assert not tokenprune.stats(model).notes and list_kept_visual(model, family, inputs) == unpadded
        model.generate(**inputs, max_new_tokens=2)
        assert not tokenprune.stats(model).notes and list_kept_visual(model, family, inputs) == unpadded
        model(**family.make_inputs(rows=3, images=1, padding="right"))
        assert not tokenprune.stats(model).notes


@pytest.mark.parametrize("name, method", [("qwen2_5_vl", "dart"), ("llava", "fastv")])
@torch.no_grad()
def test_left_padding_is_not_noted_where_it_changes_nothing(name: str, method: str, build) -> None:
    """Qwen's model derives positions from the mask, and `fastv` reads only attention, which is relative."""
    family = FAMILIES[name]
    model = build(family)
    assert not run_pruned(model, family.make_inputs(rows=3, images=1), method, 0.3)[1].notes


LLAVA = FAMILIES["llava"]


@torch.no_grad()
@pytest.mark.parametrize("method", ["divprune", "fastv", "tome", "dyrate"])
def test_guidance_keeps_the_statistics_of_the_images(method: str, build) -> None:
    """The unconditional stream of `guidance_scale` reads a prompt without images."""
    model, inputs = build(LLAVA), LLAVA.make_inputs()
    with tokenprune.patched(model, method, keep=0.4) if method != "dyrate" else tokenprune.patched(model, method):
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        want = tokenprune.stats(model).sums() | {"overhead_ms": None}
        model.generate(**inputs, max_new_tokens=3, do_sample=False, guidance_scale=1.5)
        got = tokenprune.stats(model).sums() | {"overhead_ms": None}
    assert got == want and want["visual_tokens_in"]


@torch.no_grad()
def test_each_thread_sees_its_own_last_call(build) -> None:
    model, prompts = build(LLAVA), [LLAVA.make_inputs(images=(count,)) for count in (1, 2, 3)]
    counts: list[int] = [0] * len(prompts)
    barrier = threading.Barrier(len(prompts))

    def run(index: int) -> None:
        with torch.no_grad():
            model.generate(**prompts[index], max_new_tokens=2, do_sample=False)
        barrier.wait(60)
        counts[index] = tokenprune.stats(model).visual_tokens_in

    with tokenprune.patched(model, "divprune", keep=0.4):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts == [int(LLAVA.visual_mask(model, inputs).sum()) for inputs in prompts]
        # This thread has run no call: it gets the last call of another thread, as a reader of a
        # TextIteratorStreamer does.
        assert tokenprune.stats(model).visual_tokens_in in counts
        model(**LLAVA.make_inputs(images=(1,)))
        assert tokenprune.stats(model).visual_tokens_in == counts[0]


@torch.no_grad()
def test_a_copy_starts_with_the_statistics_of_its_original() -> None:
    model, inputs = LLAVA.build(), LLAVA.make_inputs()
    with tokenprune.patched(model, "divprune", keep=0.4):
        model(**inputs)
        other = copy.deepcopy(model)
        model(**LLAVA.make_inputs(images=(2, 1)))
        assert 0 < tokenprune.stats(other).visual_tokens_in < tokenprune.stats(model).visual_tokens_in
