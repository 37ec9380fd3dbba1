# SPDX-License-Identifier: Apache-2.0
"""Towers whose attention cannot be read, and their error messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaConfig

import tokenprune
from basics import MODEL_METHODS, snapshot
from oracle import close, reduced
from tokenprune import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.models import families
from tower_attention import make_seer
from zoo import FAMILIES, IMAGE, TEXT


def test_unsupported_setups_raise(build) -> None:
    """Check every pair of methods and families of the suite, so that no test passes by skipping a pair."""
    refused = set()
    for family in FAMILIES.values():
        for method in MODEL_METHODS:
            try:
                with tokenprune.patched(build(family), method, keep=0.3):
                    pass
            except UnsupportedSetupError:
                refused.add((method, family.name))
    assert refused == set()


def test_unknown_towers_raise(build, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = dict(model_type="dinov2", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                  patch_size=4)  # fmt: skip
    config = LlavaConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_id=IMAGE)
    model = AutoModelForImageTextToText.from_config(config)
    before = snapshot(model)
    with pytest.raises(UnsupportedSetupError, match=r"supports the vision towers CLIP.*not Dinov2Model"):
        tokenprune.patch(model, "vscan", keep=0.3)
    assert snapshot(model) == before and not tokenprune.is_patched(model)
    monkeypatch.setitem(families.FAMILIES, "internvl", replace(families.FAMILIES["internvl"], patches=None))
    with pytest.raises(UnsupportedSetupError, match=r"'internvl'.*`patches` in its row"):
        tokenprune.patch(build(FAMILIES["internvl"]), "vscan", keep=0.3)


@torch.no_grad()
def test_features_of_unpatched_model_raise(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    features = model.model.get_image_features(inputs["pixel_values"], vision_feature_layer=-2)
    rest = {key: value for key, value in inputs.items() if key != "pixel_values"}
    with tokenprune.patched(model, "vscan", keep=0.3):
        with pytest.raises(UnsupportedSetupError, match="Pass pixels"):
            model(**rest, mm_encoder_outputs={"image": features})
        model(**inputs)
    with tokenprune.patched(model, make_seer((0,))[0], keep=0.3):
        other = model.model.get_image_features(inputs["pixel_values"], vision_feature_layer=-2)
    with tokenprune.patched(model, "vscan", keep=0.3), pytest.raises(TokenPruneError, match="pass pixels"):
        model(**rest, mm_encoder_outputs={"image": other})


@torch.no_grad()
def test_interpolated_features_raise(build) -> None:
    """LLaVA-OneVision shrinks the features of many tiles, so features no longer correspond to patches."""
    family = FAMILIES["llava_onevision"]
    model, inputs = build(family), family.make_inputs(only=0)
    with (
        tokenprune.patched(model, "vscan", keep=0.3),
        pytest.raises(UnsupportedSetupError, match="interpolates"),
    ):
        model.model.get_image_features(
            inputs["pixel_values"], inputs["image_sizes"], vision_feature_layer=-1,
            vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_1",
        )  # fmt: skip


def test_reading_a_merging_tower_raises(build) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(OptionError, match=r"vscan.*tome"):
        tokenprune.patch(model, ["tome", "vscan"], keep=0.5)
    tokenprune.patch(model, ["tome", "vscan"], keep=[1.0, 0.5])
    tokenprune.unpatch(model)


@torch.no_grad()
def test_class_token_among_features() -> None:
    """With vision_feature_select_strategy="full" the class token is a visual token without a patch, and is kept."""
    family = FAMILIES["llava"]
    model = family.build()
    model.config.vision_feature_select_strategy = "full"
    inputs = family.make_inputs(rows=1)
    ids = inputs["input_ids"]
    first = int((ids[0] == IMAGE).long().argmax())
    inputs["input_ids"] = torch.cat([ids[:, :first], ids[:, first : first + 1], ids[:, first:]], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    method, calls = make_seer()
    with tokenprune.patched(model, method, keep=0.5):
        model(**inputs)
    assert calls[0].patches.tile[0].tolist() == [-1] + [0] * 36 and not calls[0].maps[-1][0, :, 0].any()
    with tokenprune.patched(model, "vscan", keep=0.3, record=True):
        got = model(**inputs).logits[:, -1]
        cuts = tokenprune.stats(model).cuts
    assert first in cuts[0].kept[0] and cuts[0].sources[0][first] == [first]
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        close(got, model(**inputs).logits[:, -1])
