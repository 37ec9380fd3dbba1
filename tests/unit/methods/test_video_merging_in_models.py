# SPDX-License-Identifier: Apache-2.0
"""Video mergers inside a model match a model that gets merged embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenprune
from basics import VIDEO_METHODS
from families import FAMILIES as OTHERS
from oracle import close, generate_logits, reduced, survivors
from tests.unit.engine.test_oracle import compare_forward
from zoo import FAMILIES, IMAGE, VIDEO, Family

# Families with readable tower attention: one position axis and a newline after the video (LLaVA-OneVision), and three
# position axes, without or with features that the first decoder layers add (Qwen2.5-VL, Qwen3-VL).
MODELS = {name: {**OTHERS, **FAMILIES}[name] for name in ("llava_onevision", "qwen2_5_vl", "qwen3_vl")}
METHODS: dict[str, dict[str, Any]] = {
    "holitom": {"layer": 2}, "flashvid": {"layer": 2}, "ottvid": {}, "kitoke": {}, "framefusion": {},
    "fastvid": {}, "llava_scissor": {}, "prunevid": {"layer": 2}, "unipool": {"inner": 0.5},
}  # fmt: skip
BOTH = [
    pytest.param(tokenprune.method(name, **options), id=f"{name}-{index}")
    for name, inner in METHODS.items()
    for index, options in enumerate([inner, {"inner": False}] if inner else [{}])
]
BOTH.append(pytest.param(tokenprune.method("sttm", layer=1), id="sttm"))


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> Family:
    return MODELS[request.param]


@pytest.mark.parametrize("method", BOTH)
@torch.no_grad()
def test_forward_matches_reference(method: tokenprune.Method, family: Family, build: Callable[..., Any]) -> None:
    num_frames = 5 if family.name == "llava_onevision" else 3  # LLaVA-OneVision stacks all videos
    inputs = family.make_inputs(images=(0, 0), video=(5, num_frames))
    compare_forward(family, build(family), method, inputs, 0.4)


@pytest.mark.parametrize("method", BOTH)
@torch.no_grad()
def test_generate_with_image_in_prompt(method: tokenprune.Method, family: Family, build: Callable[..., Any]) -> None:
    model, inputs = build(family), family.make_inputs(images=(1,), video=4)
    with tokenprune.patched(model, method, keep=0.4, record=True):
        got, tokens, _ = generate_logits(model, inputs, 3)
        cuts = tokenprune.stats(model).cuts
        notes = tokenprune.stats(model).notes
    assert any("images keep all tokens" in note for note in notes)
    length = inputs["input_ids"].shape[1]
    with reduced(family, model, cuts, length):
        want, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    close(got, want)
    alive = survivors(cuts[-1], length)
    # The video comes first. LLaVA-OneVision has the same id for images and videos.
    video, image = inputs.counts[0]
    positions = ((inputs["input_ids"][0] == IMAGE) | (inputs["input_ids"][0] == VIDEO)).nonzero().flatten()
    assert alive[0, positions[video:]].all() and image == len(positions) - video
    assert 0 < alive[0, positions[:video]].sum() < video


@pytest.mark.parametrize("name", [*METHODS, "sttm"])
@torch.no_grad()
def test_keep_all_changes_nothing(name: str, family: Family, build: Callable[..., Any]) -> None:
    model, inputs = build(family), family.make_inputs(images=(0,), video=3)
    plain = model(**inputs).logits
    for keep in (1.0, 500):
        with tokenprune.patched(model, name, keep=keep):
            assert torch.equal(model(**inputs).logits, plain)


DROPPING = [tokenprune.method(name) for name in VIDEO_METHODS if name not in (*METHODS, "sttm")]


@pytest.mark.parametrize("method", [*BOTH, *(pytest.param(method, id=method.name) for method in DROPPING)])
@torch.no_grad()
def test_question_does_not_change_first_cut(method: tokenprune.Method, build: Callable[..., Any]) -> None:
    family = MODELS["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(0,), video=6)
    cuts_per_question = []
    for words in (range(100, 104), range(60, 64)):
        question = {**inputs, "input_ids": inputs["input_ids"].clone()}
        question["input_ids"][:, -4:] = torch.tensor([*words])
        with tokenprune.patched(model, method, keep=0.5, record=True):
            model(**question)
            cuts_per_question.append(tokenprune.stats(model).cuts)
    first, second = cuts_per_question
    assert (
        first[0].kept == second[0].kept
        and first[0].sources == second[0].sources
        and first[0].weights == second[0].weights
    )
    assert len(first) == (2 if method.query_aware else 1)
