# SPDX-License-Identifier: Apache-2.0
"""Virtual unmerging: its statistics, the state of the model afterwards, and unsupported setups."""

from __future__ import annotations

import copy
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tokenprune
from basics import snapshot
from hooks import removed_after
from merging_models import SUPPORTED
from merging_towers import FORMS, Merging, naive_decoder
from oracle import close, generate_logits, survivors
from pruned import run_pruned
from tokenprune import OptionError, UnsupportedSetupError
from tokenprune_bench.calibration import calibrate
from zoo import FAMILIES, Family


@pytest.fixture(params=SUPPORTED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


# -- work and statistics -----------------------------------------------------------------------------------------------


@contextmanager
def count_tokens(decoder: Any, names: list[str]) -> Any:
    counts: dict[str, list[int]] = {name: [] for name in names}
    handles = []
    for layer in decoder.layers:
        for name in names:
            hook = lambda m, args, out, name=name: counts[name].append(args[0].shape[1])  # noqa: E731
            handles.append(layer.get_submodule(name).register_forward_hook(hook))
    yield counts
    for handle in handles:
        handle.remove()


def sum_layer_flops(counter: FlopCounterMode) -> int:
    """Return the FLOPs inside decoder layers."""
    names = [name for name in counter.flop_counts if re.search(r"language_model\.layers\.\d+$", name)]
    return sum(sum(counter.flop_counts[name].values()) for name in names)


@torch.no_grad()
def test_statistics_equal_the_counted_flops(family: Family, build) -> None:
    model, inputs = build(family, "eager"), family.make_inputs(only=0)
    names = ["input_layernorm", "post_attention_layernorm", "mlp", *(f"self_attn.{x}_proj" for x in "qkvo")]
    merged = run_pruned(model, inputs, "tome", 0.5)[1]
    length, visual = inputs["input_ids"].shape[1], sum(inputs.counts[0])
    num_kept = length - visual + merged.visual_tokens_out
    decoder = model.model.language_model
    flops: list[int] = []
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    flops.append(sum_layer_flops(counter))
    with tokenprune.patched(model, Merging(), keep=0.5, record=True):
        with count_tokens(decoder, names) as counts, FlopCounterMode(display=False) as counter:
            out = model(**inputs)
        flops.append(sum_layer_flops(counter))
        stats = tokenprune.stats(model)
    assert out.logits.shape[1] == length and num_kept < length
    for name in names:  # a projection's hook runs last and sees the input that the patch passes
        assert counts[name] == [num_kept] * 4, name
    assert stats.visual_tokens_in == visual
    assert stats.visual_tokens_per_layer == [merged.visual_tokens_out] * 4
    assert stats.visual_tokens_out == merged.visual_tokens_out and stats.keep_ratio == merged.keep_ratio
    assert stats.kv_bytes == stats.kv_bytes_full > merged.kv_bytes
    assert stats.cuts == merged.cuts and stats.encoder_tokens_per_layer == merged.encoder_tokens_per_layer
    assert survivors(stats.cuts[0], length).sum() == num_kept
    assert merged.prefill_flops_ratio < stats.prefill_flops_ratio < 1
    assert stats.overhead_ms > 0
    assert stats.prefill_flops_ratio == pytest.approx(flops[1] / flops[0], rel=1e-9)


# -- the model afterwards ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_unpatch_gives_the_same_model_back_and_copies_stay_patched(family: Family, model) -> None:
    inputs = family.make_inputs()
    before, snapshot_before = model(**inputs).logits, snapshot(model)
    tokenprune.patch(model, Merging(), keep=0.5)
    merged, twin = model(**inputs).logits, copy.deepcopy(model)
    tokenprune.unpatch(model)
    assert snapshot(model) == snapshot_before and not torch.equal(merged, before)
    assert torch.equal(model(**inputs).logits, before) and torch.equal(twin(**inputs).logits, merged)
    tokenprune.unpatch(twin)
    assert torch.equal(twin(**inputs).logits, before)


@torch.no_grad()
def test_failed_forward_does_not_affect_later_calls(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    text = FAMILIES["llava"].make_inputs(images=(0, 0))
    before = model(**text).logits
    with tokenprune.patched(model, Merging(), keep=0.5):
        want = model(**inputs).logits
        handle = model.model.language_model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        handle.remove()
        assert torch.equal(model(**text).logits, before)
        assert torch.equal(model(**inputs).logits, want)


def test_calls_without_groups_are_refused(build) -> None:
    model, inputs = FAMILIES["llava"].prepare()
    with tokenprune.patched(model, Merging(), keep=0.5):
        with pytest.raises(UnsupportedSetupError, match="per-token argument 'per_layer_inputs'"):
            model(**inputs, per_layer_inputs=torch.zeros(*inputs["input_ids"].shape, 2))
        model.train()
        model.model.language_model.gradient_checkpointing_enable()
        with pytest.raises(UnsupportedSetupError, match="without the groups of merged tokens"):
            model(**inputs)
    with pytest.raises(
        UnsupportedSetupError, match="between decoder layers"
    ):  # tower features enter between these layers
        tokenprune.patch(build(FAMILIES["qwen3_vl"]), Merging(), keep=0.5)
    assert not tokenprune.is_patched(build(FAMILIES["qwen3_vl"]))


@torch.no_grad()
def test_replaced_projection_raises(build) -> None:
    """A wrapper around a projection must not treat the patch's stand-in as hidden states."""

    class Around(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 0.1 * x.mean()

    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs()
    with tokenprune.patched(model, Merging(), keep=0.5):
        attention = model.model.language_model.layers[0].self_attn
        attention.q_proj = Around(attention.q_proj)
        with pytest.raises(UnsupportedSetupError, match="q_proj was replaced"):
            model(**inputs)


def test_threads(build) -> None:
    family = FAMILIES["llava_next"]
    model = build(family)
    jobs = [family.make_inputs(seed=seed, images=images) for seed, images in enumerate([(2, 1), (0, 1), (0, 0)])]
    with tokenprune.patched(model, Merging(), keep=0.5):
        sequential = [generate_logits(model, job, 3)[0] for job in jobs]
        barrier = threading.Barrier(len(jobs))
        layers = model.model.language_model.layers
        handles = [
            layers[i].self_attn.v_proj.register_forward_pre_hook(lambda *_: (barrier.wait(90), None)[1]) for i in (0, 2)
        ]
        with removed_after(handles), ThreadPoolExecutor(len(jobs)) as pool:
            concurrent = list(pool.map(lambda job: generate_logits(model, job, 3)[0], jobs))
    for got, want in zip(concurrent, sequential, strict=True):
        assert torch.equal(got, want)


def test_gradients(build) -> None:
    family = FAMILIES["llava"]
    # Rows of different width: padding must not affect the gradients.
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, Merging(), keep=0.5):
        model(**inputs).logits[:, -1].logsumexp(-1).sum().backward()
    for name, parameter in model.model.language_model.layers.named_parameters():
        assert "k_proj.bias" in name or parameter.grad.abs().sum() > 0, name
    assert model.model.multi_modal_projector.linear_1.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_bfloat16() -> None:
    """Only the first layer is compared, because random weights amplify rounding."""
    family = FAMILIES["llava"]
    model, outputs = family.build().bfloat16(), []
    inputs = family.make_inputs(padding=None)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    model.model.language_model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda m, args: outputs.append(args[0])
    )
    for form in FORMS:
        with tokenprune.patched(model, Merging(), keep=0.5), FORMS[form](model):
            logits = model(**inputs).logits
        assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    close(outputs[0].float(), outputs[1].float(), 0.02)


# -- unsupported setups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["divprune", "fastv", "dart"])
def test_later_pruning_is_refused(build, other: str) -> None:
    model = build(FAMILIES["llava"])
    before = snapshot(model)
    with pytest.raises(OptionError, match=f'tome with vtu="expanded" cannot be combined with {other}.*vtu="off"'):
        tokenprune.patch(model, [Merging(), other], keep=0.5)
    assert snapshot(model) == before and not tokenprune.is_patched(model)


def test_unknown_forms_and_models_without_a_decoder_are_refused(build) -> None:
    for form in ("fast", "exact"):
        for keep in (0.5, 1.0):
            with pytest.raises(OptionError, match=f"vtu='{form}' is not an option. Use one of off, expanded.$"):
                tokenprune.patch(build(FAMILIES["llava"]), Merging(vtu=form), keep=keep)
    timm = pytest.importorskip("timm")
    with pytest.raises(OptionError, match="vtu= needs a language model"):
        tokenprune.patch(timm.create_model("test_vit", pretrained=False), Merging(), keep=0.5)


def test_off_is_off(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    want = run_pruned(model, inputs, "tome", 0.5)[0].logits
    assert torch.equal(run_pruned(model, inputs, [Merging(vtu="off"), "fastv"], [0.5, 1.0])[0].logits, want)


def test_unknown_decoders(build) -> None:
    model = copy.deepcopy(build(FAMILIES["llava"]))
    before = snapshot(model)
    attention = model.model.language_model.layers[3].self_attn
    attention.gate = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedSetupError, match=r'q_proj.*not LlamaAttention with gate, k_proj.*vtu="off"'):
        tokenprune.patch(model, Merging(), keep=0.5)
    del attention.gate
    rotary = model.model.language_model.rotary_emb
    del model.model.language_model.rotary_emb
    with pytest.raises(UnsupportedSetupError, match="rotary positions"):
        tokenprune.patch(model, Merging(), keep=0.5)
    model.model.language_model.rotary_emb = rotary
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@torch.no_grad()
def test_rotary_positions_of_three_axes(name: str, build) -> None:
    """Each token of a group has its position in the image; expected values are computed from the patched tower."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    logits = {}
    for form in FORMS:
        with tokenprune.patched(model, Merging(), keep=0.5), FORMS[form](model):
            logits[form] = model(**inputs).logits
            assert tokenprune.stats(model).kv_bytes == tokenprune.stats(model).kv_bytes_full
            features = torch.cat(
                model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
            )
    arguments: dict[str, Any] = {}
    decoder = model.model.language_model
    with decoder.register_forward_pre_hook(lambda m, args, kwargs: arguments.update(kwargs), with_kwargs=True):
        model(**inputs)
    embeds, visual = arguments["inputs_embeds"].clone(), family.visual_mask(model, inputs)
    embeds[visual] = features
    positions = arguments["position_ids"][-3:]
    for row in range(len(embeds)):
        is_valid = inputs["attention_mask"][row].bool()
        indices = is_valid.nonzero().flatten()
        kept = embeds[row, indices]
        groups: list[list[int]] = []
        for index, feature in enumerate(kept):
            matches = [g for g in groups if visual[row, indices[index]] and torch.equal(kept[g[0]], feature)]
            matches[0].append(index) if matches else groups.append([index])
        hidden, _, _ = naive_decoder(decoder, kept, positions[:, row, indices], groups)
        want = model.lm_head(hidden)
        for form in FORMS:
            close(logits[form][row, indices], want)


def test_it_is_an_option_of_dymu(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, images=(2, 1))
    pixels = list(torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0)))
    thresholds = calibrate(model, pixels, keep=0.5, progress=False)
    stats = run_pruned(model, inputs, "dymu", 0.5, thresholds=thresholds, vtu="expanded")[1]
    assert stats.visual_tokens_out < stats.visual_tokens_in
    assert stats.kv_bytes == stats.kv_bytes_full
    with pytest.raises(OptionError, match="vtu='both' must be 'off' or 'expanded'"):
        tokenprune.method("dymu", vtu="both")
