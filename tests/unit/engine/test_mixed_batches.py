# SPDX-License-Identifier: Apache-2.0
"""Batches of prompts with different lengths: the first cut drops padding, and rows equal single prompts."""

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

# Images per row. Rows also differ in their text.
BATCHES = {"one and none": (1, 0), "one and two": (1, 2), "two, none and one": (2, 0, 1), "two lengths of text": (1, 1)}


@dataclass
class LayerWidths:
    """Width of each decoder layer in the prefill."""

    widths: dict[int, int] = field(default_factory=dict)


@contextmanager
def record_widths(family: Family, model: Any) -> Iterator[LayerWidths]:
    """Record the input width of each layer's MLP in the first call, with hooks only."""
    recorded, layers = LayerWidths(), model.get_submodule(family.decoder).layers

    def note(index: int):
        def hook(module: Any, args: tuple) -> None:
            recorded.widths.setdefault(index, args[0].shape[-2])

        return hook

    handles = [layer.mlp.register_forward_pre_hook(note(index)) for index, layer in enumerate(layers)]
    with removed_after(handles):
        yield recorded


def count_tokens(stats: Stats, inputs: Inputs, layers: int) -> list[list[int]]:
    """Return the number of tokens per layer and row from the recorded cuts, without padding."""
    counts = []
    for layer in range(layers):
        cuts = [cut for cut in stats.cuts if cut.layer <= layer and cut.step == 0]
        lengths = inputs["attention_mask"].sum(1).tolist()
        counts.append([len(row) for row in cuts[-1].kept] if cuts else lengths)
    return counts


def check_rectangle(family: Family, model: Any, inputs: Inputs, stats: Stats, recorded: LayerWidths) -> None:
    """Check that each layer is as wide as its longest row, and that statistics equal the recorded widths."""
    layers, length = model.config.get_text_config().num_hidden_layers, inputs["input_ids"].shape[1]
    counts = count_tokens(stats, inputs, layers)
    first = min(cut.layer for cut in stats.cuts)
    want = [length if layer < first else max(row_counts) for layer, row_counts in enumerate(counts)]
    assert [recorded.widths[layer] for layer in range(layers)] == want
    assert stats.width_per_layer == want
    slots = len(counts[0]) * sum(want)
    assert stats.padding_share == pytest.approx(1 - sum(map(sum, counts)) / slots)

    shape = DecoderShape.from_config(model.config.get_text_config())
    computed = shape.prefill_flops(want) / shape.prefill_flops([length] * layers)
    assert stats.prefill_flops_ratio == pytest.approx(computed)
    pruned_flops = sum(shape.prefill_flops(list(row)) for row in zip(*counts, strict=True))
    unpruned_flops = sum(
        shape.prefill_flops([row_length] * layers) for row_length in inputs["attention_mask"].sum(1).tolist()
    )
    assert stats.prefill_flops_ratio_tokens == pytest.approx(pruned_flops / unpruned_flops)


def check_rows(
    family: Family, model: Any, options: dict[str, Any], inputs: Inputs, single_inputs: list[Inputs]
) -> None:
    """Check that the logits and eight generated tokens of each row equal the row's single prompt."""
    is_valid = inputs["attention_mask"].bool()
    # transformers does not generate after padding: it warns and counts positions from there.
    written = [row for row in range(len(single_inputs)) if is_valid[row, -1]]
    with tokenprune.patched(model, **options, record=True):
        with record_widths(family, model) as recorded, torch.no_grad():
            out = model(**inputs, **compute_positions(family, inputs))
        stats = tokenprune.stats(model)
        check_rectangle(family, model, inputs, stats, recorded)
        check_bytes(out.past_key_values, stats, inputs)
        steps, tokens, _ = generate_logits(model, inputs, 8)
        for row, single in enumerate(single_inputs):
            with torch.no_grad():
                close(out.logits[row, is_valid[row]], model(**single).logits[0])
        for row in written:
            single = single_inputs[row]
            want, single_tokens, _ = generate_logits(model, single, 8, tokens=tokens[row : row + 1])
            close(steps[row], want[0])
            assert torch.equal(tokens[row], single_tokens[0])


def compute_positions(family: Family, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the position ids that `generate` would pass, because scores may depend on them."""
    if family.types == "mm_token_type_ids":
        return {}
    return {"position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def check_bytes(cache: Any, stats: Stats, inputs: Inputs) -> None:
    """Check cache bytes against the tensors, and cache bytes of tokens without padding."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert stats.kv_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    counts, want = count_tokens(stats, inputs, len(cache.layers)), 0
    for layer, row_counts in zip(cache.layers, counts, strict=True):
        slots = layer.keys.shape[-2]
        size = sum(t.numel() * t.element_size() for t in (layer.keys, layer.values)) // (layer.keys.shape[0] * slots)
        # Before the first cut, a window shorter than the row can contain padding.
        padded = row_counts == inputs["attention_mask"].sum(1).tolist()
        lengths = [int(row[-slots:].sum()) for row in inputs["attention_mask"]] if padded else row_counts
        want += size * sum(min(slots, length) for length in lengths)
    assert stats.kv_bytes_tokens == want


def check(family: Family, model: Any, batch: str, padding: str, **options: Any) -> None:
    images = BATCHES[batch]
    inputs = family.make_inputs(images=images, padding=padding)
    single_inputs = [family.make_inputs(images=images, only=row) for row in range(len(images))]
    check_rows(family, model, options, inputs, single_inputs)


CASES = [("llava", batch) for batch in BATCHES] + [("qwen2_5_vl", "two, none and one")]


@pytest.mark.each_kind
@pytest.mark.pairwise
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("name", "batch"), CASES)
@pytest.mark.parametrize("method", MODEL_METHODS)
def test_rows_equal_single_prompts(name: str, method: str, batch: str, padding: str, build) -> None:
    check(FAMILIES[name], build(FAMILIES[name]), batch, padding, method=method, keep=0.3)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_merges_in_the_tower(name: str, padding: str, build) -> None:
    keep = 0.5 if name == "llava_next" else 0.25  # tiny images keep at least one token per tile and the newlines
    check(FAMILIES[name], build(FAMILIES[name]), "two, none and one", padding, method="tome", keep=keep)


def test_keep_all_keeps_padding(build) -> None:
    """keep=1.0 is bit-equal with padding, and the statistics report the padding."""
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
def test_masked_visual_tokens_are_not_padding(build) -> None:
    """Budgets count it, and a cut keeps or drops it like any other token."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1, 0))
    visual = family.visual_mask(model, inputs)[0].nonzero().flatten().tolist()
    with tokenprune.patched(model, "uniform", keep=0.5, record=True):
        want = model(**inputs).logits
        before = tokenprune.stats(model)
        kept = before.cuts[0].kept[0]
        inputs["attention_mask"][0, next(index for index in visual if index not in kept)] = 0
        assert torch.equal(model(**inputs).logits, want)  # it is dropped as before
        assert tokenprune.stats(model).cuts[0].kept[0] == kept
        inputs["attention_mask"][0, next(index for index in visual if index in kept)] = 0
        model(**inputs)
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_out == before.visual_tokens_out and stats.width_per_layer == before.width_per_layer


@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_row_of_padding(method: str, build) -> None:
    """Data loaders fill their last batch with empty rows."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1, 0))
    inputs["attention_mask"][1] = 0
    single_inputs = family.make_inputs(images=(1, 0), only=0)
    with tokenprune.patched(model, method, keep=0.25), torch.no_grad():
        got = model(**inputs).logits
        stats = tokenprune.stats(model)
        want = model(**single_inputs).logits
    is_valid = inputs["attention_mask"][0].bool()
    close(got[0, is_valid], want[0])
    assert stats.width_per_layer[-1] < len(is_valid)


@pytest.mark.parametrize("padding", ["left", "right"])
@torch.no_grad()
def test_virtual_unmerging(padding: str, build) -> None:
    """Decoder weights run on as many slots as the longest row has merged tokens, without padding."""
    family, images = FAMILIES["llava"], (2, 0, 1)
    model, inputs = build(family), family.make_inputs(images=images, padding=padding)
    single_inputs = [family.make_inputs(images=images, only=row) for row in range(len(images))]
    is_valid = inputs["attention_mask"].bool()
    with tokenprune.patched(model, Merging(), keep=0.25, record=True):
        with record_widths(family, model) as recorded:
            got = model(**inputs, **compute_positions(family, inputs)).logits
        stats = tokenprune.stats(model)
        (counts,) = {tuple(row) for row in count_tokens(stats, inputs, 4)}
        assert list(recorded.widths.values()) == stats.width_per_layer == [max(counts)] * 4
        assert stats.kv_bytes == stats.kv_bytes_full  # the cache contains every position, with padding
        assert stats.kv_bytes_tokens == pytest.approx(stats.kv_bytes * is_valid.float().mean().item())
        for row, single in enumerate(single_inputs):
            close(got[row, is_valid[row]], model(**single).logits[0], 2e-5)
