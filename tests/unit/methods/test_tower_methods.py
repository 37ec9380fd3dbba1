# SPDX-License-Identifier: Apache-2.0
"""Methods that rank tokens by values of the vision tower: behavior that their loops in naive/ do not cover."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tokenprune
from looking import look
from tests.unit.methods.naive import flowcut, hiprune
from tests.unit.methods.naive.vispruner import naive as naive_vispruner
from tokenprune.integrations.shared.towers.tower_scores import find_block_index
from tokenprune.methods.pre_llm import vispruner
from tower_tokens import best, chosen, kept_of, tower_tokens
from tower_values import run_tower
from zoo import FAMILIES

# -- fastervlm ---------------------------------------------------------------------------------------------------------


def test_fastervlm_nan_and_constant_attention_keep_the_first_tokens() -> None:
    for value in (torch.nan, 0.5):
        tokens = tower_tokens([([(5, 5)], 2)], [7], encoder_attention={-1: torch.full((1, 2, 27), value)})
        assert chosen("fastervlm", tokens) == [[0, 1, 2, 3, 4, 5, 6]]


# -- hiprune -----------------------------------------------------------------------------------------------------------


def test_hiprune_without_anchors_the_last_block_decides() -> None:
    """alpha=0, or a budget smaller than a cross."""
    for keep, alpha in ((20, 0.0), (4, 1.0), (24, 0.1)):
        tokens = tower_tokens([([(6, 6)], 0)], [keep], layers=hiprune.LAYERS)
        deep = tokens.encoder_received_attention(-1)[0].double().mean(0).tolist()
        assert chosen("hiprune", tokens, alpha=alpha) == [best(list(range(36)), deep, keep)]


def test_hiprune_anchor_in_a_corner() -> None:
    """On a 5 x 6 grid, as in the description of the authors' code."""
    for anchor, edges, want in (
        (5, "grid", {4, 5, 11}), (23, "grid", {17, 22, 23, 29}),
        (5, "sequence", {0, 4, 5, 6, 11}), (23, "sequence", {17, 22, 23, 24, 29}),
    ):  # fmt: skip
        scores = {layer: torch.zeros(1, 1, 30) for layer in hiprune.LAYERS}
        scores[0.39][0, 0, anchor] = 1
        scores[-1][0, 0, 12:16] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # fills the remaining budget
        tokens = tower_tokens([([(5, 6)], 0)], [7], encoder_received_attention=scores)
        (got,) = chosen("hiprune", tokens, alpha=0.7, edges=edges)
        assert want <= set(got) and set(got) - want == set([12, 13, 14, 15][: 7 - len(want)])


def test_hiprune_default_object_block_matches_the_authors() -> None:
    """Block 8 of 24 for CLIP-L (23 blocks are read), and block 15 of 32 for Qwen2.5-VL."""
    method = tokenprune.method("hiprune")
    clip = SimpleNamespace(vision_feature_layer=-2, vision_config=SimpleNamespace())
    qwen = SimpleNamespace(vision_config=SimpleNamespace(fullatt_block_indexes=[7, 15, 23, 31]))
    assert [find_block_index(method, x, 24, clip) for x in method.encoder_layers] == [8, 22]
    assert [find_block_index(method, x, 32, qwen) for x in method.encoder_layers] == [15, 31]


# -- holov -------------------------------------------------------------------------------------------------------------


def test_holov_full_strip_and_constant_attention() -> None:
    """The surplus of a full strip is distributed. With constant attention, budgets differ by at most one token."""
    scores = torch.full((1, 1, 64), 1e-6)
    scores[..., 16:32] = 1
    (got,) = chosen("holov", tower_tokens([([(8, 8)], 0)], [40], encoder_attention={-1: scores}), crops=4)
    assert set(range(16, 32)) <= set(got) and len(got) == 40
    assert [sum(i // 16 == c for i in got) for c in range(4)] == [8, 16, 8, 8]
    for value in (0.25, 0.0, torch.nan):
        constant = {-1: torch.full((1, 1, 64), value)}
        (got,) = chosen("holov", tower_tokens([([(8, 8)], 0)], [30], encoder_attention=constant), crops=4)
        assert [sum(i // 16 == c for i in got) for c in range(4)] == [8, 8, 7, 7]


# -- flowcut -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [32, 192])
def test_flowcut_sharp_attention_at_the_size_of_the_paper(keep: int) -> None:
    tokens = flowcut.tokens_of([([(24, 24)], 0)], [keep], power=12, dtype=torch.bfloat16)
    assert chosen("flowcut", tokens) == [flowcut.naive(tokens, 0)]


def test_flowcut_scored_blocks_match_clip() -> None:
    """Blocks 0 to 21 of CLIP-L, read at block 22. A shallow tower uses blocks several times."""
    method = tokenprune.method("flowcut")
    clip = SimpleNamespace(vision_feature_layer=-2, vision_config=SimpleNamespace())
    assert [find_block_index(method, layer, 24, clip) for layer in flowcut.LAYERS] == list(range(22))
    last = SimpleNamespace(vision_feature_layer=-1, vision_config=SimpleNamespace())
    assert sorted({find_block_index(method, layer, 4, last) for layer in flowcut.LAYERS}) == [0, 1, 2, 3]


def test_flowcut_zero_and_constant_attention() -> None:
    for value in (0.0, 0.25, torch.nan):
        flow = dict.fromkeys(flowcut.LAYERS, torch.full((1, 3, 36), value))
        assert chosen("flowcut", tower_tokens([([(6, 6)], 0)], [5], encoder_flow=flow)) == [[0, 1, 2, 3, 4]]
    sharp = torch.full((1, 3, 36), 1e-30)
    sharp[0, :, 7] = 1
    assert (
        7 in chosen("flowcut", tower_tokens([([(6, 6)], 0)], [5], encoder_flow=dict.fromkeys(flowcut.LAYERS, sharp)))[0]
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_flowcut_encoder_flow_equals_tower_attention(name: str, build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the class token's row and values, or the mean received attention without a class token."""
    family = FAMILIES[name]
    inputs = family.make_inputs(only=0)
    _, _, *call = run_tower(family, build(family, "eager"), inputs, monkeypatch).calls[0][0]
    method, calls = look(lambda tokens: tokens.encoder_flow(0)[0], ("encoder_flow",), (0,))
    with tokenprune.patched(build(family), method, keep=0.5):
        build(family)(**inputs)
    value, weights = (x[:1] for x in call)  # of the first image
    size = value.mean(1).abs().sum(-1)
    if name == "llava":
        similarity = torch.softmax(value[:, :, :1] @ value.transpose(2, 3), -1)[:, :, 0, 1:].mean(1)
        want = torch.stack([weights[:, :, 0, 1:].mean(1), similarity, size[:, 1:]], 1)[0]
    else:
        received = weights.mean(2).mean(1)
        want = torch.stack([received, torch.zeros_like(received), size], 1)[0].unflatten(1, (-1, 4)).mean(2)
    torch.testing.assert_close(calls[0][:, : want.shape[1]], want)


# -- vispruner ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 9, 17, 24])
def test_vispruner_every_budget_is_exact(count: int) -> None:
    """Also where the authors' code fails. important=1 equals fastervlm."""
    for keep in range(1, count + 1):
        tokens = tower_tokens([([(1, count)], 0)], [keep])
        assert (
            chosen("vispruner", tokens) == [naive_vispruner(tokens, 0)] and len(chosen("vispruner", tokens)[0]) == keep
        )
        fastervlm = kept_of(tokenprune.method("fastervlm").select(tokens).keep)
        assert chosen("vispruner", tokens, important=1.0) == fastervlm


def test_vispruner_long_lines_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [([(6, 5), (4, 7)], 1), ([(5, 5)], 0)]
    expected = chosen("vispruner", tower_tokens(layout, [20, 9]))
    monkeypatch.setattr("tokenprune.kernels.clusters._MAX_ELEMENTS", 1)
    assert chosen("vispruner", tower_tokens(layout, [20, 9])) == expected


@pytest.mark.parametrize("num_neighbours", [1, 32])
def test_vispruner_long_line_equals_table(num_neighbours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [([(18, 15), (16, 17)], 1), ([(25, 21)], 0)]
    random_tokens = tower_tokens(layout, [60, 90])
    x = random_tokens.encoder_features.clone()
    x[:, 1::5] = x[:, :-1:5][:, : x[:, 1::5].shape[1]]
    tokens = tower_tokens(layout, [60, 90], encoder_features=x)
    expected = chosen("vispruner", tokens)
    monkeypatch.setattr("tokenprune.kernels.farthest.TABLE", 0)
    monkeypatch.setattr(vispruner, "_NUM_NEIGHBORS", num_neighbours)
    monkeypatch.setattr(vispruner, "_ROWS_AT_ONCE", 50)
    monkeypatch.setattr(vispruner, "_run_rounds", None)
    assert chosen("vispruner", tokens) == expected


def test_vispruner_duplicate_is_dropped_first() -> None:
    scores = torch.linspace(1, 0, 16)[None, None]
    x = torch.eye(16)[None].clone()
    x[0, 6] = x[0, 3]
    tokens = tower_tokens([([(4, 4)], 0)], [15], encoder_attention={-1: scores}, encoder_features=x)
    assert chosen("vispruner", tokens, important=0.0) == [[i for i in range(16) if i != 6]]
    x[0, 0] = 0  # zero vectors are similar to no token
    tokens = tower_tokens([([(4, 4)], 0)], [14], encoder_attention={-1: scores}, encoder_features=x)
    assert len(chosen("vispruner", tokens, important=0.0)[0]) == 14
