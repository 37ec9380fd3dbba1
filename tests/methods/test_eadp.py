# SPDX-License-Identifier: Apache-2.0
"""eadp against a naive loop written from its description."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from greedy import alone, check_against, cosine_table, image_tokens, next_pick, picked, unit
from tokenprune import OptionError
from tokenprune.methods.pre_llm.eadp import smoothed


def naive_weight(x: Tensor, t: Tensor, alpha: float = 0.5, beta: float = 2.0, share: float = 0.2, sign: int = -1,
                 grid: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
    alike = sign * unit(x) @ unit(t).T
    entropy = []
    for word in range(len(t)):
        p = torch.softmax(100 * alike[:, word], 0)
        entropy.append(float(-(p * (p + 1e-12).log()).sum()))
    telling = sorted(range(len(t)), key=lambda j: (entropy[j], j))[: max(1, int(share * len(t)))]
    weight = torch.softmax(torch.tensor([-entropy[j] / (0.01 + 1e-6) for j in telling], dtype=torch.float64), 0)
    local = sum(w * alike[:, j] for w, j in zip(weight, telling, strict=True))
    score = alpha * sign * unit(x) @ unit(t.mean(0)) + (1 - alpha) * local
    score = (score - score.min() + 1e-6) / (score.max() - score.min() + 1e-6)
    if grid:
        score = naive_blur(score.view(grid)).flatten()
    return score**beta


def naive_blur(cells: Tensor) -> Tensor:
    height, width = cells.shape
    out = torch.zeros_like(cells)
    for row in range(height):
        for column in range(width):
            total = weights = 0.0
            for a in (-1, 0, 1):
                for b in (-1, 0, 1):
                    r, c = abs(row + a), abs(column + b)
                    r, c = min(r, 2 * (height - 1) - r), min(c, 2 * (width - 1) - c)
                    bell = math.exp(-(a * a + b * b) / 2)
                    total, weights = total + bell * float(cells[r, c]), weights + bell
            out[row, column] = total / weights
    return out


def naive(x: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, z: Any = None, a: Any = None,
          **more: Any) -> list[int]:  # fmt: skip
    weight = naive_weight(x, t, **more) if len(t) else torch.ones(len(x))
    alike, picks = (cosine_table(x) + 1) / 2, []
    cover = torch.zeros(len(x), dtype=torch.float64)
    for _ in range(keep):
        picks.append(next_pick((weight * (alike - cover).clamp(min=0)).sum(1), picks, kept, slack))
        cover = torch.maximum(cover, alike[picks[-1]])
    return picks


@pytest.mark.parametrize("options", [{}, {"sign": 1, "share": 0.5}, {"alpha": 0, "beta": 1}, {"alpha": 1}], ids=str)
def test_equals_the_naive_loop(options: dict) -> None:
    check_against(lambda **given: naive(**given, **options), "eadp", large=not options, slack=1e-3, **options)


def test_opposites_cover_nothing_and_what_stands_across_a_half() -> None:
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        hidden, text = torch.randn(1, 40, 4, generator=g), {"hidden": torch.randn(1, 3, 4, generator=g)}
        for keep in (1, 2, 4):
            tokens = image_tokens([40], [keep], hidden=hidden, text=text)
            (got,) = picked(tokenprune.method("eadp"), tokens)
            assert got == sorted(naive(**alone(tokens, 0), keep=keep, kept=got, slack=1e-4))


def test_on_a_grid() -> None:
    tokens = image_tokens([63, 40], [9, 6], grids=[(1, 7, 9), None])
    got = picked(tokenprune.method("eadp"), tokens)
    for row, grid in enumerate([(7, 9), None]):
        assert got[row] == sorted(naive(**alone(tokens, row), keep=len(got[row]), kept=got[row], slack=1e-3, grid=grid))
    plain = tokenprune.method("eadp", smooth=False)
    assert picked(plain, tokens) == picked(tokenprune.method("eadp"), image_tokens([63, 40], [9, 6])) != got


def test_smoothing() -> None:
    tokens = image_tokens([24, 30, 9], [1, 1, 1], grids=[(2, 3, 4), (1, 5, 6), (1, 1, 9)])
    score = torch.rand(3, 30, generator=torch.Generator().manual_seed(0))
    got = smoothed(score, tokens)
    frames = torch.cat([naive_blur(frame.double()).flatten() for frame in score[0, :24].view(2, 3, 4)])
    assert torch.allclose(got[0, :24].double(), frames, atol=1e-6) and torch.equal(got[0, 24:], score[0, 24:])
    assert torch.allclose(got[1].double(), naive_blur(score[1].double().view(5, 6)).flatten(), atol=1e-6)
    assert torch.equal(got[2], score[2])  # one row has nothing to mirror
    assert torch.allclose(smoothed(torch.full((3, 30), 0.3), tokens), torch.tensor(0.3))


def test_without_text_all_tokens_count_alike() -> None:
    method, tokens = tokenprune.method("eadp"), image_tokens([50], [9])
    want = [sorted(naive(**alone(tokens, 0) | {"t": torch.zeros(0, 32)}, keep=9))]
    for words in (0, 3):
        silent = {"hidden": torch.randn(1, words, 32), "mask": torch.zeros(1, words, dtype=torch.bool)}
        assert picked(method, image_tokens([50], [9], text=silent)) == want
    assert picked(tokenprune.method("eadp", beta=0), tokens) == want != picked(method, tokens)


def test_words_that_say_nothing_of_the_image_are_not_telling() -> None:
    """A word that is as alike to all tokens changes the mean of the text alone."""
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


def test_invariance() -> None:
    method, tokens = tokenprune.method("eadp"), image_tokens([40], [12])
    (want,) = picked(method, tokens)
    scale = 2.0 ** torch.randint(-3, 4, (1, 40, 1), generator=torch.Generator().manual_seed(3))
    assert picked(method, image_tokens([40], [12], hidden=tokens.hidden * scale)) == [want]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    (got,) = picked(method, image_tokens([40], [12], hidden=tokens.hidden[:, order]))
    assert sorted(order[got].tolist()) == want
    for fewer in (1, 5, 11):
        assert set(picked(method, image_tokens([40], [fewer]))[0]) <= set(want)
    assert method.query_aware and not method.prefix_cache_safe


def test_options() -> None:
    for wrong in ({"alpha": 2}, {"beta": -1}, {"share": 0}, {"sign": 2}, {"smooth": 1}):
        with pytest.raises(OptionError, match="eadp"):
            tokenprune.method("eadp", **wrong)
