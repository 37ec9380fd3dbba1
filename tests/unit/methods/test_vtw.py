# SPDX-License-Identifier: Apache-2.0
"""vtw removes all visual tokens from later layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from oracle import close, generate_logits, reduced
from tokenprune import Budget, BudgetError
from tokenprune.models.decoder_shape import DecoderShape
from zoo import FAMILIES

SHAPE = DecoderShape(32, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16)


def count_per_layer(budget: Any, counts: list[int], layers: int = 32) -> list[list[int]]:
    """Return the token count per image and layer."""
    stages = {
        stage.cut_layer: part for stage, part in tokenprune.method("vtw").stages(Budget.from_keep(budget), layers)
    }
    current, per_layer = list(counts), []
    for layer in range(layers):
        if layer in stages:
            shape = DecoderShape(layers, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16)
            present = [n for n in current if n]
            kept = stages[layer].resolve(present, layer=layer, shape=shape, text_tokens=40, original=counts)
            kept = iter(kept)
            current = [next(kept) if n else 0 for n in current]
        per_layer.append(list(current))
    return [list(counts_of_image) for counts_of_image in zip(*per_layer, strict=True)]


def test_layer_matches_paper() -> None:
    assert count_per_layer(0.47, [576]) == count_per_layer(Budget(average_share=0.47), [576]) == [[576] * 15 + [0] * 17]
    assert count_per_layer(Budget(average_tokens=270), [576, 100]) == [[576] * 15 + [0] * 17, [100] * 32]
    assert count_per_layer(Budget.from_kv_share(0.5), [9]) == [[9] * 16 + [0] * 16]
    assert count_per_layer(64, [576]) == [[576] * 3 + [0] * 29]


def test_flops_budget_rounds_to_layers() -> None:
    (tokens,) = count_per_layer(Budget.from_flops_share(0.6), [200])
    full = SHAPE.prefill_flops([240] * 32)
    spent = [SHAPE.prefill_flops([240] * k + [40] * (32 - k)) / full for k in range(33)]
    num_layers = max(k for k in range(33) if spent[k] <= 0.6)
    assert tokens == [200] * num_layers + [0] * (32 - num_layers)


def test_budget_below_one_layer_is_rejected() -> None:
    with pytest.raises(BudgetError, match="a single layer exceeds it"):
        tokenprune.method("vtw").stages(Budget(keep=0.03), 32)
    with pytest.raises(BudgetError, match="a single layer exceeds it"):
        count_per_layer(Budget(average_tokens=3), [576])


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_image_size_decides_layer(name: str, build: Any) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    counts = [n for row in inputs.counts for n in row]
    with tokenprune.patched(model, "vtw", keep=Budget(average_tokens=max(counts) / 2), record=True):
        got, tokens, out = generate_logits(model, inputs, 3)
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_per_layer[:1] == [sum(counts)]
    expected = [sum(n for n in counts if layer < int(4 * max(counts) / 2 / n)) for layer in range(4)]
    assert stats.visual_tokens_per_layer == expected
    with reduced(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        want, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    close(got, want)
    text = max(len(row) for row in stats.cuts[-1].kept)
    assert out.past_key_values.layers[-1].keys.shape[-2] == text + 2


@torch.no_grad()
def test_row_without_image_is_unchanged(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1, 0))
    want = model(**inputs).logits
    with tokenprune.patched(model, "vtw", keep=0.75):
        got = model(**inputs).logits
        assert tokenprune.stats(model).visual_tokens_per_layer == [36, 36, 36, 0]
    mask = inputs["attention_mask"][1].bool()
    close(got[1][mask], want[1][mask])
    assert (got[0] - want[0]).abs().max() > 1e-3
