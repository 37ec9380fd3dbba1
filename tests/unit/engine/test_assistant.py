# SPDX-License-Identifier: Apache-2.0
"""Draft models with fewer visual tokens: generation returns the answer of the target."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.generation import GenerationMixin

import tokenprune
from assistants import DRAFTED, STEPS, helped, lengths_of, same, small_llava, tower_runs
from basics import snapshot
from oracle import close, generate_logits
from tests.unit.engine.test_drafts import draft_of, settings, skip_refused
from tokenprune import (
    AlreadyPatchedError,
    NotPatchedError,
    OptionError,
    UnknownMethodError,
    UnsupportedModelError,
    UnsupportedSetupError,
)
from zoo import FAMILIES, Family, tower

# One method per site, methods that read the tower or change it, a method that drops tokens while decoding, and a
# stack.
METHODS = ["divprune", "fastv", "vscan", "visionzip", "pool", "tome", "dyrate", ["divprune", "fastv"]]
NAMES = ["llava", "qwen2_5_vl", "gemma3"]


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method if isinstance(method, str) else "+".join(method))
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_the_targets_own(name: str, method: Any, build) -> None:
    skip_refused(name, method if isinstance(method, str) else None)
    model, inputs = FAMILIES[name].prepare(build, only=0)
    want, tokens, _ = generate_logits(model, inputs, STEPS)
    with helped(model, method, **settings(model, method if isinstance(method, str) else "", inputs)) as assistant:
        got, assisted, _ = generate_logits(model, inputs, STEPS, assistant_model=assistant)
        stats = tokenprune.stats(assistant)
    assert torch.equal(assisted, tokens)
    close(got, want)
    assert stats.visual_tokens_in == sum(map(sum, inputs.counts)) > stats.visual_tokens_average


PROMPTS = {
    "one image": dict(only=0),
    "three images": dict(images=(3,)),
    "video and image": dict(images=(1,), video=True),
    "text": dict(images=(0,)),
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ["llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_draft_that_sees_all_is_always_right(name: str, prompt: str, build) -> None:
    """With keep=1.0 every draft token is accepted, so the draft receives all images, videos and positions."""
    family = FAMILIES[name]
    if prompt.startswith("video") and family.video is None:
        pytest.skip(f"{name} takes no video")
    model, inputs = build(family), family.make_inputs(**PROMPTS[prompt])
    want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "divprune", keep=1.0) as assistant:
        got, lengths = lengths_of(model, family, inputs, assistant)
    assert torch.equal(got, want)
    assert lengths == [inputs["input_ids"].shape[1], DRAFTED + 1, DRAFTED + 1]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_passes_no_images_to_drafts(name: str, build) -> None:
    """transformers passes no images to a draft. If this fails, check whether `assistant` is still needed."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(only=0)
    draft = copy.deepcopy(model)
    draft.generation_config.num_assistant_tokens = DRAFTED
    draft.generation_config.assistant_confidence_threshold = 0.0
    _, lengths = lengths_of(model, family, inputs, draft)
    assert len(lengths) > 3


@pytest.mark.parametrize("separate_weights", [False, True], ids=["shared", "own weights"])
@pytest.mark.parametrize("method", ["pool", "fastv", "visionzip", "vidcom2"])
def test_the_draft_keeps_what_a_patch_would_keep(method: str, separate_weights: bool, build) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(1,), video=True)
    with tokenprune.patched(model, method, keep=0.3, record=True):
        model.generate(**inputs, max_new_tokens=2)
        want = tokenprune.stats(model)
    with helped(
        model, method, draft=copy.deepcopy(model) if separate_weights else None, keep=0.3, record=True
    ) as assistant:
        model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant)
        got = tokenprune.stats(assistant)
    assert got.cuts and [cut.kept for cut in got.cuts] == [cut.kept for cut in want.cuts]
    assert got.visual_tokens_per_layer == want.visual_tokens_per_layer


@pytest.mark.parametrize("name", [*NAMES, "smolvlm"])
def test_a_target_that_is_patched_later_and_keeps_its_images(name: str, build) -> None:
    """Target and draft both encode an image that is in the feature cache."""
    model, inputs = FAMILIES[name].prepare(build, only=0)
    plain = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "vscan" if name == "llava" else "divprune", keep=0.3) as assistant:
        with tokenprune.patched(model, "divprune", keep=0.6, feature_cache=2**24):
            want = model.generate(**inputs, max_new_tokens=STEPS)
            for _ in range(2):
                assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), want)
            assert tokenprune.stats(model).feature_cache.hits
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), plain)


def test_padding_on_the_left(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), dict(family.make_inputs(only=0))
    for name, fill in (("input_ids", 0), ("attention_mask", 0), (family.types, 0)):
        if name in inputs:
            inputs[name] = nn.functional.pad(inputs[name], (5, 0), value=fill)
    want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "divprune", keep=1.0) as assistant:
        got, lengths = lengths_of(model, family, inputs, assistant)
        assert torch.equal(got, want) and len(lengths) == 3
    with helped(model, "fastv", keep=0.3) as assistant:
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), want)


def test_sampling(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, only=0)
    want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "divprune", keep=0.3) as assistant:
        got = model.generate(**inputs, max_new_tokens=STEPS, do_sample=True, top_k=1, assistant_model=assistant)
        torch.manual_seed(0)
        sampled = model.generate(**inputs, max_new_tokens=STEPS, do_sample=True, assistant_model=assistant)
    assert torch.equal(got, want) and sampled.shape == want.shape


@pytest.mark.parametrize(
    ("target_method", "draft_method"),
    [("fastv", "divprune"), ("divprune", "divprune"), ("tome", "fastv"), ("dyrate", "divprune")],
)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_patched_target(name: str, target_method: str, draft_method: str, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, only=0)
    with tokenprune.patched(model, target_method, **settings(model, target_method, inputs)):
        want, tokens, _ = generate_logits(model, inputs, STEPS)
        before, snapshot_before = tokenprune.stats(model), snapshot(model)
        with helped(model, draft_method, keep=0.3) as assistant:
            got, assisted, _ = generate_logits(model, inputs, STEPS, assistant_model=assistant)
            after, draft_stats = (
                tokenprune.stats(model),
                tokenprune.stats(assistant) if target_method != "dyrate" else None,
            )
        assert torch.equal(assisted, tokens)
        close(got, want)
        assert after.visual_tokens_per_layer == before.visual_tokens_per_layer
        assert after.decode_kept == before.decode_kept
        if draft_stats is not None:
            assert draft_stats.visual_tokens_per_layer != after.visual_tokens_per_layer or target_method == draft_method
        assert same(model, snapshot_before)


def test_two_threads(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = build(family)
    prompts = [family.make_inputs(only=0, seed=seed) for seed in range(2)] * 3

    def answer(inputs: Any) -> Any:
        return model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant)

    with helped(model, "divprune", keep=0.3) as assistant:
        sequential = [answer(inputs) for inputs in prompts[:2]]
        with ThreadPoolExecutor(2) as pool:
            concurrent = list(pool.map(answer, prompts))
    for got, want in zip(concurrent, sequential * 3, strict=True):
        assert torch.equal(got, want)


def test_the_assistant_alone_is_a_patched_model(build) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(1, 2))
    with tokenprune.patched(model, "fastv", keep=0.3):
        want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "fastv", keep=0.3) as assistant:
        assert torch.equal(assistant.generate(**inputs, max_new_tokens=STEPS), want)


# -- costs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "runs"), [("divprune", 1), ("fastv", 1), ("visionzip", 2), ("tome", 2)])
def test_the_tower_runs_once_unless_the_draft_changes_or_reads_it(method: str, runs: int, build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with helped(model, method, keep=0.5) as assistant:
        assert tower_runs(model, family, inputs, assistant) == runs


def test_all_weights_are_shared_and_nothing_else() -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = family.build()
    with helped(model, "divprune", keep=0.3) as assistant:
        storages = [
            {
                tensor.untyped_storage().data_ptr()
                for tensor in (*module.parameters(), *module.buffers())
                if tensor.numel()
            }
            for module in (model, assistant)
        ]
        assert storages[0] == storages[1]
        assert not set(map(id, model.modules())) & set(map(id, assistant.modules()))
        assert assistant.config is not model.config
        assert assistant.generation_config is not model.generation_config
        with torch.no_grad():  # a training step of the target changes the assistant
            model.lm_head.weight.add_(1)
        assert torch.equal(assistant.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_not_touched(name: str, build) -> None:
    """An assistant wraps only methods of its target, and leaves no trace once it is unpatched or collected."""
    model, inputs = FAMILIES[name].prepare(build, only=0)
    model.generate(**inputs, max_new_tokens=2)
    before, settings_before = snapshot(model), model.generation_config.to_dict()
    with helped(model, "fastv", keep=0.3) as assistant:
        model.generate(**inputs, max_new_tokens=4, assistant_model=assistant)
        after = snapshot(model)
        changed = {
            key
            for key in after.keys() | before.keys()
            if after.get(key) != before.get(key) and "rope_deltas" not in key
        }
        names = {key.rpartition(".")[2] for key in changed}
        assert names <= {"_tokenprune_wrapped", "_get_candidate_generator", "get_image_features", "get_video_features"}
        assert model.generation_config.to_dict() == settings_before
    assert same(model, before)
    remaining_names = set(vars(assistant)) | {name for module in assistant.modules() for name in vars(module)}
    assert not [name for name in remaining_names if "tokenprune" in name]
    with pytest.raises(NotPatchedError):
        tokenprune.stats(assistant)
    dropped = tokenprune.assistant(model, "fastv", keep=0.3)
    assert not same(model, before)
    del dropped
    gc.collect()
    assert same(model, before)


def test_an_assistant_of_a_model_that_has_one(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, only=0)
    want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "divprune", keep=0.3) as first:
        with helped(model, "fastv", keep=0.2) as second:
            for assistant in (first, second):
                assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), want)
        tokenprune.patch(second, "divprune", keep=0.3)
        tokenprune.unpatch(second)
        assert not [name for module in second.modules() for name in vars(module) if "tokenprune" in name]
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=first), want)


def test_temporary_patch_of_the_assistant(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with helped(model, "divprune", keep=1.0) as assistant:
        with tokenprune.patched(assistant, "fastv", keep=0.3, replace=True):
            pass
        _, lengths = lengths_of(model, family, inputs, assistant)
    assert len(lengths) == 3


# -- a smaller draft -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["divprune", "fastv", "visionzip"])
def test_a_smaller_draft(method: str, build) -> None:
    family = FAMILIES["llava"]
    model, draft, inputs = build(family), small_llava(), family.make_inputs(images=(2,))
    draft.generate(**inputs, max_new_tokens=2)  # transformers installs hooks on first use
    want, before = model.generate(**inputs, max_new_tokens=STEPS), snapshot(draft)
    assert tokenprune.assistant(model, method, draft=draft, keep=0.3) is draft
    assert tower_runs(model, family, inputs, draft) == 2
    got = model.generate(**inputs, max_new_tokens=STEPS, assistant_model=draft)
    assert tokenprune.stats(draft).visual_tokens_in == sum(map(sum, inputs.counts))
    tokenprune.unpatch(draft)
    assert torch.equal(got, want) and same(draft, before)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_draft_with_weights_of_its_own_sees_what_the_target_sees(name: str, build) -> None:
    """The target accepts every token of an equal draft, although they share no weights."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2,))
    with helped(model, "divprune", draft=copy.deepcopy(model), keep=1.0) as draft:
        _, lengths = lengths_of(model, family, inputs, draft)
    assert len(lengths) == 3


def test_draft_of_another_dtype(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, only=0)
    want, arguments = model.generate(**inputs, max_new_tokens=STEPS), []
    draft = draft_of(model).to(torch.bfloat16)

    def record(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments.extend([*args, *kwargs.values()])

    draft.model.vision_tower.register_forward_pre_hook(record, with_kwargs=True)
    with helped(model, "divprune", draft=draft, keep=0.5):
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=draft), want)
    assert [argument.dtype for argument in arguments if isinstance(argument, torch.Tensor)] == [torch.bfloat16]


# -- refused arguments ---------------------------------------------------------------------------------------------


def make_other_vocabulary() -> Any:
    draft = small_llava()
    draft.resize_token_embeddings(168)
    return draft


def make_other_patches() -> Any:
    family = FAMILIES["llava"]
    config = family.config | {"vision_config": tower("clip_vision_model", 32)}
    return Family("llava", config, family.image, family.sizes).build()


REFUSED = {
    "pixels": (dict(method="downsample", keep=0.5), OptionError, "acts on pixels"),
    "unknown": (dict(method="prune", keep=0.5), UnknownMethodError, "prune"),
    "option": (dict(method="divprune", keep=0.5, colour=1), OptionError, "colour"),
    "vocabulary": (dict(draft=make_other_vocabulary), OptionError, "160 token ids and the draft 168"),
    "patches": (dict(draft=make_other_patches), OptionError, "image_size"),
    "timm": (dict(draft=lambda: nn.Linear(2, 2)), UnsupportedModelError, "Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_drafts_are_refused(case: str, build) -> None:
    family = FAMILIES["llava"]
    model = build(family)
    arguments, error, text = REFUSED[case]
    draft = arguments["draft"]() if "draft" in arguments else None
    before, draft_before = snapshot(model), None if draft is None else snapshot(draft)
    with pytest.raises(error, match=text):
        tokenprune.assistant(model, **(arguments | {"draft": draft}))
    assert same(model, before) and (draft is None or same(draft, draft_before))


def test_other_unsupported_calls_are_refused(build, monkeypatch) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    before = snapshot(model)
    with pytest.raises(OptionError, match="leave it out"):
        tokenprune.assistant(model, draft=model)
    with pytest.raises(AlreadyPatchedError):
        tokenprune.assistant(model, draft=tokenprune.patch(small_llava(), "divprune", keep=0.5))
    with pytest.raises(UnsupportedModelError):
        tokenprune.assistant(nn.Linear(2, 2))
    offloaded = copy.deepcopy(model)
    offloaded.lm_head.to("meta")
    with pytest.raises(UnsupportedSetupError, match="offloaded"):
        tokenprune.assistant(offloaded, "divprune")
    with monkeypatch.context() as patch:
        patch.delattr(GenerationMixin, "_get_candidate_generator")
        small = small_llava()
        with pytest.raises(UnsupportedSetupError, match="version"):
            tokenprune.assistant(model, "divprune", draft=small)
        assert not tokenprune.is_patched(small)
    assert same(model, before)
    with helped(model, "divprune", keep=0.3) as assistant:
        with pytest.raises(ValueError, match="batch_size = 1"):
            model.generate(**family.make_inputs(), max_new_tokens=4, assistant_model=assistant)
        cache = DynamicCache(config=model.config.get_text_config())
        model.generate(**inputs, max_new_tokens=2, past_key_values=cache)
        more = torch.cat([inputs["input_ids"], torch.full((1, 6), 20)], 1)
        with pytest.raises(UnsupportedSetupError, match="without its images"):
            model.generate(input_ids=more, max_new_tokens=4, past_key_values=cache, assistant_model=assistant)
        embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
        embedded |= {name: inputs[name] for name in ("pixel_values", "attention_mask")}
        with pytest.raises(UnsupportedSetupError, match="input_ids"):
            model.generate(**embedded, max_new_tokens=4, assistant_model=assistant)
        with torch.no_grad():
            encoded = {"image": build(family, "eager").model.get_image_features(inputs["pixel_values"])}
        rest = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with pytest.raises(UnsupportedSetupError, match="pixels"):
            model.generate(**rest, mm_encoder_outputs=encoded, max_new_tokens=4, assistant_model=assistant)
    assert same(model, before)
