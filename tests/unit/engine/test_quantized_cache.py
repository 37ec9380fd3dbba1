# SPDX-License-Identifier: Apache-2.0
"""Quantized caches equal a dynamic cache or the masked model.

A lossless quantizer equals the dynamic cache. A real quantizer equals the unpatched model with the same cache and the
dropped tokens masked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, cache_utils
from transformers.cache_utils import DynamicLayer

import tokenprune
from cached_runs import check_logits, check_same, generate, lossless, talk
from oracle import close, generate_logits, reduced
from tokenprune import UnsupportedSetupError
from tokenprune.integrations.hf.cache.layer_storage import read_keys, read_values
from zoo import FAMILIES, HEAD_DIM

METHODS = ["divprune", "fastv", ["divprune", "fastv"]]
STEPS = 6


def make_dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config())


@torch.no_grad()
@pytest.mark.pairwise
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_equals_the_dynamic_cache(name: str, method: Any, padding: str | None, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, padding=padding)
    with tokenprune.patched(model, method, keep=0.4):
        want, before = generate(model, inputs, past_key_values=make_dynamic(model)), tokenprune.stats(model)
        got, after = generate(model, inputs, past_key_values=lossless(model)), tokenprune.stats(model)
    check_same(got, want, exact=True)
    scales = 2 * 4 * len(got.past_key_values.layers)
    assert after.kv_bytes == before.kv_bytes + scales
    assert after.width_per_layer == before.width_per_layer and after.kv_bytes < after.kv_bytes_full
    for figure in ("kv_bytes_full", "kv_bytes_tokens"):
        assert 1 <= getattr(after, figure) / getattr(before, figure) < 1.05


@torch.no_grad()
@pytest.mark.parametrize("method", [*METHODS, "pyramiddrop"], ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_second_turns(name: str, method: Any, build) -> None:
    """pyramiddrop reads all keys of a layer before the layer runs."""
    model, inputs = FAMILIES[name].prepare(build, padding=None)
    with tokenprune.patched(model, method, keep=0.4):
        want, before = talk(model, inputs, inputs, make_dynamic(model)), tokenprune.stats(model)
        got, after = talk(model, inputs, inputs, lossless(model)), tokenprune.stats(model)
    check_logits(got, want, exact=True)
    assert after.visual_tokens_out == before.visual_tokens_out
    assert 0 <= after.kv_bytes - before.kv_bytes <= 8 * len(before.width_per_layer)


@torch.no_grad()
def test_beams(build) -> None:
    """Quantized rows are reordered in the next step, but a reader sees the new order at once."""
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    with tokenprune.patched(model, "fastv", keep=0.4):
        want = generate(model, inputs, num_beams=3, past_key_values=make_dynamic(model))
        got = generate(model, inputs, num_beams=3, past_key_values=lossless(model))
        assert torch.equal(got.sequences, want.sequences)
        rows = torch.tensor([2, 0, 1] * 2)
        for cache in (got.past_key_values, want.past_key_values):
            cache.reorder_cache(rows)
        for layer in range(len(want.past_key_values.layers)):
            assert torch.equal(read_keys(got.past_key_values, layer), want.past_key_values.layers[layer].keys)
            assert torch.equal(read_values(got.past_key_values, layer), want.past_key_values.layers[layer].values)


def _python_unpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoid the compilation of quanto's C++ in the first call."""
    from optimum.quanto.library.extensions import cpp

    def unpack(packed: Tensor, bits: int) -> Tensor:
        return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])

    monkeypatch.setattr(cpp.ext, "_lib", SimpleNamespace(unpack=unpack))


def _quanto(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Cache, Callable[[int], int]]:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed (pip install optimum-quanto)")
    _python_unpack(monkeypatch)
    text = model.config.get_text_config()
    cache = QuantizedCache("quanto", text, nbits=4, q_group_size=HEAD_DIM, residual_length=3)
    return cache, lambda num_values: num_values // 2 + num_values // HEAD_DIM * (4 + 4)  # a scale and a zero point


def _hqq(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Cache, Callable[[int], int]]:
    pytest.importorskip("hqq", reason="hqq is not installed (pip install hqq): transformers imports it at once, slowly")
    options = dict(nbits=8, axis_key=1, axis_value=1, q_group_size=HEAD_DIM, residual_length=3)
    cache = QuantizedCache("hqq", model.config.get_text_config(), **options)
    return cache, lambda num_values: num_values + num_values // HEAD_DIM * (4 + 4)


def _fp8(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Cache, Callable[[int], int]]:
    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers lacks the fp8 cache")
    layer_class = cache_utils.Fp8QuantizedLayer
    quantize = layer_class._quantize
    # The scale is the maximum of the first call, which may belong to a dropped token.
    fixed_scale = torch.tensor(0.05)
    monkeypatch.setattr(layer_class, "_quantize", lambda self, x, scale=None: quantize(self, x, fixed_scale))
    return QuantizedCache("fp8", model.config.get_text_config()), lambda num_values: num_values + 4


@pytest.mark.pairwise
@pytest.mark.parametrize("make_cache", [_quanto, _hqq, _fp8], ids=["quanto", "hqq", "fp8"])
@pytest.mark.parametrize("method", ["divprune", "fastv"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_real_quantizers(name: str, method: str, make_cache: Callable, build, monkeypatch) -> None:
    """Each quantization group is one token of one head, so other tokens do not change its values."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs()
    cache, size = make_cache(model, monkeypatch)
    with tokenprune.patched(model, method, keep=0.4, record=True):
        exact, _, _ = generate_logits(model, inputs, STEPS)
        got, tokens, _ = generate_logits(model, inputs, STEPS, past_key_values=cache)
        stats = tokenprune.stats(model)
    config, rows = model.config.get_text_config(), len(inputs["input_ids"])
    num_values = [rows * config.num_key_value_heads * width * HEAD_DIM for width in stats.width_per_layer]
    assert stats.kv_bytes == sum(2 * size(count) for count in num_values) < 8 * sum(num_values)
    with reduced(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        want, _, _ = generate_logits(
            model, inputs, STEPS, tokens=tokens, past_key_values=make_cache(model, monkeypatch)[0]
        )
    close(got, want, 1e-4)
    assert not torch.equal(got, exact)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["mask", "evict"])
def test_methods_that_drop_while_decoding(mode: str, build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    method = tokenprune.method("dyrate", mode=mode)
    with tokenprune.patched(model, method, keep=0.4):
        want, cache = generate(model, inputs), lossless(model)
        if mode == "mask":
            before = tokenprune.stats(model)
            check_same(generate(model, inputs, past_key_values=cache), want, exact=True)
            assert tokenprune.stats(model).decode_kept == before.decode_kept
            return
        with pytest.raises(UnsupportedSetupError, match="mode='mask'"):
            generate(model, inputs, past_key_values=cache)
        assert type(cache) is Cache and not cache.get_seq_length()
        check_same(generate(model, inputs), want, exact=True)


@torch.no_grad()
def test_unsupported_cache_changes_are_refused(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    text = torch.full((len(inputs["input_ids"]), 1), 11)
    with tokenprune.patched(model, "fastv", keep=0.4):
        cache = lossless(model)
        model(**inputs, past_key_values=cache)
        model(input_ids=text, past_key_values=cache)
        want = model(input_ids=text, past_key_values=copy.deepcopy(cache)).logits
        for change in (
            lambda: cache.crop(-1),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(UnsupportedSetupError, match="quantized cache"):
                change()
        assert torch.equal(model(input_ids=text, past_key_values=cache).logits, want)
        cache.reset()
        assert type(cache) is Cache
        other_cache = lossless(model)
        assert torch.equal(
            model(**inputs, past_key_values=cache).logits, model(**inputs, past_key_values=other_cache).logits
        )


class Unknown(DynamicLayer):
    """A cache layer of an unknown kind."""


@torch.no_grad()
def test_other_layers_are_refused_by_name(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    cache = Cache(layers=[Unknown() for _ in model.model.language_model.layers])
    with tokenprune.patched(model, "divprune", keep=0.4):
        with pytest.raises(UnsupportedSetupError, match="layers of kind Unknown"):
            model(**inputs, past_key_values=cache)
        assert not cache.get_seq_length()
