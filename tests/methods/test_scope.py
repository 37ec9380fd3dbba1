# SPDX-License-Identifier: Apache-2.0
"""scope against a naive loop written from its description."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from greedy import alone, check_against, cosine_table, image_tokens, next_pick, picked
from tokenprune import OptionError


def naive(x: Tensor, z: Tensor, a: Tensor, keep: int, kept: Any = (), slack: float = 0.0, alpha: float = 1.0,
          tower: bool = False, t: Any = None) -> list[int]:  # fmt: skip
    alike, picks = cosine_table(z if tower else x), []
    cover = torch.zeros(len(x), dtype=torch.float64)
    for _ in range(keep):
        gain = (alike - cover).clamp(min=0).sum(1) * a**alpha
        picks.append(next_pick(gain, picks, kept, slack))
        cover = torch.maximum(cover, alike[picks[-1]])
    return picks


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, {}), ({"alpha": 0.5, "features": "tower"}, {"alpha": 0.5, "tower": True}), ({"alpha": 0}, {"alpha": 0})],
    ids=str,
)
def test_equals_the_naive_loop(options: dict, more: dict) -> None:
    check_against(lambda **given: naive(**given, **more), "scope", large=not options, **options)


def test_coverage_alone_is_near_the_best_there_is() -> None:
    """alpha = 0: gains do not rise, and the greedy set reaches 1 - 1/e of the best one."""
    method = tokenprune.method("scope", alpha=0)
    for seed in range(4):
        tokens = image_tokens([10], [3], seed=seed)
        alike = cosine_table(tokens.hidden[0].double()).clamp(min=0)

        def covered(of: Any, alike: Tensor = alike) -> float:
            return float(alike[list(of)].amax(0).sum())

        (got,) = picked(method, tokens)
        assert covered(got) >= (1 - 1 / torch.e) * max(covered(of) for of in combinations(range(10), 3))
        order = naive(**alone(tokens, 0), keep=10, alpha=0)
        steps = [covered(order[: i + 1]) - (covered(order[:i]) if i else 0) for i in range(10)]
        assert all(0 <= b <= a + 1e-9 for a, b in pairwise(steps))


def test_invariance() -> None:
    method = tokenprune.method("scope")
    tokens = image_tokens([40], [12])
    (want,) = picked(method, tokens)
    hidden, attention = tokens.hidden, tokens.encoder_attention(-1)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))[0]
    scale = 2.0 ** torch.randint(-3, 4, (1, 40, 1))
    for change in ({"hidden": hidden * scale}, {"hidden": hidden @ turn}, {"encoder_attention": {-1: attention * 64}}):
        assert picked(method, image_tokens([40], [12], **change)) == [want]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    moved = {"hidden": hidden[:, order], "encoder_attention": {-1: attention[..., order]}}
    (got,) = picked(method, image_tokens([40], [12], **moved))
    assert sorted(order[got].tolist()) == want
    for fewer in range(1, 12):
        assert set(picked(method, image_tokens([40], [fewer]))[0]) <= set(want)


def test_the_first_pick() -> None:
    tokens = image_tokens([50], [1])
    seen = alone(tokens, 0)
    gain = cosine_table(seen["x"]).clamp(min=0).sum(1) * seen["a"]
    assert picked(tokenprune.method("scope"), tokens) == [[int(gain.argmax())]]


def test_where_nothing_is_left_to_gain_the_first_ones_are_taken() -> None:
    method = tokenprune.method("scope")
    same = torch.ones(1, 9, 8)
    assert picked(method, image_tokens([9], [4], hidden=same, encoder_attention={-1: torch.ones(1, 1, 9)})) == [
        [0, 1, 2, 3]
    ]
    # What is no patch has no attention, and is taken last, whatever it would cover.
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


def test_options() -> None:
    assert tokenprune.method("scope").needs == {"encoder_attention"}
    assert tokenprune.method("scope", features="tower").needs == {"encoder_attention", "encoder_features"}
    for wrong in ({"alpha": -1}, {"alpha": "1"}, {"features": "encoder"}):
        with pytest.raises(OptionError, match="scope"):
            tokenprune.method("scope", **wrong)
