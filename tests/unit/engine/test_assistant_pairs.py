# SPDX-License-Identifier: Apache-2.0
"""A smaller model as the draft, and all that cannot draft: refused by name, with nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.generation import GenerationMixin

import tokenprune
from assistants import STEPS, helped, lengths_of, same, small_llava, tower_runs
from basics import snapshot
from tests.unit.engine.test_drafts import draft_of
from tokenprune import (
    AlreadyPatchedError,
    OptionError,
    UnknownMethodError,
    UnsupportedModelError,
    UnsupportedSetupError,
)
from zoo import FAMILIES, Family, tower

# -- a smaller draft -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["divprune", "fastv", "visionzip"])
def test_a_smaller_draft(method: str, build) -> None:
    """It encodes the images itself, in its own width."""
    family = FAMILIES["llava"]
    model, draft, inputs = build(family), small_llava(), family.make_inputs(images=(2,))
    draft.generate(**inputs, max_new_tokens=2)  # transformers installs hooks of its own on first use
    want, was = model.generate(**inputs, max_new_tokens=STEPS), snapshot(draft)
    assert tokenprune.assistant(model, method, draft=draft, keep=0.3) is draft
    assert tower_runs(model, family, inputs, draft) == 2
    got = model.generate(**inputs, max_new_tokens=STEPS, assistant_model=draft)
    assert tokenprune.stats(draft).visual_tokens_in == sum(map(sum, inputs.counts))
    tokenprune.unpatch(draft)
    assert torch.equal(got, want) and same(draft, was)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_draft_with_weights_of_its_own_sees_what_the_target_sees(name: str, build) -> None:
    """One that is equal to the target, and told nothing of that, is always right."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2,))
    with helped(model, "divprune", draft=copy.deepcopy(model), keep=1.0) as draft:
        _, lengths = lengths_of(model, family, inputs, draft)
    assert len(lengths) == 3


def test_a_draft_in_other_numbers(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    want, seen = model.generate(**inputs, max_new_tokens=STEPS), []
    draft = draft_of(model).to(torch.bfloat16)

    def note(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.extend([*args, *kwargs.values()])

    draft.model.vision_tower.register_forward_pre_hook(note, with_kwargs=True)
    with helped(model, "divprune", draft=draft, keep=0.5):
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, assistant_model=draft), want)
    assert [one.dtype for one in seen if isinstance(one, torch.Tensor)] == [torch.bfloat16]


# -- what is refused -----------------------------------------------------------------------------------------------


def other_vocabulary() -> Any:
    draft = small_llava()
    draft.resize_token_embeddings(168)
    return draft


def other_patches() -> Any:
    family = FAMILIES["llava"]
    config = family.config | {"vision_config": tower("clip_vision_model", 32)}
    return Family("llava", config, family.image, family.sizes).build()


REFUSED = {
    "pixels": (dict(method="downsample", keep=0.5), OptionError, "acts on pixels"),
    "unknown": (dict(method="prune", keep=0.5), UnknownMethodError, "prune"),
    "option": (dict(method="divprune", keep=0.5, colour=1), OptionError, "colour"),
    "vocabulary": (dict(draft=other_vocabulary), OptionError, "160 token ids and the draft 168"),
    "patches": (dict(draft=other_patches), OptionError, "image_size"),
    "timm": (dict(draft=lambda: nn.Linear(2, 2)), UnsupportedModelError, "Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_help_is_refused(case: str, build) -> None:
    """And nothing is changed by that."""
    family = FAMILIES["llava"]
    model = build(family)
    arguments, error, text = REFUSED[case]
    draft = arguments["draft"]() if "draft" in arguments else None
    was, draft_was = snapshot(model), None if draft is None else snapshot(draft)
    with pytest.raises(error, match=text):
        tokenprune.assistant(model, **(arguments | {"draft": draft}))
    assert same(model, was) and (draft is None or same(draft, draft_was))


def test_more_that_is_refused(build, monkeypatch) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    was = snapshot(model)
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
    assert same(model, was)
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
    assert same(model, was)
