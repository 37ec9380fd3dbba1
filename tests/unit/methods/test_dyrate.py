# SPDX-License-Identifier: Apache-2.0
"""dyrate drops visual tokens while the answer is decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from module_calls import record_outputs
from naive_dyrate import naive
from oracle import close, generate_logits, reduced
from tests.unit.engine.test_modes import flash_stand_in  # registers the back end
from tokenprune import OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.cache.reduced_cache import get_reduction
from zoo import FAMILIES, Family

assert flash_stand_in
# Early and frequent decisions, so that short answers contain several.
OFTEN = dict(layer=1, warmup=1, update_every=2, k_min=0.05, grid=40, ema=0.3)
SCHEDULE = dict(rate="schedule", schedule=[0.6, 0.6, 0.8, 0.95], layer=2, k_min=0.05)
MODES = ("evict", "mask")


def generate(model: Any, inputs: Any, tokens: Tensor | None = None, steps: int = 7, keep: float = 0.5, **options: Any):
    """Return logits, tokens, cache and statistics of a generation with dyrate."""
    with tokenprune.patched(model, "dyrate", keep=keep, record=True, **options):
        logits, tokens, out = generate_logits(model, inputs, steps, tokens=tokens)
        return logits, tokens, out.past_key_values, tokenprune.stats(model)


# -- against loops over the unpatched model ----------------------------------------------------------------------------

SETUPS = {
    "ragged": ({"images": (2, 1)}, {}),
    "right": ({"images": (0, 2), "padding": "right"}, {}),
    "may return": ({"images": (2, 1)}, {"monotone": False, "mode": "mask", "ema": 0.0, "update_every": 1}),
    "shared": ({"images": (1, 2, 0)}, {"batch_policy": "shared", "max_rate": 0.4}),
    "schedule": ({"only": 1}, SCHEDULE),
}


# One setup for all families, and all setups for three families.
CASES = [
    (name, setup)
    for name in FAMILIES
    for setup in SETUPS
    if setup == "ragged" or name in ("llava", "qwen2_5_vl", "gemma3")
]


@pytest.mark.parametrize(("name", "setup"), CASES)
def test_equals_the_naive_loop(name: str, setup: str, build) -> None:
    family, (batch, options) = FAMILIES[name], SETUPS[setup]
    options = OFTEN | options
    if options.get("rate") == "schedule":
        options = SCHEDULE
    inputs = family.make_inputs(**batch, seed=1)
    got, tokens, cache, stats = generate(build(family), inputs, keep=0.7, **options)
    eager = build(family, "eager")
    with naive(family, eager, inputs, 0.7, **{k: v for k, v in options.items() if k != "mode"}) as want:
        logits, _, _ = generate_logits(eager, inputs, 7, tokens=tokens)
    assert stats.decode_kept == want.counts
    torch.testing.assert_close(torch.tensor(stats.decode_rates), torch.tensor(want.rates))
    visual = [set(row) for row in want.visual]
    for cut, kept in ((stats.cuts[0], want.prefill), (stats.cuts[-1], want.kept)):
        assert [sorted(set(row) & visual_tokens) for row, visual_tokens in zip(cut.kept, visual, strict=True)] == kept
    assert len(stats.cuts) > 1 and stats.cuts[-1].step > 0, "no tokens were dropped while decoding"
    # With padding on the right, transformers reads the first logits at the padding.
    start = 1 if setup == "right" else 0
    close(got[:, start:], logits[:, start:], 2e-5)
    masses = get_reduction(cache).decode.masses
    torch.testing.assert_close(masses, torch.stack([torch.stack(row) for row in want.history]), atol=1e-5, rtol=0)
    torch.testing.assert_close(masses.sum(-1), torch.ones(masses.shape[:-1]), atol=1e-5, rtol=0)
    assert not masses[:, 0, :, 3].any() and (masses[:, 1:, :, 3] > 0).all()


@pytest.mark.parametrize("name", ["llava_next", "qwen3_vl", "gemma3"])
def test_dropping_equals_masking(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    got, tokens, _, stats = generate(model, inputs, **SCHEDULE)
    assert [cut.step for cut in stats.cuts] == [0, 1, 3, 4]
    assert all(set(late) <= set(early) for late, early in zip(stats.cuts[2].kept, stats.cuts[1].kept, strict=True))
    with reduced(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        close(got, generate_logits(model, inputs, 7, tokens=tokens)[0])
    with reduced(family, model, stats.cuts[:-1], inputs["input_ids"].shape[1]), pytest.raises(AssertionError):
        close(got, generate_logits(model, inputs, 7, tokens=tokens)[0])


@pytest.mark.few_families
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 0}], ids=["ragged", "one row"])
def test_evict_equals_mask(batch: dict, family: Family, model) -> None:
    inputs = family.make_inputs(**batch)
    want, tokens, _, stats = generate(model, inputs, **SCHEDULE, mode="mask")
    got, _, _, other_stats = generate(model, inputs, tokens, **SCHEDULE, mode="evict")
    close(got, want)
    assert other_stats.cuts == stats.cuts and other_stats.decode_rates == stats.decode_rates


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attn", ["eager", "flash_stand_in"])
def test_back_ends_agree(attn: str, mode: str, build) -> None:
    family = FAMILIES["qwen2_vl"]
    for batch in ({"images": (2, 1)}, {"only": 0}):
        inputs = family.make_inputs(**batch)
        want, tokens, _, stats = generate(build(family), inputs, **SCHEDULE, mode=mode)
        got, _, _, other_stats = generate(build(family, attn), inputs, tokens, **SCHEDULE, mode=mode)
        close(got, want, 2e-5)
        assert other_stats.cuts == stats.cuts


def test_constant_rate_equals_fastv(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    got, tokens, _, stats = generate(model, inputs, keep=0.4, rate="schedule", schedule=[0.6], layer=2)
    with tokenprune.patched(model, "fastv", layer=2, keep=0.4, record=True):
        want, fastv_tokens, _ = generate_logits(model, inputs, 7)
        assert tokenprune.stats(model).cuts[0].kept == stats.cuts[0].kept
    assert torch.equal(tokens, fastv_tokens) and torch.equal(got, want)
    assert len(stats.cuts) == 1 and len(stats.decode_rates) == 6
    if family.name == "llava":  # only rate 0 remains: no token is dropped after prefill
        got, _, _, stats = generate(model, inputs, keep=0.4, layer=2, grid=1, warmup=0, update_every=1)
        assert torch.equal(got, want) and len(stats.cuts) == 1


@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"images": (0, 1, 3)}], ids=["images", "text beside"])
@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "gemma3"])
def test_batch_matches_single_rows(batch: dict, name: str, build) -> None:
    family, batch = FAMILIES[name], batch | {"seed": 1}
    model, inputs = build(family), family.make_inputs(**batch)
    got, tokens, _, stats = generate(model, inputs, **OFTEN)
    assert len(stats.cuts) > 1
    for row in range(len(tokens)):
        single, _, _, single_stats = generate(
            model, family.make_inputs(**batch, only=row), tokens[row : row + 1], **OFTEN
        )
        close(got[row], single[0], 2e-5)
        if inputs.counts[row]:
            assert [step[row] for step in stats.decode_kept] == [step[0] for step in single_stats.decode_kept]
            assert [step[row] for step in stats.decode_rates] == [step[0] for step in single_stats.decode_rates]
        else:
            assert {step[row] for step in stats.decode_kept} == {0} and not single_stats.cuts


def test_row_within_its_budget_keeps_all_tokens(build) -> None:
    """The budget of 15 tokens per image exceeds the 8 tokens of the small image."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(sizes=((8, 12), (4, 8)))
    stats = generate(model, inputs, keep=15, **SCHEDULE)[3]
    assert [step[1] for step in stats.decode_kept] == [8] * 6
    assert stats.decode_kept[-1][0] < stats.decode_kept[0][0] < 15


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 0}], ids=["ragged", "one row"])
def test_cache_length_after_the_cut(batch: dict, mode: str, build) -> None:
    """S slots before the cut, then S - N + n of the longest row, or the length after prefill if mode="mask"."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(**batch)

    def read_lengths(output: Any) -> list[int]:
        return [layer.keys.shape[-2] for layer in output.past_key_values.layers]

    with record_outputs(model.get_submodule(family.decoder), note=read_lengths) as lengths:
        cache, stats = generate(model, inputs, **SCHEDULE, mode=mode)[2:]
    length, visual = inputs["input_ids"].shape[1], [sum(row) for row in inputs.counts]
    num_tokens = inputs["attention_mask"].sum(1).tolist()
    first = [len(set(kept) & set(range(length))) for kept in stats.cuts[0].kept]
    started = [kept - (tokens - n) for kept, tokens, n in zip(first, num_tokens, visual, strict=True)]
    for step, counts in enumerate([started, *stats.decode_kept]):
        current = counts if mode == "evict" else started
        max_length = max(
            tokens + step - n + num_kept for tokens, n, num_kept in zip(num_tokens, visual, current, strict=True)
        )
        assert lengths[step] == [length + step] * 2 + [max_length] * 2
    assert cache.get_seq_length() == length + 6


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_memory_after_64_tokens(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    memory = {}
    for mode in ("evict", "mask"):
        cache, stats = generate(model, inputs, steps=65, **SCHEDULE, mode=mode)[2:]
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        memory[mode] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert stats.kv_bytes == memory[mode] < stats.kv_bytes_full
        if name == "llava":  # no views of older memory, except in sliding layers of transformers
            assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == memory[mode]
    layers = 2 if name == "llava" else 1  # a full window has a fixed size
    start = [sum(round(0.5 * n) for n in row) for row in inputs.counts]
    per_token = 2 * len(inputs["input_ids"]) * 2 * 16 * 4
    text = [int(mask.sum()) - sum(n) for mask, n in zip(inputs["attention_mask"], inputs.counts, strict=True)]
    widths = [
        max(words + num_kept for words, num_kept in zip(text, kept, strict=True))
        for kept in (start, stats.decode_kept[-1])
    ]
    assert memory["mask"] - memory["evict"] == layers * per_token * (widths[0] - widths[1])


# -- unsupported setups ------------------------------------------------------------------------------------------------


@each(
    ("options", "message"),
    [
        (dict(rate="attention"), "rate="),
        (dict(mode="index"), "mode='index' must be 'evict' or 'mask'"),
        (dict(monotone=False), "mode='mask'"),
        (dict(k_min=1.5), "k_min"),
        (dict(grid=0), "grid"),
        (dict(ema=1.0), "ema"),
        (dict(warmup=-1), "warmup"),
        (dict(update_every=0), "update_every"),
        (dict(schedule=[0.5]), "rate='schedule'"),
        (dict(rate="schedule"), "schedule=\\[...\\]"),
        (dict(rate="schedule", schedule=[2.0]), "each entry a number >= 0 and <= 1"),
        (dict(rate="predictor"), "tokenprune fit dyrate --model"),
        (dict(predictor="there.safetensors"), "rate='predictor'"),
        (dict(rate="predictor", predictor="nowhere.safetensors"), "nowhere"),
        (dict(layer=4), "out of range"),
        (dict(batch_policy="each"), "batch_policy"),
    ],
)
def test_invalid_options_raise(options: dict, message: str, build) -> None:
    with pytest.raises(OptionError, match=message):
        tokenprune.patch(build(FAMILIES["llava"]), "dyrate", **options)


def test_unsupported_combinations_raise(build) -> None:
    model, two = build(FAMILIES["llava"]), [tokenprune.method("dyrate", layer=layer) for layer in (1, 2)]
    with pytest.raises(OptionError, match="both act at"):
        tokenprune.patch(model, [tokenprune.method("fastv", layer=3), "dyrate"])
    with pytest.raises(OptionError, match="only one"):
        tokenprune.patch(model, two)


@torch.no_grad()
def test_windows_of_ragged_rows_on_flash(build) -> None:
    family = FAMILIES["gemma3"]
    model = build(family, "flash_stand_in")
    with tokenprune.patched(model, "dyrate", keep=0.5, layer=1):
        with pytest.raises(UnsupportedSetupError, match="mode='mask'"):
            model(**family.make_inputs())
        model(**family.make_inputs(only=0))
