# SPDX-License-Identifier: Apache-2.0
"""Decoders that select keys themselves: methods on pixels are supported, methods that drop tokens later are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
from basics import snapshot
from families import REFUSED
from processors import LIMITS, photo
from tokenprune import UnsupportedModelError
from tokenprune.integrations.hf.families import Adapter, get_adapter, register_adapter, registry
from tokenprune.integrations.shared import checks
from tokenprune.models import families
from tokenprune.models.families import Family
from zoo import BOS, EOS, HEAD_DIM, HIDDEN, IMAGE, PAD, TEXT, VIDEO, VISION, wake

LEAVING = ["divprune", "fastv", "dyrate", "tome", "pixelprune", "towerdrop"]
MINIMAX = dict(
    text_config={
        **TEXT, "head_dim": HEAD_DIM, "rotary_dim": 8, "dense_intermediate_size": 96, "shared_intermediate_size": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 8, "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    },
    vision_config=dict(
        hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64,
        patch_size=4,
    ),
    image_token_index=IMAGE, video_token_index=VIDEO, projector_hidden_size=HIDDEN,
)  # fmt: skip


@pytest.fixture
def processor() -> Any:
    return Qwen2VLImageProcessor(**LIMITS)


def build_minimax() -> Any:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING["minimax_m3_vl"](**MINIMAX))
    wake(model)
    model.generation_config.update(eos_token_id=None, pad_token_id=PAD, do_sample=False)
    return model.float().eval()


def make_inputs(processor: Any) -> dict[str, Any]:
    outputs = processor(photo(64, 48), return_tensors="pt")
    ids = torch.tensor([[BOS, 20, *[IMAGE] * (int(outputs["image_grid_thw"].prod()) // 4), 30, 31, 32, EOS]])
    return {**outputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def test_a_method_on_pixels_acts(processor: Any) -> None:
    model, unpruned = build_minimax(), make_inputs(processor)
    with tokenprune.patched(model, "downsample", keep=0.25, processor=processor):
        inputs = make_inputs(processor)
        logits, answer = model(**inputs).logits, model.generate(**inputs, max_new_tokens=4)
    assert [int((prompt["input_ids"] == IMAGE).sum()) for prompt in (unpruned, inputs)] == [48, 12]
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4), answer)


@pytest.mark.parametrize("name", sorted(families.PIXELS_ONLY & REFUSED.keys()))
def test_methods_that_drop_tokens_are_refused(name: str, processor: Any) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    model = REFUSED[name].build()
    before = snapshot(model)
    for method in LEAVING:
        with pytest.raises(UnsupportedModelError, match=re.escape(families.REFUSED[name])):
            tokenprune.patch(model, method, keep=0.3, processor=processor)
        assert snapshot(model) == before
    with tokenprune.patched(model, "downsample", keep=0.3, processor=processor):
        assert tokenprune.is_patched(model)
    assert snapshot(model) == before


def test_an_adapter_of_ones_own_may_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADAPTERS", dict(registry.ADAPTERS))
    for family in ("minimax_m3_vl", Family("minimax_m3_vl")):
        for row in families.FAMILIES.keys() & families.PIXELS_ONLY:
            monkeypatch.delitem(families.FAMILIES, row)
        assert checks.find_unsupported_reason(tokenprune.method("divprune"), "minimax_m3_vl") is not None
        register_adapter(family)(Adapter)
        assert (
            checks.find_unsupported_reason(tokenprune.method("divprune"), get_adapter(build_minimax()).family) is None
        )
        monkeypatch.delitem(families.FAMILIES, "minimax_m3_vl")
