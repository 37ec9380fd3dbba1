# SPDX-License-Identifier: Apache-2.0
"""An assistant that sees fewer visual tokens: what it proposes is used, and what comes out is the target's own."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import tokenprune
from assistants import DRAFTED, STEPS, helped, lengths_of, same, tower_runs
from basics import snapshot
from oracle import close, generate_logits
from tests.unit.engine.test_drafts import settings, skip_refused
from tokenprune import NotPatchedError
from zoo import FAMILIES

# One at each site, some that read the tower or act in it, one that goes on while decoding, and a stack.
METHODS = ["divprune", "fastv", "vscan", "visionzip", "pool", "tome", "dyrate", ["divprune", "fastv"]]
NAMES = ["llava", "qwen2_5_vl", "gemma3"]


# -- what comes out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one if isinstance(one, str) else "+".join(one))
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_the_targets_own(name: str, method: Any, build) -> None:
    skip_refused(name, method if isinstance(method, str) else None)
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(only=0)
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
    """With keep=1.0 it is the target, if it gets all that the target gets: images, videos, positions."""
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
def test_without_us_a_draft_is_blind(name: str, build) -> None:
    """The fault of transformers that `assistant` mends: when this fails, look whether the shim is still needed."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(only=0)
    draft = copy.deepcopy(model)
    draft.generation_config.num_assistant_tokens = DRAFTED
    draft.generation_config.assistant_confidence_threshold = 0.0
    _, lengths = lengths_of(model, family, inputs, draft)
    assert len(lengths) > 3


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own weights"])
@pytest.mark.parametrize("method", ["pool", "fastv", "visionzip", "vidcom2"])
def test_the_draft_keeps_what_a_patch_would_keep(method: str, own: bool, build) -> None:
    """Whoever encoded the images, their grids and frames are known to it."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1,), video=True)
    with tokenprune.patched(model, method, keep=0.3, record=True):
        model.generate(**inputs, max_new_tokens=2)
        want = tokenprune.stats(model)
    with helped(model, method, draft=copy.deepcopy(model) if own else None, keep=0.3, record=True) as assistant:
        model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant)
        got = tokenprune.stats(assistant)
    assert got.cuts and [cut.kept for cut in got.cuts] == [cut.kept for cut in want.cuts]
    assert got.visual_tokens_per_layer == want.visual_tokens_per_layer


@pytest.mark.parametrize("name", [*NAMES, "smolvlm"])
def test_a_target_that_is_patched_later_and_keeps_its_images(name: str, build) -> None:
    """An image that was found again is one that the draft can encode, whichever was asked for first."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(only=0)
    later = dict(keep=0.6, feature_cache=2**24)
    with (
        helped(model, "vscan" if name == "llava" else "divprune", keep=0.3) as assistant,
        tokenprune.patched(model, "divprune", **later),
    ):
        want = model.generate(**inputs, max_new_tokens=STEPS)
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), want)
        assert tokenprune.stats(model).feature_cache.hits


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
    """Sampling from the likeliest word alone is greedy; whether a draft helps or not."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "divprune", keep=0.3) as assistant:
        got = model.generate(**inputs, max_new_tokens=STEPS, do_sample=True, top_k=1, assistant_model=assistant)
        torch.manual_seed(0)
        free = model.generate(**inputs, max_new_tokens=STEPS, do_sample=True, assistant_model=assistant)
    assert torch.equal(got, want) and free.shape == want.shape


@pytest.mark.parametrize(
    ("theirs", "ours"), [("fastv", "divprune"), ("divprune", "divprune"), ("tome", "fastv"), ("dyrate", "divprune")]
)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_patched_target(name: str, theirs: str, ours: str, build) -> None:
    """Its own pruned answer is what comes out, and its patch stays."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, theirs, **settings(model, theirs, inputs)):
        want, tokens, _ = generate_logits(model, inputs, STEPS)
        before, was = tokenprune.stats(model), snapshot(model)
        with helped(model, ours, keep=0.3) as assistant:
            got, assisted, _ = generate_logits(model, inputs, STEPS, assistant_model=assistant)
            after, seen = tokenprune.stats(model), tokenprune.stats(assistant) if theirs != "dyrate" else None
        assert torch.equal(assisted, tokens)
        close(got, want)
        assert after.visual_tokens_per_layer == before.visual_tokens_per_layer
        assert after.decode_kept == before.decode_kept
        if seen is not None:
            assert seen.visual_tokens_per_layer != after.visual_tokens_per_layer or theirs == ours
        assert same(model, was)


def test_a_target_that_is_patched_later(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    plain = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "divprune", keep=0.3) as assistant:
        with tokenprune.patched(model, "fastv", keep=0.3):
            want = model.generate(**inputs, max_new_tokens=STEPS)
            assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), want)
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant), plain)


def test_two_threads(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = build(family)
    prompts = [family.make_inputs(only=0, seed=seed) for seed in range(2)] * 3

    def answer(inputs: Any) -> Any:
        return model.generate(**inputs, max_new_tokens=STEPS, assistant_model=assistant)

    with helped(model, "divprune", keep=0.3) as assistant:
        alone = [answer(inputs) for inputs in prompts[:2]]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(answer, prompts))
    for got, want in zip(together, alone * 3, strict=True):
        assert torch.equal(got, want)


def test_the_assistant_alone_is_a_patched_model(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1, 2))
    with tokenprune.patched(model, "fastv", keep=0.3):
        want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "fastv", keep=0.3) as assistant:
        assert torch.equal(assistant.generate(**inputs, max_new_tokens=STEPS), want)


# -- what it takes -------------------------------------------------------------------------------------------------


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
            {tensor.untyped_storage().data_ptr() for tensor in (*one.parameters(), *one.buffers()) if tensor.numel()}
            for one in (model, assistant)
        ]
        assert storages[0] == storages[1]
        assert not set(map(id, model.modules())) & set(map(id, assistant.modules()))
        assert assistant.config is not model.config
        assert assistant.generation_config is not model.generation_config
        with torch.no_grad():  # what trains the one trains the other
            model.lm_head.weight.add_(1)
        assert torch.equal(assistant.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_not_touched(name: str, build) -> None:
    """While there is an assistant, some of its methods are wrapped; its hooks and configs are as they were. Then
    nothing is left, whether the assistant is unpatched or dropped."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(only=0)
    model.generate(**inputs, max_new_tokens=2)
    was, settings_were = snapshot(model), model.generation_config.to_dict()
    with helped(model, "fastv", keep=0.3) as assistant:
        model.generate(**inputs, max_new_tokens=4, assistant_model=assistant)
        now = snapshot(model)
        changed = {key for key in now.keys() | was.keys() if now.get(key) != was.get(key) and "rope_deltas" not in key}
        names = {key.rpartition(".")[2] for key in changed}
        assert names <= {"_tokenprune_wrapped", "_get_candidate_generator", "get_image_features", "get_video_features"}
        assert model.generation_config.to_dict() == settings_were
    assert same(model, was)
    left = set(vars(assistant)) | {name for module in assistant.modules() for name in vars(module)}
    assert not [name for name in left if "tokenprune" in name]
    with pytest.raises(NotPatchedError):
        tokenprune.stats(assistant)
    dropped = tokenprune.assistant(model, "fastv", keep=0.3)
    assert not same(model, was)
    del dropped
    gc.collect()
    assert same(model, was)


def test_an_assistant_of_a_model_that_has_one(build) -> None:
    """It is a copy of the model, not of what the first one did to it."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    want = model.generate(**inputs, max_new_tokens=STEPS)
    with helped(model, "divprune", keep=0.3) as first:
        with helped(model, "fastv", keep=0.2) as second:
            for one in (first, second):
                assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=one), want)
        tokenprune.patch(second, "divprune", keep=0.3)
        tokenprune.unpatch(second)
        assert not [name for module in second.modules() for name in vars(module) if "tokenprune" in name]
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=first), want)


def test_another_patch_of_the_assistant_for_a_while(build) -> None:
    """It sees the images again when its own patch comes back."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with helped(model, "divprune", keep=1.0) as assistant:
        with tokenprune.patched(assistant, "fastv", keep=0.3, replace=True):
            pass
        _, lengths = lengths_of(model, family, inputs, assistant)
    assert len(lengths) == 3
