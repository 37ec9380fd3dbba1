# SPDX-License-Identifier: Apache-2.0
"""flowcut against a naive loop, and its observable against hooks of an eager tower."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenprune
from tests.unit.methods.naive.flowcut import LAYERS, naive, naive_tile, tokens_of
from tests.unit.tower.test_encoder_attention import attentions_of
from tokenprune.integrations.shared.towers.tower_scores import find_block_index
from tower_tokens import chosen as chosen_by
from tower_tokens import tower_tokens
from zoo import FAMILIES

chosen = partial(chosen_by, "flowcut")


@pytest.mark.parametrize("keep", [32, 192])
def test_sharp_attention_drops_more_patches_early(keep: int) -> None:
    """Counts never grow."""
    tokens = tokens_of([([(24, 24)], 0)], [keep], power=12, dtype=torch.bfloat16)
    assert chosen(tokens) == [naive(tokens, 0)]
    flow = {layer: tokens.encoder_flow(layer)[0].double().tolist() for layer in LAYERS}
    counts = naive_tile(flow, list(range(576)), keep)[1]
    assert counts == sorted(counts, reverse=True) and counts[0] == 576 > counts[1] and counts[-1] == keep
    assert all(a == b for a, b in zip(counts[1::2], counts[2::2], strict=False))


def test_scored_blocks_match_clip() -> None:
    """Blocks 0 to 21 of CLIP-L, whose block 22 is read. A shallow tower uses blocks several times."""
    method = tokenprune.method("flowcut")
    clip = SimpleNamespace(vision_feature_layer=-2, vision_config=SimpleNamespace())
    assert [find_block_index(method, layer, 24, clip) for layer in LAYERS] == list(range(22))
    last = SimpleNamespace(vision_feature_layer=-1, vision_config=SimpleNamespace())
    assert sorted({find_block_index(method, layer, 4, last) for layer in LAYERS}) == [0, 1, 2, 3]


def test_zero_and_constant_attention() -> None:
    """No division by zero. Ties keep the first tokens."""
    for value in (0.0, 0.25, torch.nan):
        flow = dict.fromkeys(LAYERS, torch.full((1, 3, 36), value))
        assert chosen(tower_tokens([([(6, 6)], 0)], [5], encoder_flow=flow)) == [[0, 1, 2, 3, 4]]
    sharp = torch.full((1, 3, 36), 1e-30)
    sharp[0, :, 7] = 1
    assert 7 in chosen(tower_tokens([([(6, 6)], 0)], [5], encoder_flow=dict.fromkeys(LAYERS, sharp)))[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_encoder_flow_equals_tower_attention(name: str, build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the class token's row and values, or the mean received attention without a class token."""
    family, calls, seen = FAMILIES[name], [], []
    inputs, attention = family.make_inputs(only=0), attentions_of(build(family, "eager"))[0]
    module = sys.modules[type(attention).__module__]
    original = module.eager_attention_forward

    def record(which: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = original(which, query, key, value, *args, **kwargs)
        if which is attention:
            calls.append((value, weights))
        return output, weights

    with monkeypatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", record)
        build(family, "eager")(**inputs)

    class Look(tokenprune.Pruner):
        name, needs, encoder_layers = "look", frozenset({"encoder_flow"}), (0,)

        def select(self, tokens: Any) -> Any:
            seen.append(tokens.encoder_flow(0)[0])
            return tokenprune.Selection.top(tokens.mask.float(), tokens)

    with tokenprune.patched(build(family), Look(), keep=0.5):
        build(family)(**inputs)
    value, weights = (one[:1] for one in calls[0])  # of the first image
    size = value.mean(1).abs().sum(-1)
    if name == "llava":
        alike = torch.softmax(value[:, :, :1] @ value.transpose(2, 3), -1)[:, :, 0, 1:].mean(1)
        want = torch.stack([weights[:, :, 0, 1:].mean(1), alike, size[:, 1:]], 1)[0]
    else:
        received = weights.mean(2).mean(1)
        want = torch.stack([received, torch.zeros_like(received), size], 1)[0].unflatten(1, (-1, 4)).mean(2)
    torch.testing.assert_close(seen[0][:, : want.shape[1]], want)
