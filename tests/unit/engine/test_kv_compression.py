# SPDX-License-Identifier: Apache-2.0
"""Cache compression by kvpress after our cut equals compression of the kept tokens in an unpatched model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import QuantizedLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tokenprune
from cached_runs import lossless
from hooks import removed_after
from only_kept import only_kept
from oracle import close, generate_logits
from quantized_weights import bitsandbytes
from tokenprune import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from zoo import FAMILIES, Family

METHODS = ["divprune", "fastv", ["divprune", "fastv"]]
STEPS = 4
PAGE = Path(__file__).parents[3] / "docs/guides/caches.md"


def cache_positions(model: nn.Module) -> Any:
    """Run the code of docs/guides/caches.md."""
    code = re.search(r"```python\n(from contextlib.*?)```", PAGE.read_text(), re.DOTALL)[1]
    names: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    return names["cache_positions"](model)


@contextmanager
def keep_smallest_keys(model: nn.Module, share: float = 0.5) -> Iterator[None]:
    """Keep the keys of smallest norm per layer and head after the prompt, as kvpress does."""

    def compress_layer(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        layer, width = compat.get_cache(kwargs).layers[module.layer_idx], kwargs["hidden_states"].shape[1]
        if layer.get_seq_length() != width:
            return  # a decoding step
        quantized = isinstance(layer, QuantizedLayer)
        keys = layer._dequantize(layer._quantized_keys) if quantized else layer.keys
        values = layer._dequantize(layer._quantized_values) if quantized else layer.values
        kept = keys.norm(dim=-1).topk(int(width * share), largest=False).indices[..., None]
        keys, values = (x.gather(2, kept.expand(-1, -1, -1, x.shape[-1])) for x in (keys, values))
        if not quantized:
            layer.keys, layer.values = keys, values
            return
        layer._quantized_keys, layer._quantized_values = layer._quantize(keys, axis=0), layer._quantize(values, axis=0)
        layer.cumulative_length = keys.shape[-2]

    layers = model.model.language_model.layers
    hooks = [layer.self_attn.register_forward_hook(compress_layer, with_kwargs=True) for layer in layers]
    with removed_after(hooks):
        yield


def make_press(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    # kvpress replaces transformers' attention functions on import: undo that after the test.
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    was_imported = "kvpress" in sys.modules
    kvpress = pytest.importorskip(
        "kvpress",
        reason="kvpress is not installed: kvpress 0.5 needs transformers before 5.3 (pip install --no-deps kvpress)",
    )
    if was_imported:
        kvpress.patch_attention_functions()
    if name == "snapkv":
        return kvpress.SnapKVPress(0.5, window_size=4)
    return kvpress.KnormPress(0.5) if name == "knorm" else kvpress.AdaKVPress(kvpress.KnormPress(0.5))


@pytest.fixture
def build_clean(build) -> Iterator[Any]:
    """Return a builder of models, which are cleaned of kvpress's changes after the test."""
    models = []
    yield lambda family: models.append(build(family)) or models[-1]
    for model in models:
        for module in model.modules():
            vars(module).pop("masked_key_indices", None)
        for layer in model.model.language_model.layers:
            layer.self_attn._modules.pop("rotary_emb", None)


@contextmanager
def compress(name: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if name == "by norm":
        with keep_smallest_keys(model):
            yield
        return
    press = make_press(name, monkeypatch)
    with cache_positions(model), press(model):
        yield


def make_inputs(family: Family) -> Any:
    return family.make_inputs(only=0)


@pytest.mark.pairwise
@pytest.mark.parametrize("press", ["by norm", "knorm", "snapkv", "adakv"])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_equals_compression_of_kept_tokens(name: str, method: Any, press: str, build_clean, monkeypatch) -> None:
    family = FAMILIES[name]
    model, inputs = build_clean(family), make_inputs(family)
    with compress(press, model, monkeypatch):
        with tokenprune.patched(model, method, keep=0.4, record=True):
            got, tokens, out = generate_logits(model, inputs, STEPS)
            stats = tokenprune.stats(model)
        with only_kept(family, model, stats.cuts, inputs["input_ids"].shape[1]):
            want, _, _ = generate_logits(model, inputs, STEPS, tokens=tokens)
    close(got, want)
    if press != "adakv":  # adakv hides keys without removing them
        lengths = [layer.keys.shape[-2] for layer in out.past_key_values.layers]
        assert lengths == [width // 2 + STEPS - 1 for width in stats.width_per_layer]
        slot_bytes = stats.kv_bytes_full // (4 * inputs["input_ids"].shape[1])
        assert stats.kv_bytes == slot_bytes * sum(width // 2 for width in stats.width_per_layer)
    with tokenprune.patched(model, method, keep=0.4):
        uncompressed, _, _ = generate_logits(model, inputs, STEPS, tokens=tokens)
    assert torch.equal(uncompressed[:, 0], got[:, 0]) and not torch.allclose(uncompressed, got)


def test_rows_of_one_length(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), make_inputs(family)
    twice = {name: torch.cat([x, x]) for name, x in inputs.items()}
    with tokenprune.patched(model, "fastv", keep=0.4), keep_smallest_keys(model):
        want, tokens, _ = generate_logits(model, inputs, STEPS)
        got, _, _ = generate_logits(model, twice, STEPS, tokens=torch.cat([tokens, tokens]))
    close(got, torch.cat([want, want]))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_quantized_weights_and_a_quantized_cache(method: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), make_inputs(family)
    bitsandbytes(model)
    with keep_smallest_keys(model):
        with tokenprune.patched(model, method, keep=0.4, record=True):
            want, tokens, _ = generate_logits(model, inputs, STEPS)
            plain = tokenprune.stats(model)
            got, _, out = generate_logits(model, inputs, STEPS, past_key_values=lossless(model))
            stats = tokenprune.stats(model)
        with only_kept(family, model, stats.cuts, inputs["input_ids"].shape[1]):
            expected, _, _ = generate_logits(model, inputs, STEPS, tokens=tokens)
    assert torch.equal(got, want)
    scales = 2 * 4 * len(stats.width_per_layer)
    assert stats.kv_bytes == plain.kv_bytes + scales
    assert [layer.cumulative_length for layer in out.past_key_values.layers] == [
        width // 2 + STEPS - 1 for width in stats.width_per_layer
    ]
    close(got, expected, 0.1)  # bitsandbytes scales all activations together, dropped tokens included


def test_unsupported_compression_is_refused(build) -> None:
    """A step that needs to know the removed keys raises before it writes to the cache."""
    family = FAMILIES["llava"]
    model, ragged = build(family), family.make_inputs()
    for method, inputs, message in (
        ("divprune", ragged, "different lengths"),
        ("dyrate", make_inputs(family), "decoding"),
    ):
        with tokenprune.patched(model, method, keep=0.4):
            want, _, _ = generate_logits(model, inputs, STEPS)
            with (
                keep_smallest_keys(model),
                pytest.raises(UnsupportedSetupError, match=f"{message}.* one row at a time"),
            ):
                generate_logits(model, inputs, STEPS)
            got, _, _ = generate_logits(model, inputs, STEPS)
        assert torch.equal(got, want)


def test_another_library_wraps_all_attention_functions(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper passes the dropout rate by position, as kvpress does when imported after the patch."""
    family = FAMILIES["llava"]
    model, inputs = build(family), make_inputs(family)
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    called = []

    def wrap(function: Any) -> Any:
        def call(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, **kw: Any) -> Any:
            called.append(function)
            return function(module, query, key, value, mask, dropout, **kw)

        return call

    with tokenprune.patched(model, "fastv", keep=0.4):
        want, _, _ = generate_logits(model, inputs, STEPS)
        for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
            ALL_ATTENTION_FUNCTIONS[name] = wrap(function)
        got, _, _ = generate_logits(model, inputs, STEPS)
    assert called and torch.equal(got, want)
