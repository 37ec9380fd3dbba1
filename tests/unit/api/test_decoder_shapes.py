# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of decoders, compared with hand computations and with the matrices and caches of their layers."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from each import each
from families import FAMILIES as EVERY_FAMILY
from families.special import BOTH_KINDS, gemma4
from families.special import FAMILIES as SPECIAL
from hooks import removed_after
from tests.unit.api.test_budget import SHAPE
from tokenprune.models.decoder_shape import DecoderShape
from zoo import FAMILIES, VOCAB, Family


def test_flops_and_bytes_by_hand() -> None:
    # Per token: q and o 8 x 8 each, k and v 8 x 4 each, three MLP matrices 8 x 16; two operations per multiply-add.
    linear = 2 * (2 * 64 + 2 * 32 + 3 * 128)
    # Scores and weighted values: 2 x 2 x n x n over all heads' width of 8.
    assert SHAPE.layer_flops(10) == 10 * linear + 4 * 100 * 8
    assert SHAPE.prefill_flops([10, 5]) == SHAPE.layer_flops(10) + SHAPE.layer_flops(5)
    # Keys and values: one head of width 4, two bytes per number.
    assert SHAPE.kv_bytes([10, 10, 3, 3], 2) == 2 * 4 * 2 * 26
    without_gate = dataclasses.replace(SHAPE, mlp_matrices=2)
    assert SHAPE.layer_flops(10) - without_gate.layer_flops(10) == 10 * 2 * 128


def test_shape_of_a_config(build) -> None:
    config = build(FAMILIES["qwen2_5_vl"]).config.text_config
    assert DecoderShape.from_config(config) == DecoderShape(4, 64, 96, 4, 2, 16)


# Decoders with layers that differ in heads, MLPs or cached keys.
WIDE = gemma4(
    "gemma4_wide", num_hidden_layers=8, layer_types=BOTH_KINDS * 4,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2, use_double_wide_mlp=True,
)  # fmt: skip

UNEVEN = {WIDE.name: WIDE} | {
    name: SPECIAL[name] for name in ("gemma4_per_layer", "gemma4", "gemma4_unified", "exaone4_5", "gemma3n")
}

# Text configs with layers that the formulas do not cover: more than attention and one MLP.
UNSUPPORTED = {
    "experts": "aria_text deepseek_ocr2_text ernie4_5_vl_moe_text glm4v_moe_text llama4_text qwen3_vl_moe_text "
    "qwen3_omni_moe_text qwen3_5_moe_text gemma4_text_moe",
    "layers with a state": "qwen3_5_text qwen3_5_moe_text lfm2 nemotron_h",
    "latent attention": "deepseek_v3",
    "a gate for attention": "muse_glimmer_text step3p5",
}


def select_decoders() -> dict[str, Family]:
    """Return a family for each kind of text config with attention and an MLP, and all families with unequal layers."""
    unsupported, selected = " ".join(UNSUPPORTED.values()).split(), {}
    for family in EVERY_FAMILY.values():
        if family.kind not in CONFIG_MAPPING:  # added in a later version of transformers
            continue
        text = CONFIG_MAPPING[family.kind](**copy.deepcopy(family.config)).get_text_config()
        if text.model_type not in unsupported and not family.name.endswith("_moe"):
            selected.setdefault(text.model_type, family)
    return {family.name: family for family in selected.values()} | UNEVEN


DECODERS = select_decoders()

# modules with the matrices of attention and the MLP in a decoder layer
LAYER_PARTS = ("self_attn.", "mlp.", "feed_forward.", "fc1", "fc2")


def linear_flops(family: Family, model: torch.nn.Module, inputs: dict) -> list[int]:
    """Return the FLOPs of each decoder layer's attention and MLP matrices in a forward."""
    decoder = model.get_submodule(family.decoder)
    flops, handles = [0] * len(decoder.layers), []

    def count(index: int, module: Any, args: tuple, output: Any) -> None:
        flops[index] += 2 * args[0].numel() // module.in_features * module.weight.numel()

    for index, layer in enumerate(decoder.layers):
        for part, module in layer.named_modules():
            if part.startswith(LAYER_PARTS) and isinstance(module, torch.nn.Linear):
                handles.append(module.register_forward_hook(partial(count, index)))
    with removed_after(handles):
        model(**inputs)
    return flops


def test_decoders_without_a_gate_are_among_those_tested() -> None:
    assert {"blip-2", "fuyu", "cosmos3_edge"} <= DECODERS.keys() and len(DECODERS) > 25


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_flops_are_those_of_the_layers_own_matrices(name: str, build) -> None:
    family = DECODERS[name]
    model, inputs = build(family), family.make_inputs(only=0)
    length = inputs["input_ids"].shape[1]
    shape = DecoderShape.from_config(model.get_submodule(family.decoder).config)
    flops = linear_flops(family, model, inputs)
    assert flops == [shape.layer_flops(length, attention=0.0, layer=layer) for layer in range(shape.layers)]
    assert shape.prefill_flops([length] * shape.layers, [0.0] * shape.layers) == sum(flops)


@each(
    ("config", "matrices", "width"),
    [
        (dict(model_type="phi", hidden_act="gelu_new", intermediate_size=128), 2, 128),
        (dict(model_type="gpt2", activation_function="gelu_new", n_inner=None), 2, 256),
        (dict(model_type="bloom"), 2, 256),
        (dict(model_type="gemma2", hidden_act="gelu_pytorch_tanh", intermediate_size=128), 3, 128),
        (dict(model_type="phi3", hidden_act="silu", intermediate_size=128), 3, 128),
        (dict(model_type="llama", hidden_act="relu", intermediate_size=128), 3, 128),
        (dict(model_type="ours", hidden_act="swiglu", intermediate_size=128), 3, 128),
        (dict(intermediate_size=128), 3, 128),
    ],
)
def test_mlp_of_a_config(config: dict, matrices: int, width: int) -> None:
    sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    shape = DecoderShape.from_config(SimpleNamespace(**sizes, **config))
    assert (shape.mlp_matrices, shape.intermediate) == (matrices, width)


@torch.no_grad()
@pytest.mark.parametrize("name", UNEVEN)
def test_bytes_of_unequal_layers_equal_the_cache(name: str, build) -> None:
    family = UNEVEN[name]
    model, inputs = build(family), family.make_inputs(only=0)
    length = inputs["input_ids"].shape[1]
    shape = DecoderShape.from_config(model.get_submodule(family.decoder).config)
    cache = model(**inputs, use_cache=True).past_key_values
    tensors = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    lengths = [0 if keys is None else keys.shape[-2] for keys, _ in tensors]
    lengths += [length] * (shape.layers - len(lengths))  # layers that share the keys of other layers cache no keys
    expected = sum(tensor.nbytes for pair in tensors for tensor in pair if tensor is not None)
    assert shape.kv_bytes(lengths, 4) == expected > 0


def test_shapes_of_layers_that_differ(build) -> None:
    """Gemma 4's global layers have wider heads and fewer key heads. The last layers reuse keys."""
    config = build(UNEVEN["gemma4_per_layer"]).config.text_config
    shape = DecoderShape.from_config(config)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, (2, 1, 2, 1), (16, 32, 16, 32))
    assert shape.kv_projections == (2, 1, 2, 1)
    shared = DecoderShape.from_config(build(UNEVEN["gemma4_wide"]).config.text_config)
    assert (shared.kv_heads, shared.intermediate) == ((2,) * 6 + (0, 0), (96,) * 6 + (192, 192))
