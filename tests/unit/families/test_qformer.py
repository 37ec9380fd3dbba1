# SPDX-License-Identifier: Apache-2.0
"""BLIP-2 and related models pass merged embeddings to the language model: all forms of call cut the same tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import tokenprune
from basics import snapshot
from families.qformer import FAMILIES, QUERIES
from oracle import close, generate_logits, reduced, survivors
from pruned import check_generation
from tokenprune import Budget, UnsupportedModelError, UnsupportedSetupError
from tokenprune.errors import PlaceholderMismatchError
from turns import check_turns, words
from zoo import BOS, IMAGE, VIDEO, Family

METHODS = ["random", "fastv", "pool"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def record_cuts(model: Any, method: str = "random", keep: float = 0.3, **inputs: Any) -> list[Any]:
    with tokenprune.patched(model, method, keep=keep, record=True):
        model.generate(**inputs, max_new_tokens=1)
        return tokenprune.stats(model).cuts


@pytest.mark.pairwise
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [{"only": 0}, {"images": (2, 1), "padding": None}], ids=["one row", "no padding"])
def test_generate(family: Family, build, method: str, attn: str, batch: dict) -> None:
    model, inputs = build(family, attn), family.make_inputs(**batch)
    check_generation(family, model, inputs, method, 0.3)


@pytest.mark.parametrize("method", ["divprune", "fastv", "pool"])
def test_beams(family: Family, model, method: str) -> None:
    inputs = family.make_inputs(images=(2, 1))
    options = dict(max_new_tokens=4, num_beams=3, output_scores=True, return_dict_in_generate=True)
    with tokenprune.patched(model, method, keep=0.3, record=True):
        got = model.generate(**inputs, **options)
        (cut,) = tokenprune.stats(model).cuts
    assert len(cut.kept) == 2 * 3 and all(cut.kept[row] == cut.kept[row // 3 * 3] for row in range(6))
    with reduced(family, model, [cut], inputs["input_ids"].shape[1]):
        want = model.generate(**inputs, **options)
    assert torch.equal(got.sequences, want.sequences)
    close(got.sequences_scores, want.sequences_scores)


@pytest.mark.parametrize("method", METHODS)
def test_second_turn(family: Family, model, method: str) -> None:
    """These models get images in every call; tokens that are in the cache are not cut again."""
    inputs = family.make_inputs(images=(2, 1))
    images = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    check_turns(family, model, inputs, method, **images)


def test_a_image_in_a_later_turn(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2,))
    ids, indices = inputs["input_ids"], family.visual_mask(model, inputs)[0].nonzero().flatten()
    split = int(indices[len(indices) // 2]) - 1
    first = {name: value[: len(value) // 2] for name, value in inputs.items()}
    first |= {name: inputs[name][:, :split] for name in ("input_ids", "attention_mask")}
    with tokenprune.patched(model, "uniform", keep=5, record=True):
        out = model.generate(**first, max_new_tokens=1, return_dict_in_generate=True)
        assert tokenprune.stats(model).visual_tokens_in == len(indices) // 2
        got = model.generate(
            **inputs, past_key_values=out.past_key_values, max_new_tokens=1, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert tokenprune.stats(model).visual_tokens_in == len(indices) // 2
        assert tokenprune.stats(model).visual_tokens_out == 5
        expected, _, _ = generate_logits(model, inputs, 1)
    assert ids.shape[1] > split
    close(got.logits[0], expected[:, 0])


@torch.no_grad()
def test_the_prompt_may_be_left_out(family: Family, model) -> None:
    """`generate` then writes placeholders and a start token, with four frames for a video."""
    inputs = family.make_inputs(images=(1,))
    del inputs["input_ids"], inputs["attention_mask"]
    pixels = inputs["pixel_values"]
    tokens = QUERIES
    if pixels.ndim == 5:
        inputs["pixel_values"], tokens = pixels[:, [0, 1, 2, 1]], 4 * QUERIES
    (cut,) = record_cuts(model, **inputs)
    ids = torch.tensor([[VIDEO if pixels.ndim == 5 else IMAGE] * tokens + [BOS]])
    (want,) = record_cuts(model, **inputs, input_ids=ids)
    assert cut.kept == want.kept
    assert len(cut.kept[0]) == 1 + round(0.3 * tokens) and tokens in cut.kept[0]


@torch.no_grad()
def test_embeddings_as_prompt(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with tokenprune.patched(model, "divprune", keep=0.3):
        want = model(**inputs).logits
        assert torch.equal(model(**others, input_ids=None, inputs_embeds=embeds).logits, want)
        positional = model(inputs["pixel_values"], *([] if "qformer_input_ids" not in inputs else
                           [inputs["qformer_input_ids"], inputs["qformer_attention_mask"]]),
                           inputs["input_ids"], inputs["attention_mask"]).logits  # fmt: skip
        assert torch.equal(positional, want)
    (cut,), (other,) = record_cuts(model, **inputs), record_cuts(model, **others, inputs_embeds=embeds)
    assert cut.kept == other.kept


@torch.no_grad()
def test_encoded_images(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    modality = "video" if inputs["pixel_values"].ndim == 5 else "image"
    images = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    encoded = {modality: getattr(model, f"get_{modality}_features")(**images)}
    others = {"pixel_values": None} | dict.fromkeys(images.keys() - {"pixel_values"})
    with tokenprune.patched(model, "divprune", keep=0.3):
        want = model(**inputs).logits
        assert torch.equal(model(**inputs | others, mm_encoder_outputs=encoded).logits, want)


@torch.no_grad()
def test_language_model_itself_is_unchanged(family: Family, model) -> None:
    text = {"input_ids": words(2, 6)}
    want = model.language_model(**text).logits
    embeds = model.get_input_embeddings()(text["input_ids"])
    with tokenprune.patched(model, "random", keep=0.3):
        assert torch.equal(model.language_model(**text).logits, want)
        assert torch.equal(model.language_model(inputs_embeds=embeds).logits, want)


def test_a_copy_is_patched_for_itself(model, family: Family) -> None:
    inputs = family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, "random", keep=0.3):
        other = copy.deepcopy(model)
        want = model.generate(**inputs, max_new_tokens=2)
    assert torch.equal(other.generate(**inputs, max_new_tokens=2), want)
    assert tokenprune.stats(other).visual_tokens_out < tokenprune.stats(other).visual_tokens_in
    assert other.generate.original.__self__ is other


def test_errors_leave_the_model_unchanged(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    fewer = {name: value[:1] for name, value in inputs.items()}  # three images, placeholders of two
    fewer |= {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    with tokenprune.patched(model, "random", keep=0.3):
        with pytest.raises(UnsupportedSetupError, match="without prefill_chunk_size"):
            model.generate(**inputs, max_new_tokens=2, prefill_chunk_size=8)
        for call in (model, model.generate):
            if fewer["pixel_values"].ndim == 4:  # features of videos are not counted: see Engine._match_features
                with pytest.raises(PlaceholderMismatchError, match=f"{2 * QUERIES} image .* {3 * QUERIES} features"):
                    call(**fewer)
        with torch.no_grad():
            text = words(1, 4)
            with_patch = model.language_model(text).logits
    assert torch.equal(with_patch, model.language_model(text).logits)


def test_frames_have_budgets_of_their_own(build) -> None:
    family = FAMILIES["instructblipvideo"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, "divprune", keep=Budget(keep=5, per="frame"), record=True):
        model.generate(**inputs, max_new_tokens=1)
        (cut,) = tokenprune.stats(model).cuts
    is_visual = family.visual_mask(model, inputs)
    is_kept = survivors(cut, is_visual.shape[1])[is_visual]
    assert is_kept.view(-1, QUERIES).sum(1).tolist() == [5] * 9


@pytest.mark.parametrize("kind", ["blip-2", "instructblip", "instructblipvideo"])
def test_encoders_as_language_models_are_refused(kind: str) -> None:
    small = dict(text_config={"model_type": "t5"}, image_token_index=IMAGE, video_token_index=VIDEO)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**small))
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' with a language model of type 't5'.*OPT or Vicuna"):
        tokenprune.patch(model, "divprune", keep=0.3)
    assert snapshot(model) == before


@torch.no_grad()
def test_the_language_model_alone_runs_after_an_interrupted_call() -> None:
    model, inputs = FAMILIES["blip-2"].prepare()
    embeds = torch.randn(1, 4, model.language_model.config.hidden_size)
    want = model.language_model(inputs_embeds=embeds).logits

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with tokenprune.patched(model, "divprune", keep=0.4):
        hook = model.language_model.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**inputs)
        hook.remove()
        assert torch.equal(model.language_model(inputs_embeds=embeds).logits, want)
