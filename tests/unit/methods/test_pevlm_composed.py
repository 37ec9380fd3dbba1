# SPDX-License-Identifier: Apache-2.0
"""pevlm combined with other methods, prompts that keep full attention, and unsupported setups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

import tests.unit.engine.test_modes  # noqa: F401  (registers flash_stand_in)
import tokenprune
from block_settings import (
    BATCHES,
    SMALL,
    VIDEO_FAMILIES,
    WAYS,
    block_ids,
    blocked,
    real_of,
)
from module_calls import record_inputs
from oracle import close, generate_logits, reduced
from tokenprune import Budget, BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.attention_observer import Observer, Tap
from tokenprune.kernels.block_attention import SINK, TAIL
from zoo import FAMILIES, VIDEO, Family


@pytest.fixture(params=VIDEO_FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


# -- composed ----------------------------------------------------------------------------------------------------------


COMPOSED = [
    ("random", "mixed"),
    ("divprune", "left"),
    ("pool", "mixed"),
    ("dart", "left"),
    ("fastv", "mixed"),
    ("uniform+fastv", "mixed"),
    ("random+dart", "left"),
]


@pytest.mark.parametrize(("names", "batch"), COMPOSED)
def test_composed_methods_keep_the_blocks(names: str, batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    others = names.split("+")
    methods = [tokenprune.method("pevlm", **SMALL), *others]
    with tokenprune.patched(model, methods, keep=[1.0, *[0.5] * len(others)], record=True):
        got, tokens, _ = generate_logits(model, inputs, 2)
        cuts, blocks = tokenprune.stats(model).cuts, tokenprune.stats(model).attention_blocks
    assert len(cuts) == len(others) and blocks >= 3
    with blocked(family, model, block_ids(inputs)), reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want, _, _ = generate_logits(model, inputs, 2, tokens=tokens)
    close(got, want)


def test_last_row_attention_excludes_padding(family: Family, build) -> None:
    """FastV selects the same tokens as in each single row, although no layer gets a mask."""
    model = build(family)
    inputs = family.make_inputs(video=(13, 13), images=(0, 0))
    methods, keep = [tokenprune.method("pevlm", **SMALL), "fastv"], [1.0, 0.3]

    def list_kept(inputs: Any) -> list[list[int]]:
        with torch.no_grad(), tokenprune.patched(model, methods, keep=keep, record=True):
            model(**inputs)
            return tokenprune.stats(model).cuts[0].kept

    for row, batch_kept in enumerate(list_kept(inputs)):
        (single_kept,) = list_kept(family.make_inputs(video=(13, 13), images=(0, 0), only=row))
        num_padding = int((inputs["attention_mask"][row] == 0).sum())
        assert [position - num_padding for position in batch_kept] == single_kept


def get_mask(args: tuple, kwargs: dict[str, Any]) -> Any:
    return kwargs["attention_mask"]


@pytest.mark.parametrize("other", [None, "random", "fastv"])
@torch.no_grad()
def test_no_dense_mask_is_built(other: str | None, build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(**BATCHES["mixed"])
    method = tokenprune.method("pevlm", **SMALL)
    decoder = model.get_submodule(family.decoder)
    with (
        tokenprune.patched(model, [method, *([other] if other else [])], keep=[1.0, *([0.4] if other else [])]),
        record_inputs(*(layer.self_attn for layer in decoder.layers), note=get_mask) as masks,
        record_inputs(decoder, note=get_mask) as padding,
    ):
        model(**inputs)
    assert masks == [None] * 4 and padding[0].all()


@pytest.mark.parametrize("first", ["observer", "computes"])
@pytest.mark.parametrize("leaves_first", ["observer", "computes"])
def test_two_taps_of_one_module_detach_in_any_order(first: str, leaves_first: str, build) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs()
    module, calls = model.get_submodule(family.decoder).layers[1].self_attn, []
    expected = model(**inputs).logits

    class Zero(Tap):
        def compute(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
            return torch.zeros_like(query.transpose(1, 2)), None

    taps = {"observer": Observer(module, calls.append), "computes": Zero(module)}
    order = sorted(taps, key=lambda name: name != first)
    for name in order:
        taps[name].attach()
    assert not torch.equal(model(**inputs).logits, expected) and len(calls) == 1
    taps.pop(leaves_first).detach()
    assert torch.equal(model(**inputs).logits, expected) == (leaves_first == "computes")
    for tap in taps.values():
        tap.detach()
    assert torch.equal(model(**inputs).logits, expected)  # the fixture checks that the module is restored


# -- full attention and unsupported setups ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [dict(images=(2, 1)), dict(images=(0, 0))], ids=["images", "text"])
def test_prompt_without_video_is_bit_equal_and_noted(batch: dict, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**batch)
    before, tokens, _ = generate_logits(model, inputs, 3)
    with tokenprune.patched(model, "pevlm"):  # keep defaults to 1.0
        got, got_tokens, _ = generate_logits(model, inputs, 3)
        stats = tokenprune.stats(model)
    assert torch.equal(got, before) and torch.equal(got_tokens, tokens)
    assert stats.notes == ["pevlm: full attention, because it contains no video"]
    assert stats.attention_blocks == 0 and stats.prefill_flops_ratio == 1


@torch.no_grad()
def test_prompts_that_keep_full_attention(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(video=13, images=(1,))
    full = model(**inputs).logits

    def note(inputs: Any, want: Tensor | None = full, **options: Any) -> str:
        with tokenprune.patched(model, "pevlm", **{**SMALL, **options}):
            out = model(**inputs)
            assert want is None or torch.equal(out.logits, want)
            return "; ".join(tokenprune.stats(model).notes)

    assert "13 frames are fewer than min_frames=14" in note(inputs, min_frames=14)
    assert "more than one video or image" in note(inputs, only_single_video=True)
    length = inputs["input_ids"].shape[1]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    dense = {**inputs, "attention_mask": causal, "position_ids": torch.arange(length).expand(3, 1, -1)}
    assert "not a tensor of shape" in note(dense, None)
    batch = family.make_inputs(video=13, images=(0, 1), padding=None)
    batch["attention_mask"][1, 2] = 0  # in the row without a video
    assert "has gaps" in note(batch, model(**batch).logits)
    no_text = dict(family.make_inputs(video=13, images=(0,)))
    last = int((no_text["input_ids"] == VIDEO).nonzero()[-1, 1]) + 1
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        no_text[key] = no_text[key][:, :last]
    assert "no token follows" in note(no_text, None)
    # The features of an unpatched model have no recorded grids.
    encoded = model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True)
    images = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    encoded_inputs = {key: value for key, value in inputs.items() if not key.startswith("pixel")}
    encoded_inputs["mm_encoder_outputs"] = {"video": encoded, "image": images}
    assert "frame are unknown" in note(encoded_inputs)


@torch.no_grad()
def test_later_turns_use_full_attention(family: Family, build) -> None:
    """Tokens after the prefill attend to the whole prefill, and a video in a later turn gets full attention."""
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    new_ids = torch.arange(100, 104)[None]
    length = inputs["input_ids"].shape[1]
    turn = {"input_ids": new_ids, "attention_mask": torch.ones(1, length + 4, dtype=torch.long)}
    if family.types:  # any positions, the same for both models
        turn["position_ids"] = torch.arange(length, length + 4).expand(3, 1, -1)
    with tokenprune.patched(model, "pevlm", **SMALL):
        cache = model(**inputs).past_key_values
        got = model(**turn, past_key_values=cache).logits
        new_video = {**inputs, "attention_mask": torch.ones(1, 2 * length + 4, dtype=torch.long)}
        if family.types:
            new_video["position_ids"] = torch.arange(length + 4, 2 * length + 4).expand(3, 1, -1)
        model(**new_video, past_key_values=cache)
        assert "earlier part of the conversation" in tokenprune.stats(model).notes[0]
    with blocked(family, model, block_ids(inputs)):
        cache = model(**inputs).past_key_values
        close(got, model(**turn, past_key_values=cache).logits)


@torch.no_grad()
def test_other_back_ends_and_caches(family: Family, build) -> None:
    inputs = family.make_inputs(**BATCHES["left"])
    with tokenprune.patched(build(family), "pevlm", **SMALL):
        want = build(family)(**inputs).logits[real_of(inputs)]
        close(build(family)(**inputs, use_cache=False).logits[real_of(inputs)], want)
    for use_back_end in WAYS:
        static = StaticCache(config=build(family).config.get_text_config(), max_cache_len=300)
        with tokenprune.patched(build(family), "pevlm", **SMALL), use_back_end():
            close(build(family)(**inputs, past_key_values=static).logits[real_of(inputs)], want)
            assert tokenprune.stats(build(family)).attention_blocks == 6
    for attention in ("eager", "flash_stand_in"):
        model = build(family, attention)
        with tokenprune.patched(model, "pevlm", **SMALL):
            close(model(**inputs).logits[real_of(inputs)], want)
        with tokenprune.patched(model, [tokenprune.method("pevlm", **SMALL), "divprune"], keep=[1.0, 0.5]):
            model(**inputs)


@torch.no_grad()
def test_dense_layers(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES["left"])
    methods = [tokenprune.method("pevlm", **SMALL, dense_layers=[0, 3]), "fastv"]
    with tokenprune.patched(model, methods, keep=[1.0, 0.5], record=True):
        got, tokens, _ = generate_logits(model, inputs, 3)
        cuts = tokenprune.stats(model).cuts
    with (
        blocked(family, model, block_ids(inputs), dense=(0, 3)),
        reduced(family, model, cuts, inputs["input_ids"].shape[1]),
    ):
        close(got, generate_logits(model, inputs, 3, tokens=tokens)[0])


@torch.no_grad()
def test_flops_count_attended_pairs(build) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    with tokenprune.patched(model, "pevlm", **SMALL, dense_layers=[1]):
        model(**inputs)
        ratio = tokenprune.stats(model).prefill_flops_ratio
    ids = block_ids(inputs)[0].tolist()
    length = len(ids)
    # Count each pair of tokens that is computed.
    num_pairs = sum(ids[j] in (SINK, ids[i]) or ids[i] == TAIL for i in range(length) for j in range(i + 1))
    linear = 2 * length * 64 * (2 * 64 + 2 * 32 + 3 * 96)
    square = 4 * length**2 * 64
    block_layer = linear + square * num_pairs / (length * (length + 1) / 2)
    assert ratio == pytest.approx((3 * block_layer + linear + square) / (4 * (linear + square)))


def test_gradients() -> None:
    family = FAMILIES["qwen3_vl"]
    model, inputs = family.build(), family.make_inputs(**BATCHES["mixed"])  # a separate trainable model
    weight = model.get_submodule(family.decoder).layers[1].self_attn.k_proj.weight
    grads = []
    for use_back_end in WAYS:
        with tokenprune.patched(model, "pevlm", **SMALL), use_back_end():
            model(**inputs).logits[real_of(inputs)].square().mean().backward()
        grads.append(weight.grad)
        model.zero_grad()
    close(*grads, tolerance=1e-4)
    model.gradient_checkpointing_enable()
    model.train()
    with (
        tokenprune.patched(model, "pevlm", **SMALL),
        pytest.raises(UnsupportedSetupError, match="gradient_checkpointing_disable"),
    ):
        model(**inputs)


def check_refused(model: Any, method: Any, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        tokenprune.patch(model, method, **options)
    assert not tokenprune.is_patched(model)


def test_unsupported_setups_raise(build) -> None:
    model = build(FAMILIES["qwen2_vl"])
    for keep in (0.5, Budget(tokens=1), 64):
        check_refused(model, "pevlm", BudgetError, "does not remove tokens", keep=keep)
    check_refused(model, ["divprune", "pevlm"], BudgetError, r"keep=\[0.25, 1.0\]", keep=0.5)
    methods = [tokenprune.method("fastv", query="all"), "pevlm"]
    check_refused(model, methods, OptionError, "attend only within their block", keep=[0.5, 1.0])
    check_refused(model, "pevlm", OptionError, r"dense_layers=\[4\]", dense_layers=[0, 4])
    check_refused(model, "pevlm", OptionError, "names all 4 layers", dense_layers=[0, 1, 2, 3])
    check_refused(model, ["pevlm", "pevlm"], OptionError, "both act at")
    for family in FAMILIES.values():
        if not family.video:
            check_refused(build(family), "pevlm", UnsupportedSetupError, "does not support")


@torch.no_grad()
def test_sliding_windows() -> None:
    family = FAMILIES["qwen2_vl"]
    config = family.config["text_config"] | dict(use_sliding_window=True, sliding_window=16, max_window_layers=2)
    model = type(family)(**{**vars(family), "config": family.config | {"text_config": config}}).build()
    inputs = family.make_inputs(video=13, images=(0,))
    check_refused(model, "pevlm", UnsupportedSetupError, r"dense_layers=\[2, 3\]")
    with tokenprune.patched(model, "pevlm", **SMALL, dense_layers=[2, 3]):
        got = model(**inputs).logits
    with blocked(family, model, block_ids(inputs), dense=(2, 3)):
        close(got, model(**inputs).logits)


def test_image_benchmark_skips_pevlm() -> None:
    from tokenprune_bench.profiling.patched import patched

    with pytest.raises(UnsupportedSetupError, match="works on videos"):
        patched(None, "pevlm", 1.0)
