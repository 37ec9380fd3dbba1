# SPDX-License-Identifier: Apache-2.0
"""Batches of prompts of different lengths: padding leaves with the first cut, and rows stay what they are alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tokenprune
from basics import MODEL_METHODS
from hooks import removed_after
from merging_models import SUPPORTED
from merging_towers import Merging
from oracle import close, generate_logits
from tokenprune import Stats
from tokenprune.models.decoder_shape import DecoderShape
from zoo import FAMILIES, Family, Inputs

# How many images each row has; rows differ in their text too.
BATCHES = {"one and none": (1, 0), "one and two": (1, 2), "two, none and one": (2, 0, 1), "two lengths of text": (1, 1)}


@dataclass
class Seen:
    """Slots of a row in each layer of a decoder in prefill."""

    widths: dict[int, int] = field(default_factory=dict)


@contextmanager
def watched(family: Family, model: Any) -> Iterator[Seen]:
    """Note how wide the MLP of each decoder layer runs in the first call, without anything of the library."""
    seen, layers = Seen(), model.get_submodule(family.decoder).layers

    def note(index: int):
        def hook(module: Any, args: tuple) -> None:
            seen.widths.setdefault(index, args[0].shape[-2])

        return hook

    handles = [layer.mlp.register_forward_pre_hook(note(index)) for index, layer in enumerate(layers)]
    with removed_after(handles):
        yield seen


def tokens_left(stats: Stats, inputs: Inputs, layers: int) -> list[list[int]]:
    """For each layer the tokens of each row, as the record of the cuts tells; padding is never among them."""
    left = []
    for layer in range(layers):
        cuts = [cut for cut in stats.cuts if cut.layer <= layer and cut.step == 0]
        real = inputs["attention_mask"].sum(1).tolist()
        left.append([len(row) for row in cuts[-1].kept] if cuts else real)
    return left


def check_rectangle(family: Family, model: Any, inputs: Inputs, stats: Stats, seen: Seen) -> None:
    """Layers are as wide as the longest row that reaches them, and the statistics say what hooks counted."""
    layers, length = model.config.get_text_config().num_hidden_layers, inputs["input_ids"].shape[1]
    left = tokens_left(stats, inputs, layers)
    first = min(cut.layer for cut in stats.cuts)
    want = [length if layer < first else max(of_layer) for layer, of_layer in enumerate(left)]
    assert [seen.widths[layer] for layer in range(layers)] == want
    assert stats.width_per_layer == want
    slots = len(left[0]) * sum(want)
    assert stats.padding_share == pytest.approx(1 - sum(map(sum, left)) / slots)

    shape = DecoderShape.from_config(model.config.get_text_config())
    computed = shape.prefill_flops(want) / shape.prefill_flops([length] * layers)
    assert stats.prefill_flops_ratio == pytest.approx(computed)
    alone = sum(shape.prefill_flops(list(row)) for row in zip(*left, strict=True))
    whole = sum(shape.prefill_flops([real] * layers) for real in inputs["attention_mask"].sum(1).tolist())
    assert stats.prefill_flops_ratio_tokens == pytest.approx(alone / whole)


def check_rows(family: Family, model: Any, options: dict[str, Any], inputs: Inputs, alone: list[Inputs]) -> None:
    """Logits, and eight tokens that `generate` writes, are those of each row alone."""
    real = inputs["attention_mask"].bool()
    # transformers does not generate from padding: it counts positions from there, and says so.
    written = [row for row in range(len(alone)) if real[row, -1]]
    with tokenprune.patched(model, **options, record=True):
        with watched(family, model) as seen, torch.no_grad():
            out = model(**inputs, **counted(family, inputs))
        stats = tokenprune.stats(model)
        check_rectangle(family, model, inputs, stats, seen)
        check_bytes(out.past_key_values, stats, inputs)
        steps, tokens, _ = generate_logits(model, inputs, 8)
        for row, one in enumerate(alone):
            with torch.no_grad():
                close(out.logits[row, real[row]], model(**one).logits[0])
        for row in written:
            one = alone[row]
            want, own, _ = generate_logits(model, one, 8, tokens=tokens[row : row + 1])
            close(steps[row], want[0])
            assert torch.equal(tokens[row], own[0])


def counted(family: Family, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Positions as `generate` hands them over, where the model does not count them itself: what a method ranks by may
    depend on them."""
    if family.types == "mm_token_type_ids":
        return {}
    return {"position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def check_bytes(cache: Any, stats: Stats, inputs: Inputs) -> None:
    """The rectangle's bytes are the tensors' own; those of tokens leave padding out."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert stats.kv_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    left, want = tokens_left(stats, inputs, len(cache.layers)), 0
    for layer, of_layer in zip(cache.layers, left, strict=True):
        slots = layer.keys.shape[-2]
        size = sum(t.numel() * t.element_size() for t in (layer.keys, layer.values)) // (layer.keys.shape[0] * slots)
        # Before the first cut padding stands among the tokens of a window that holds fewer.
        padded = of_layer == inputs["attention_mask"].sum(1).tolist()
        real = [int(row[-slots:].sum()) for row in inputs["attention_mask"]] if padded else of_layer
        want += size * sum(min(slots, number) for number in real)
    assert stats.kv_bytes_tokens == want


def check(family: Family, model: Any, batch: str, padding: str, **options: Any) -> None:
    images = BATCHES[batch]
    inputs = family.make_inputs(images=images, padding=padding)
    alone = [family.make_inputs(images=images, only=row) for row in range(len(images))]
    check_rows(family, model, options, inputs, alone)


CASES = [("llava", batch) for batch in BATCHES] + [("qwen2_5_vl", "two, none and one")]


@pytest.mark.each_kind
@pytest.mark.pairwise
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("name", "batch"), CASES)
@pytest.mark.parametrize("method", MODEL_METHODS)
def test_rows_are_what_they_are_alone(name: str, method: str, batch: str, padding: str, build) -> None:
    check(FAMILIES[name], build(FAMILIES[name]), batch, padding, method=method, keep=0.3)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_merges_in_the_tower(name: str, padding: str, build) -> None:
    keep = 0.5 if name == "llava_next" else 0.25  # its tiny images have no fewer: a token of each tile, and newlines
    check(FAMILIES[name], build(FAMILIES[name]), "two, none and one", padding, method="tome", keep=keep)


def test_padding_alone_is_no_cut(build) -> None:
    """A call that keeps everything is bit-equal, padding and all, and its statistics tell of the padding."""
    model, inputs = FAMILIES["llava"].prepare(build, images=(1, 0))
    want = model(**inputs).logits
    with tokenprune.patched(model, "divprune", keep=1.0):
        assert torch.equal(model(**inputs).logits, want)
        stats = tokenprune.stats(model)
    padding = (inputs["attention_mask"] == 0).float().mean().item()
    assert stats.padding_share == pytest.approx(padding) and padding > 0.1
    assert stats.prefill_flops_ratio == stats.prefill_flops_ratio_tokens == 1
    assert stats.kv_bytes_tokens == pytest.approx((1 - padding) * stats.kv_bytes)
    assert f"padding {padding:.1%}" in repr(stats)


@torch.no_grad()
def test_a_visual_token_that_the_caller_masks_is_no_padding(build) -> None:
    """Budgets count it, and a cut takes it or leaves it like any other."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1, 0))
    visual = family.visual_mask(model, inputs)[0].nonzero().flatten().tolist()
    with tokenprune.patched(model, "uniform", keep=0.5, record=True):
        want = model(**inputs).logits
        before = tokenprune.stats(model)
        kept = before.cuts[0].kept[0]
        inputs["attention_mask"][0, next(place for place in visual if place not in kept)] = 0
        assert torch.equal(model(**inputs).logits, want)  # it goes, as it did before
        assert tokenprune.stats(model).cuts[0].kept[0] == kept
        inputs["attention_mask"][0, next(place for place in visual if place in kept)] = 0
        model(**inputs)
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_out == before.visual_tokens_out and stats.width_per_layer == before.width_per_layer


@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_a_row_of_padding_alone(method: str, build) -> None:
    """Data loaders fill up their last batch with rows that hold nothing."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1, 0))
    inputs["attention_mask"][1] = 0
    alone = family.make_inputs(images=(1, 0), only=0)
    with tokenprune.patched(model, method, keep=0.25), torch.no_grad():
        got = model(**inputs).logits
        stats = tokenprune.stats(model)
        want = model(**alone).logits
    real = inputs["attention_mask"][0].bool()
    close(got[0, real], want[0])
    assert stats.width_per_layer[-1] < len(real)


@pytest.mark.parametrize("padding", ["left", "right"])
@torch.no_grad()
def test_virtual_unmerging(padding: str, build) -> None:
    """The decoder's weights run on as many slots as the longest row has merged tokens; padding has none."""
    family, images = FAMILIES["llava"], (2, 0, 1)
    model, inputs = build(family), family.make_inputs(images=images, padding=padding)
    alone = [family.make_inputs(images=images, only=row) for row in range(len(images))]
    real = inputs["attention_mask"].bool()
    with tokenprune.patched(model, Merging(), keep=0.25, record=True):
        with watched(family, model) as seen:
            got = model(**inputs, **counted(family, inputs)).logits
        stats = tokenprune.stats(model)
        (left,) = {tuple(row) for row in tokens_left(stats, inputs, 4)}
        assert list(seen.widths.values()) == stats.width_per_layer == [max(left)] * 4
        assert stats.kv_bytes == stats.kv_bytes_full  # the cache holds every position, padding too
        assert stats.kv_bytes_tokens == pytest.approx(stats.kv_bytes * real.float().mean().item())
        for row, one in enumerate(alone):
            close(got[row, real[row]], model(**one).logits[0], 2e-5)
