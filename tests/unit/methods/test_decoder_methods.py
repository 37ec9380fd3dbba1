# SPDX-License-Identifier: Apache-2.0
"""Methods that cut inside the decoder: behavior that their loops in naive/ do not cover."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tokenprune
from several_cuts import COUNTS, SHARES, Arrived, best, check_in_model, rows, view, wanted
from tests.unit.methods.naive.feather import naive_even
from tests.unit.methods.naive.ivc_prune import naive_choice
from tests.unit.methods.naive.visipruner import naive_parts
from tokenprune import Budget, BudgetError, VisualTokens
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.testing import visual_tokens
from zoo import FAMILIES

# -- adaptinfer --------------------------------------------------------------------------------------------------------


def test_adaptinfer_ties_select_first_token() -> None:
    """Words with equal weights in all heads rank tokens by their summed attention."""

    def naive(tokens: VisualTokens, cut: int) -> list[list[int]]:
        score = tokens.attention_from(torch.ones(tokens.text.mask.shape)).mean(1).tolist()
        return [best(row[:n], k) for row, n, k in zip(score, tokens.counts, tokens.keep, strict=True)]

    for counts, keep in (([30, 7], [9, 2]), ([64], [1])):
        tokens = view(counts, keep, ("text_attention", "last_row_attention"), levels=4)
        uniform = torch.eye(5).expand(len(counts), 3, 5, 5)
        text = {"mask": tokens.text.mask, "hidden": tokens.text.hidden, "attention": uniform}
        equal_words = visual_tokens(
            tokens.hidden, counts, keep=keep, text=text, text_attention=tokens.text_attention,
            last_row_attention=tokens.last_row_attention,
        )  # fmt: skip
        assert rows(tokenprune.method("adaptinfer").select(equal_words).keep) == naive(equal_words, 0)


# -- feather -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 20, 162, 300, 729])
def test_feather_uniform_grid_matches_paper(keep: int) -> None:
    """The grid has 81 of 27 x 27 tokens, if it is at most half of the budget."""
    tokens = view([729], [keep], ["unrotated_last_row"], grids=[(1, 27, 27)])
    method = tokenprune.method("feather")
    grid_tokens = set(naive_even((27, 27), 729, keep))
    assert (len(grid_tokens), 0 in grid_tokens) == (81, True) or keep < 162
    (got,) = rows(method.choose(tokens, 0).keep)
    assert grid_tokens <= set(got) and len(got) == keep


def test_feather_video_frames_have_separate_grids() -> None:
    tokens = view([36], [20], ["unrotated_last_row"], grids=[(4, 3, 3)])
    (got,) = rows(tokenprune.method("feather", stride=2).choose(tokens, 0).keep)
    assert {9 * f for f in range(4)} <= set(got)  # a stride of 2 takes 16 tokens, a stride of 3 four


# -- ivc_prune ---------------------------------------------------------------------------------------------------------


def test_ivc_prune_selection_matches_loop() -> None:
    method = tokenprune.method("ivc_prune")
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            keep = wanted(counts, share)
            tokens = view(counts, keep, method.needs, seed=seed)
            cos, sin = (x.mean(-1) for x in tokens.rotation)
            want = []
            for row, (n, k) in enumerate(zip(counts, keep, strict=True)):
                text = tokens.text.value_heads[row, tokens.text.mask[row]]
                want.append(
                    naive_choice(cos[row, :n].tolist(), sin[row, :n].tolist(), tokens.value_heads[row, :n], text, k)
                )
            assert rows(method.select(tokens).keep) == want


def test_ivc_prune_short_text_still_rates() -> None:
    tokens = view([40], [10], ("value_heads", "rotation"), seed=3)
    tokens.text.mask[0, 2:] = False
    want = naive_choice(*([0.0] * 40,) * 2, tokens.value_heads[0], tokens.text.value_heads[0, :2], 10, coordinates=0)
    assert rows(tokenprune.method("ivc_prune", coordinates=0).select(tokens).keep) == [want]


# -- transprune --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 1.0, 0.0])
@torch.no_grad()
def test_transprune_transitions_are_summed_over_layers(alpha: float, build: Any) -> None:
    """The reference runs each layer's modules again on its input, with removed tokens masked."""
    family = FAMILIES["llava"]
    decoder = build(family, "eager").get_submodule(family.decoder)
    sums: dict[tuple, dict[int, float]] = {}

    def naive(arrived: Arrived) -> list[int]:
        layer = decoder.layers[arrived.number]  # cuts are at layers 1, 2 and 3
        normed = layer.input_layernorm(arrived.previous)
        values = layer.self_attn.v_proj(normed).view(len(normed), -1, layer.self_attn.head_dim)
        values = values.repeat_interleave(len(arrived.before) // values.shape[1], 1)
        attended = layer.self_attn.o_proj(torch.einsum("hqk,khd->qhd", arrived.before, values).flatten(1))
        middle = layer.post_attention_layernorm(arrived.previous + attended)
        total = sums.setdefault(tuple(arrived.all_places), dict.fromkeys(arrived.all_places, 0.0))
        for state_in, state_out in ((normed, attended), (middle, layer.mlp(middle))):
            turns = {}
            for i in arrived.places:
                cosine = float(state_in[i] @ state_out[i] / (state_in[i].norm() * state_out[i].norm()))
                turns[i] = math.exp(1 - cosine)
            total_turn = sum(turns.values())
            for i in arrived.places:
                total[i] += turns[i] / total_turn * float(state_out[i].norm() / state_in[i].norm())
        attention = {i: sum(float(head[j, i]) for head in arrived.behind for j in arrived.text) for i in arrived.places}
        both = [
            (alpha * total[i] / sum(total[j] for j in arrived.places)
             + (1 - alpha) * attention[i] / sum(attention.values())) for i in arrived.places
        ]  # fmt: skip
        return [arrived.places[i] for i in best(both, arrived.keep)]

    # One row at a time: the loop stores totals by position, and rows may share positions.
    for images in ((2,), (1,)):
        sums.clear()
        cuts = check_in_model("transprune", naive, build, keep=0.6, images=images, alpha=alpha)
        assert [cut.layer for cut in cuts] == [1, 2, 3]


def test_transprune_layers_between_cuts_add_transitions() -> None:
    stages = tokenprune.method("transprune").stages(Budget(keep=0.41), 32)
    assert [(stage.layer, stage.chooses_count, part.is_identity()) for stage, part in stages] == [
        (7, False, False), (8, True, True), (9, False, False), (10, True, True), (11, True, True), (12, False, False),
    ]  # fmt: skip
    counts, keep, carry = [20, 9], [7, 4], {}
    total = torch.zeros(2, 20)
    for index, (stage, _) in enumerate(stages):
        tokens = view(counts, keep, stage.needs, seed=index, carry=carry)
        selection = stage.select(tokens)
        carry = dict(tokens.carry)
        for row, count in enumerate(counts):
            for module in range(2):
                growth, cosine = tokens.transitions[row, :count, module].unbind(-1)
                total[row, :count] += (1 - cosine).softmax(0) * growth
        torch.testing.assert_close(carry["transitions"], total)
        if stage.chooses_count:
            assert rows(selection.keep) == [list(range(20)), list(range(9))]


# -- v2drop ------------------------------------------------------------------------------------------------------------


def test_v2drop_schedule_matches_authors() -> None:
    """Cuts keep 288, 144 and 1 of 576 tokens. For other averages, the second cut keeps half of the first."""
    shape = DecoderShape(32, hidden=8, intermediate=16, heads=1, kv_heads=1, head_dim=8)
    context = dict(shape=shape, text_tokens=0, original=[576])
    for keep, first, tolerance in ((0.352, 288, 1), (192 / 576, 267, 1), (128 / 576, 143, 1)):
        for last, min_tokens in (("one", 1), ("withdraw", 0)):
            method = tokenprune.method("v2drop", last=last)
            got = []
            for stage, part in method.stages(Budget(keep=keep), 32):
                (count,) = part.resolve([576], layer=stage.cut_layer, **context)
                got.append((stage.cut_layer, max(stage.min_tokens, stage.resolve_count(576, count))))
            assert [layer for layer, _ in got] == [3, 17, 22]
            assert abs(got[0][1] - first) <= tolerance and abs(got[1][1] - got[0][1] / 2) <= 1
            assert got[2][1] == min_tokens


@torch.no_grad()
def test_v2drop_last_cut_can_withdraw(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, "v2drop", keep=0.5, last="withdraw"):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_per_layer[-1] == 0
    with tokenprune.patched(model, "v2drop", keep=0.5):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_per_layer[-1] == 3  # one token per image


# -- visipruner --------------------------------------------------------------------------------------------------------


def test_visipruner_matches_loop_per_layer() -> None:
    method = tokenprune.method("visipruner", part=0.5)
    stages = [stage for stage, _ in method.stages(Budget(keep=0.6), 32)]
    assert [stage.cut_layer for stage in stages] == list(range(8, 32))
    counts, keep = [20, 13, 1], [12, 8, 1]
    scales = ([0.001, 0.01, 1.0, 0.001, 1.0, 0.001], [0.001] * 6, [0.001, 0.001, 3.0, 0.001, 0.001, 1.0])
    carry: dict[str, Any] = {}
    is_cut, num_calm = [False] * 3, [0] * 3
    for index, stage in enumerate(stages[:6]):
        g = torch.Generator().manual_seed(index)
        scale = torch.tensor([row[index] for row in scales])[:, None, None]
        attention = torch.rand(3, 3, 20, generator=g) * scale
        output = torch.randn(3, 3, 4, generator=g) * 4
        tokens = view(counts, keep, method.needs, seed=index, last_row_attention=attention, last_row_output=output,
                      carry=carry)  # fmt: skip
        got = rows(stage.select(tokens).keep)
        carry = dict(tokens.carry)
        for row, count in enumerate(counts):
            lengths, cosines = naive_parts(attention[row, :, :count], tokens.value_heads[row, :count], output[row])
            num_calm[row] += is_cut[row] and min(cosines) >= 0.999
            want = list(range(count))
            if not is_cut[row] and min(cosines) < 0.995:
                is_cut[row] = True
                want = best(lengths, min(keep[row], max(1, sum(length > 0.5 for length in lengths))))
            assert got[row] == ([] if num_calm[row] >= 2 else want), (index, row)
    assert is_cut[:2] == [True, False] and num_calm[0] == 2


def test_visipruner_unsupported_budgets_are_rejected() -> None:
    for budget in (Budget(average_tokens=9), Budget.from_kv_share(0.5), Budget.from_flops_share(0.5)):
        with pytest.raises(BudgetError, match="Pass an upper bound per image"):
            tokenprune.method("visipruner").stages(budget, 32)


@torch.no_grad()
def test_visipruner_keeps_all_if_vision_does_not_matter(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    want = model(**inputs).logits
    with tokenprune.patched(model, "visipruner", keep=0.5, turns=-1.0):
        assert torch.equal(model(**inputs).logits, want)
