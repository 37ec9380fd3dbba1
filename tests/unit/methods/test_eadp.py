# SPDX-License-Identifier: Apache-2.0
"""eadp against a naive loop written from its description."""

from __future__ import annotations

import torch

import tokenprune
from greedy import alone, image_tokens, picked
from tests.unit.methods.naive.eadp import naive, naive_blur
from tokenprune.methods.pre_llm.eadp import smooth_on_grid


def test_coverage_of_opposite_and_orthogonal_tokens() -> None:
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        hidden, text = torch.randn(1, 40, 4, generator=g), {"hidden": torch.randn(1, 3, 4, generator=g)}
        for keep in (1, 2, 4):
            tokens = image_tokens([40], [keep], hidden=hidden, text=text)
            (got,) = picked(tokenprune.method("eadp"), tokens)
            assert got == sorted(naive(**alone(tokens, 0), keep=keep, kept=got, slack=1e-4))


def test_smoothing_follows_the_grid() -> None:
    tokens = image_tokens([63, 40], [9, 6], grids=[(1, 7, 9), None])
    got = picked(tokenprune.method("eadp"), tokens)
    for row, grid in enumerate([(7, 9), None]):
        assert got[row] == sorted(naive(**alone(tokens, row), keep=len(got[row]), kept=got[row], slack=1e-3, grid=grid))
    plain = tokenprune.method("eadp", smooth=False)
    assert picked(plain, tokens) == picked(tokenprune.method("eadp"), image_tokens([63, 40], [9, 6])) != got


def test_smoothing_equals_a_reflected_gaussian() -> None:
    tokens = image_tokens([24, 30, 9], [1, 1, 1], grids=[(2, 3, 4), (1, 5, 6), (1, 1, 9)])
    score = torch.rand(3, 30, generator=torch.Generator().manual_seed(0))
    got = smooth_on_grid(score, tokens)
    frames = torch.cat([naive_blur(frame.double()).flatten() for frame in score[0, :24].view(2, 3, 4)])
    assert torch.allclose(got[0, :24].double(), frames, atol=1e-6) and torch.equal(got[0, 24:], score[0, 24:])
    assert torch.allclose(got[1].double(), naive_blur(score[1].double().view(5, 6)).flatten(), atol=1e-6)
    assert torch.equal(got[2], score[2])  # one row cannot be reflected
    assert torch.allclose(smooth_on_grid(torch.full((3, 30), 0.3), tokens), torch.tensor(0.3))


def test_without_text_all_tokens_have_equal_weight() -> None:
    method, tokens = tokenprune.method("eadp"), image_tokens([50], [9])
    want = [sorted(naive(**alone(tokens, 0) | {"t": torch.zeros(0, 32)}, keep=9))]
    for words in (0, 3):
        silent = {"hidden": torch.randn(1, words, 32), "mask": torch.zeros(1, words, dtype=torch.bool)}
        assert picked(method, image_tokens([50], [9], text=silent)) == want
    assert picked(tokenprune.method("eadp", beta=0), tokens) == want != picked(method, tokens)


def test_uniform_words_are_not_selected() -> None:
    """A word with equal similarity to all tokens changes only the mean of the text."""
    tokens = image_tokens([50], [9], hidden=torch.nn.functional.pad(image_tokens([50], [9]).hidden, (0, 1)))
    words = torch.nn.functional.pad(torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1)), (0, 1))
    blank = torch.zeros(1, 1, 33)
    blank[..., -1] = 2.0
    method = tokenprune.method("eadp", alpha=0)
    want = picked(method, image_tokens([50], [9], hidden=tokens.hidden, text={"hidden": words}))
    more = torch.cat([words[:, :4], blank, words[:, 4:]], dim=1)
    assert picked(method, image_tokens([50], [9], hidden=tokens.hidden, text={"hidden": more[:, :9]})) == picked(
        method, image_tokens([50], [9], hidden=tokens.hidden, text={"hidden": words[:, :8]})
    )
    assert want


def test_query_aware() -> None:
    method = tokenprune.method("eadp")
    assert method.query_aware and not method.prefix_cache_safe
