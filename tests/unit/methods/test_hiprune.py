# SPDX-License-Identifier: Apache-2.0
"""hiprune against a naive loop."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch

import tokenprune
from tests.unit.methods.naive.hiprune import LAYERS
from tokenprune.integrations.shared.towers.tower_scores import find_block_index
from tower_tokens import best, tower_tokens
from tower_tokens import chosen as chosen_by

chosen = partial(chosen_by, "hiprune")


def test_without_anchors_the_last_block_decides() -> None:
    """alpha=0, or a budget smaller than a cross."""
    for keep, alpha in ((20, 0.0), (4, 1.0), (24, 0.1)):
        tokens = tower_tokens([([(6, 6)], 0)], [keep], layers=LAYERS)
        deep = tokens.encoder_received_attention(-1)[0].double().mean(0).tolist()
        assert chosen(tokens, alpha=alpha) == [best(list(range(36)), deep, keep)]


def test_anchor_in_a_corner() -> None:
    """On a 5 x 6 grid. The sets of the authors' code follow from its description."""
    for anchor, edges, want in (
        (5, "grid", {4, 5, 11}), (23, "grid", {17, 22, 23, 29}),
        (5, "sequence", {0, 4, 5, 6, 11}), (23, "sequence", {17, 22, 23, 24, 29}),
    ):  # fmt: skip
        scores = {layer: torch.zeros(1, 1, 30) for layer in LAYERS}
        scores[0.39][0, 0, anchor] = 1
        scores[-1][0, 0, 12:16] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # fills the remaining budget
        tokens = tower_tokens([([(5, 6)], 0)], [7], encoder_received_attention=scores)
        (got,) = chosen(tokens, alpha=0.7, edges=edges)
        assert want <= set(got) and set(got) - want == set([12, 13, 14, 15][: 7 - len(want)])


def test_default_object_block_matches_the_authors() -> None:
    """Block 8 of CLIP-L's 24, of which 23 are read, and block 15 of Qwen2.5-VL's 32."""
    method = tokenprune.method("hiprune")
    clip = SimpleNamespace(vision_feature_layer=-2, vision_config=SimpleNamespace())
    qwen = SimpleNamespace(vision_config=SimpleNamespace(fullatt_block_indexes=[7, 15, 23, 31]))
    assert [find_block_index(method, x, 24, clip) for x in method.encoder_layers] == [8, 22]
    assert [find_block_index(method, x, 32, qwen) for x in method.encoder_layers] == [15, 31]
