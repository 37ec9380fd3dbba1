# SPDX-License-Identifier: Apache-2.0
"""transprune against naive loops written from its description."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tokenprune
from several_cuts import Arrived, best, check_in_model, rows, view
from tokenprune import Budget
from zoo import FAMILIES


@pytest.mark.parametrize("alpha", [0.5, 1.0, 0.0])
@torch.no_grad()
def test_transitions_add_up_over_layers(alpha: float, build: Any) -> None:
    """By hand: the layer's own modules run once more on what enters it, with what earlier cuts removed hidden."""
    family = FAMILIES["llava"]
    decoder = build(family, "eager").get_submodule(family.decoder)
    sums: dict[tuple, dict[int, float]] = {}

    def naive(seen: Arrived) -> list[int]:
        layer = decoder.layers[seen.number]  # cuts are at layers 1, 2 and 3
        normed = layer.input_layernorm(seen.previous)
        values = layer.self_attn.v_proj(normed).view(len(normed), -1, layer.self_attn.head_dim)
        values = values.repeat_interleave(len(seen.before) // values.shape[1], 1)
        attended = layer.self_attn.o_proj(torch.einsum("hqk,khd->qhd", seen.before, values).flatten(1))
        middle = layer.post_attention_layernorm(seen.previous + attended)
        total = sums.setdefault(tuple(seen.all_places), dict.fromkeys(seen.all_places, 0.0))
        for given, made in ((normed, attended), (middle, layer.mlp(middle))):
            turned = {}
            for i in seen.places:
                cosine = float(given[i] @ made[i] / (given[i].norm() * made[i].norm()))
                turned[i] = math.exp(1 - cosine)
            whole = sum(turned.values())
            for i in seen.places:
                total[i] += turned[i] / whole * float(made[i].norm() / given[i].norm())
        attention = {i: sum(float(head[j, i]) for head in seen.behind for j in seen.text) for i in seen.places}
        both = [
            (alpha * total[i] / sum(total[j] for j in seen.places)
             + (1 - alpha) * attention[i] / sum(attention.values())) for i in seen.places
        ]  # fmt: skip
        return [seen.places[i] for i in best(both, seen.keep)]

    # Rows one after the other: totals are kept by places, which rows of other images may share.
    for images in ((2,), (1,)):
        sums.clear()
        cuts = check_in_model("transprune", naive, build, keep=0.6, images=images, alpha=alpha)
        assert [cut.layer for cut in cuts] == [1, 2, 3]


def test_layers_between_the_cuts_are_looked_at() -> None:
    stages = tokenprune.method("transprune").stages(Budget(keep=0.41), 32)
    assert [(stage.layer, stage.chooses_count, part.is_identity()) for stage, part in stages] == [
        (7, False, False), (8, True, True), (9, False, False), (10, True, True), (11, True, True), (12, False, False),
    ]  # fmt: skip
    counts, keep, carry = [20, 9], [7, 4], {}
    total = torch.zeros(2, 20)
    for number, (stage, _) in enumerate(stages):
        tokens = view(counts, keep, stage.needs, seed=number, carry=carry)
        selection = stage.select(tokens)
        carry = dict(tokens.carry)
        for row, count in enumerate(counts):
            for module in range(2):
                longer, cosine = tokens.transitions[row, :count, module].unbind(-1)
                total[row, :count] += (1 - cosine).softmax(0) * longer
        torch.testing.assert_close(carry["transitions"], total)
        if stage.chooses_count:
            assert rows(selection.keep) == [list(range(20)), list(range(9))]


def test_a_factor_of_all_outputs_changes_nothing() -> None:
    method = tokenprune.method("transprune")
    tokens = view([30, 11], [9, 4], method.needs)
    longer = tokens.transitions * torch.tensor([7.0, 1.0])
    other = view([30, 11], [9, 4], method.needs, transitions=longer)
    assert rows(method.select(other).keep) == rows(method.select(tokens).keep)
