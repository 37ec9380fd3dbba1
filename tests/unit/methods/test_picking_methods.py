# SPDX-License-Identifier: Apache-2.0
"""Methods that pick tokens one by one: behavior that their loops in naive/ do not cover."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import tokenprune
from greedy import alone, image_tokens, picked
from tests.unit.methods.naive.eadp import naive as naive_eadp
from tests.unit.methods.naive.eadp import naive_blur
from tests.unit.methods.naive.mmtok import naive as naive_mmtok
from tests.unit.methods.naive.mmtok import table
from tests.unit.methods.naive.otprune import kernel_of
from tokenprune.kernels.pairs import Products
from tokenprune.methods.pre_llm.eadp import smooth_on_grid
from tokenprune.methods.pre_llm.mmtok import build_softmax_relation

# -- eadp --------------------------------------------------------------------------------------------------------------


def test_eadp_coverage_of_opposite_and_orthogonal_tokens() -> None:
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        hidden, text = torch.randn(1, 40, 4, generator=g), {"hidden": torch.randn(1, 3, 4, generator=g)}
        for keep in (1, 2, 4):
            tokens = image_tokens([40], [keep], hidden=hidden, text=text)
            (got,) = picked(tokenprune.method("eadp"), tokens)
            assert got == sorted(naive_eadp(**alone(tokens, 0), keep=keep, kept=got, slack=1e-4))


def test_eadp_smoothing_follows_the_grid() -> None:
    tokens = image_tokens([63, 40], [9, 6], grids=[(1, 7, 9), None])
    got = picked(tokenprune.method("eadp"), tokens)
    for row, grid in enumerate([(7, 9), None]):
        assert got[row] == sorted(
            naive_eadp(**alone(tokens, row), keep=len(got[row]), kept=got[row], slack=1e-3, grid=grid)
        )
    plain = tokenprune.method("eadp", smooth=False)
    assert picked(plain, tokens) == picked(tokenprune.method("eadp"), image_tokens([63, 40], [9, 6])) != got


def test_eadp_smoothing_equals_a_reflected_gaussian() -> None:
    tokens = image_tokens([24, 30, 9], [1, 1, 1], grids=[(2, 3, 4), (1, 5, 6), (1, 1, 9)])
    score = torch.rand(3, 30, generator=torch.Generator().manual_seed(0))
    got = smooth_on_grid(score, tokens)
    frames = torch.cat([naive_blur(frame.double()).flatten() for frame in score[0, :24].view(2, 3, 4)])
    assert torch.allclose(got[0, :24].double(), frames, atol=1e-6) and torch.equal(got[0, 24:], score[0, 24:])
    assert torch.allclose(got[1].double(), naive_blur(score[1].double().view(5, 6)).flatten(), atol=1e-6)
    assert torch.equal(got[2], score[2])  # one row cannot be reflected
    assert torch.allclose(smooth_on_grid(torch.full((3, 30), 0.3), tokens), torch.tensor(0.3))


def test_eadp_without_text_all_tokens_have_equal_weight() -> None:
    method, tokens = tokenprune.method("eadp"), image_tokens([50], [9])
    want = [sorted(naive_eadp(**alone(tokens, 0) | {"t": torch.zeros(0, 32)}, keep=9))]
    for words in (0, 3):
        silent = {"hidden": torch.randn(1, words, 32), "mask": torch.zeros(1, words, dtype=torch.bool)}
        assert picked(method, image_tokens([50], [9], text=silent)) == want
    assert picked(tokenprune.method("eadp", beta=0), tokens) == want != picked(method, tokens)


# -- mmtok -------------------------------------------------------------------------------------------------------------


def test_mmtok_without_the_question() -> None:
    tokens = image_tokens([50], [9])
    no_text = alone(tokens, 0) | {"t": torch.zeros(0, 32, dtype=torch.float64)}
    want = [sorted(naive_mmtok(**no_text, keep=9))]
    method = tokenprune.method("mmtok", question=False)
    assert picked(method, tokens) == want and not method.query_aware and method.prefix_cache_safe
    silent = {"hidden": torch.randn(1, 3, 32), "mask": torch.zeros(1, 3, dtype=torch.bool)}
    assert picked(tokenprune.method("mmtok"), image_tokens([50], [9], text=silent)) == want
    assert picked(tokenprune.method("mmtok", alpha=1e6), tokens) == want != picked(tokenprune.method("mmtok"), tokens)


def test_mmtok_with_text_only_each_pick_covers_one_more_word() -> None:
    tokens = image_tokens([50], [4])
    words = alone(tokens, 0)["t"]
    (got,) = picked(tokenprune.method("mmtok", alpha=0), tokens)
    best = table(**{k: v for k, v in alone(tokens, 0).items() if k != "a"}, alpha=0)[: len(words)].argmax(1).tolist()
    assert len(set(best)) >= 4 and set(got) <= set(best)


def test_mmtok_rows_sum_to_their_weight_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 3, generator=g), torch.randn(2, 6, 3, generator=g)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    rows = torch.arange(5) < torch.tensor([[2], [5]])
    want = (a @ b.transpose(1, 2) / 0.3).masked_fill(~mask[:, None], -math.inf).softmax(2)
    want = want.masked_fill(~rows[:, :, None], 0) * 0.7 / rows.sum(1)[:, None, None]
    for fits in (True, False):
        monkeypatch.setattr(Products, "fits_in_memory", fits)
        got = build_softmax_relation(Products(a, b), 0.3, 0.7, mask, rows)
        for segment, count in enumerate((6, 4)):
            actual = got.rows(segment, torch.arange(5))
            assert torch.allclose(actual[:, :count], want[segment, :, :count], atol=1e-6)
            assert not actual[~rows[segment]].any()
            for column in range(count):
                assert torch.allclose(got.column(segment, column), actual[:, column])


# -- otprune -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [6, 30])  # fewer and more channels than tokens
def test_otprune_each_pick_maximizes_the_determinant(width: int) -> None:
    hidden = torch.randn(1, 10, width, generator=torch.Generator().manual_seed(width))
    kernel, picks, gains = kernel_of(hidden[0].double(), 5.0), [], []
    for _ in range(5):
        value = {i: float(torch.logdet(kernel[[*picks, i]][:, [*picks, i]])) for i in range(10) if i not in picks}
        picks.append(max(value, key=value.get))
        gains.append(max(value.values()) - sum(gains))
    assert picked(tokenprune.method("otprune", gamma=5.0), image_tokens([10], [5], hidden=hidden)) == [sorted(picks)]
    assert all(a + 1e-9 >= b >= 0 for a, b in pairwise(gains))


def test_otprune_small_gamma_and_zero_channels() -> None:
    method, tokens = tokenprune.method("otprune"), image_tokens([40], [12])
    kernel = kernel_of(alone(tokens, 0)["x"])
    top = sorted(kernel.diagonal().topk(12).indices.tolist())
    assert picked(tokenprune.method("otprune", gamma=1e-7), tokens) == [top]
    blank = tokens.hidden.clone()
    blank[..., 5] = 0
    assert picked(method, image_tokens([40], [12], hidden=blank))
    assert picked(method, image_tokens([9], [4], hidden=torch.zeros(1, 9, 8))) == [[0, 1, 2, 3]]


# -- resprune ----------------------------------------------------------------------------------------------------------


def test_resprune_copies_come_last_and_alpha_0_ignores_the_text() -> None:
    tokens = image_tokens([20], [10])
    x = tokens.hidden.clone()
    x[0, 10:] = x[0, :10]
    words = tokens.text.hidden
    for options in ({}, {"alpha": 0}, {"unit": True}):
        (got,) = picked(tokenprune.method("resprune", **options), image_tokens([20], [10], hidden=x))
        assert sorted(i % 10 for i in got) == list(range(10))
    method = tokenprune.method("resprune", alpha=0)
    other = image_tokens([20], [10], text={"hidden": words.flip(2)})
    assert picked(method, other) == picked(method, tokens) and method.prefix_cache_safe
    assert picked(tokenprune.method("resprune"), other) != picked(tokenprune.method("resprune"), tokens)


def test_resprune_extreme_norms_and_nonfinite_tokens() -> None:
    """Very long, very short, zero and NaN tokens: the count is exact, and NaN tokens are never kept."""
    tokens = image_tokens([20], [10])
    (want,) = picked(tokenprune.method("resprune"), tokens)
    for factor in (2.0**40, 2.0**-40):
        assert picked(tokenprune.method("resprune"), image_tokens([20], [10], hidden=tokens.hidden * factor)) == [want]
    picked(tokenprune.method("resprune"), image_tokens([20], [10], hidden=tokens.hidden * 0))
    x = tokens.hidden.clone()
    x[0, want[0]] = torch.nan
    assert want[0] not in picked(tokenprune.method("resprune"), image_tokens([20], [10], hidden=x))[0]


# -- scope -------------------------------------------------------------------------------------------------------------


def test_scope_zero_gain_picks_the_first_tokens() -> None:
    method = tokenprune.method("scope")
    same = torch.ones(1, 9, 8)
    assert picked(method, image_tokens([9], [4], hidden=same, encoder_attention={-1: torch.ones(1, 1, 9)})) == [
        [0, 1, 2, 3]
    ]
    # Tokens that are not patches have zero attention and are picked last.
    attention = torch.ones(1, 1, 6)
    attention[..., [0, 3]] = 0
    hidden = torch.eye(6, 8)[None]
    assert picked(method, image_tokens([6], [4], hidden=hidden, encoder_attention={-1: attention})) == [[1, 2, 4, 5]]
    assert picked(method, image_tokens([6], [5], hidden=hidden, encoder_attention={-1: attention})) == [[0, 1, 2, 4, 5]]
    duplicates = torch.eye(4, 8).repeat_interleave(2, 0)[None]
    attention = torch.tensor([[[1.0, 2, 3, 4, 8, 7, 6, 5]]])
    assert picked(method, image_tokens([8], [4], hidden=duplicates, encoder_attention={-1: attention})) == [
        [1, 3, 4, 6]
    ]
