# SPDX-License-Identifier: Apache-2.0
"""tops (stage I), idselection and agilepruner, which start from what the tower attends to, against naive loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from greedy import alone, check_against, cosine_table, image_tokens, next_pick, picked
from tokenprune import OptionError
from tokenprune.methods.pre_llm.agilepruner import effective_rank


def naive_tops(x: Tensor, a: Tensor, keep: int, kept: Any = (), slack: float = 0.0, diversity: float = 0.5,
               coverage: float = 0.5, **_: Any) -> list[int]:  # fmt: skip
    alike = cosine_table(x)
    picks = [next_pick(a, [], kept, slack)]
    while len(picks) < keep:
        left = [i for i in range(len(x)) if i not in set(picks)]
        near = alike[picks].amax(0)
        criteria = (a[left], (1 - near[left]).clamp(min=0), (alike[left][:, left] - near[left]).clamp(min=0).sum(1))
        one, two, three = (c / c.mean() if c.mean() > 0 else 0 * c for c in criteria)
        score = torch.full((len(x),), -math.inf, dtype=torch.float64)
        score[left] = one + diversity * two + coverage * three
        picks.append(next_pick(score, picks, kept, slack))
    return picks


def naive_idselection(x: Tensor, a: Tensor, keep: int, kept: Any = (), slack: float = 0.0, gamma: float = 20.0,
                      **_: Any) -> list[int]:  # fmt: skip
    alike, picks = cosine_table(x), []
    score = (a - a.min()) / (a.max() - a.min())
    for _ in range(keep):
        picks.append(next_pick(score, picks, kept, slack))
        score = score - torch.exp(-gamma * (1 - alike[picks[-1]]) ** 2) * score[picks[-1]]
    return picks


def naive_agilepruner(x: Tensor, a: Tensor, keep: int, average_rank: float = 95.0, limit: float = 0.25,
                      filled: bool = True, **_: Any) -> list[int]:  # fmt: skip
    values = torch.linalg.svdvals(x)
    share = values / values.sum()
    rank = math.exp(-sum(float(p) * math.log(p) for p in share if p > 0))
    order = sorted(range(len(x)), key=lambda i: (-a[i], i))
    alike, gone, picks = cosine_table(x), set(), []
    for place, i in enumerate(order, start=1):
        if i in gone or len(picks) == keep:
            continue
        picks.append(i)
        threshold = min(place * rank / average_rank * 0.01, limit)
        gone |= {j for j in order[place:] if 1 - alike[i, j] < threshold}
    return picks + [i for i in order if i in gone][: keep - len(picks)] * filled


@pytest.mark.parametrize("options", [{}, {"diversity": 2.0, "coverage": 0}, {"coverage": 3, "diversity": 0}], ids=str)
def test_tops_equals_the_naive_loop(options: dict) -> None:
    check_against(lambda **given: naive_tops(**given, **options), "tops", large=not options, slack=1e-4, **options)


@pytest.mark.parametrize("gamma", [20.0, 2.0, 1000.0])
def test_idselection_equals_the_naive_loop(gamma: float) -> None:
    given = {} if gamma == 20 else {"gamma": gamma}
    large = not given
    check_against(lambda **seen: naive_idselection(**seen, gamma=gamma), "idselection", large, slack=1e-4, **given)


AGILE = [{}, {"limit": 0.9}, {"average_rank": 5.0, "limit": 0.6}, {"average_rank": 2.0, "limit": 0.1}, {"limit": 0}]


@pytest.mark.parametrize("options", AGILE, ids=str)
def test_agilepruner_equals_the_naive_loop(options: dict) -> None:
    check_against(lambda **given: naive_agilepruner(**given, **options), "agilepruner", **options)


@pytest.mark.parametrize("name", ["tops", "idselection", "agilepruner"])
def test_invariance(name: str) -> None:
    method, tokens = tokenprune.method(name), image_tokens([40], [12])
    (want,) = picked(method, tokens)
    attention, hidden = tokens.encoder_attention(-1), tokens.hidden
    assert int(attention.mean(1).argmax()) in want
    assert picked(method, image_tokens([40], [1])) == [[int(attention.mean(1).argmax())]]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    moved = {"hidden": hidden[:, order], "encoder_attention": {-1: attention[..., order]}}
    assert sorted(order[picked(method, image_tokens([40], [12], **moved))[0]].tolist()) == want
    assert picked(method, image_tokens([40], [12], hidden=hidden * 8, encoder_attention={-1: attention * 64})) == [want]
    for fewer in (2, 5, 11):
        if name != "agilepruner":  # which fills up
            assert set(picked(method, image_tokens([40], [fewer]))[0]) <= set(want)
    assert picked(method, image_tokens([40], [12], text={"hidden": torch.randn(1, 3, 32)})) == [want]


@pytest.mark.parametrize("name", ["tops", "idselection", "agilepruner"])
def test_duplicates(name: str) -> None:
    """A copy of a pick comes after what differs; an image of one colour, without attention, is no error."""
    method = tokenprune.method(name)
    copies = torch.eye(4, 8).repeat_interleave(3, 0)[None]
    attention = torch.tensor([[[9.0, 9, 9, 7, 7, 7, 5, 5, 5, 3, 3, 3]]])
    assert picked(method, image_tokens([12], [3], hidden=copies, encoder_attention={-1: attention})) == [[0, 3, 6]]
    same = {"hidden": torch.full((1, 9, 8), 0.3), "encoder_attention": {-1: torch.zeros(1, 1, 9)}}
    assert picked(method, image_tokens([9], [4], **same)) == [[0, 1, 2, 3]]


def test_limits_that_leave_attention_alone() -> None:
    tokens = image_tokens([60], [20])
    top = [sorted(tokens.encoder_attention(-1)[0].mean(0).topk(20).indices.tolist())]
    assert picked(tokenprune.method("tops", diversity=0, coverage=0), tokens) == top
    assert picked(tokenprune.method("agilepruner", average_rank=2.0, limit=0), tokens) == top
    assert picked(tokenprune.method("idselection", gamma=1e6), tokens) == top
    (few,), (many,) = (picked(tokenprune.method("agilepruner", average_rank=r), tokens) for r in (5.0, 2000.0))
    assert len(set(few) & set(top[0])) < len(set(many) & set(top[0]))


def test_agilepruner_keeps_a_distance_before_it_fills_up() -> None:
    tokens = image_tokens([60], [20])
    seen = alone(tokens, 0)
    picks = naive_agilepruner(**seen, keep=60, filled=False)
    order = seen["a"].argsort(descending=True).tolist()
    rank = float(effective_rank(tokens.hidden, tokens.mask))
    distance = 1 - cosine_table(seen["x"])
    for n, i in enumerate(picks):
        for j in picks[:n]:
            assert distance[i, j] >= min((order.index(j) + 1) * rank / 95 * 0.01, 0.25)
    assert set(picked(tokenprune.method("agilepruner"), image_tokens([60], [len(picks)]))[0]) == set(picks)


def test_effective_rank() -> None:
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert float(effective_rank(torch.eye(6, 9)[None], mask)) == pytest.approx(6)
    assert float(effective_rank(torch.ones(1, 6, 9), mask)) == pytest.approx(1, abs=1e-4)
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    masks = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    for scale in (1, 100):
        got = effective_rank(x * scale, masks)
        for row, count in enumerate((6, 4)):
            share = torch.linalg.svdvals(x[row, :count].double())
            share = share / share.sum()
            assert float(got[row]) == pytest.approx(float((-(share * share.log()).sum()).exp()), rel=1e-4)
    assert torch.isfinite(effective_rank(torch.zeros(1, 6, 3), mask)).all()


def test_options() -> None:
    wrong = [("tops", {"diversity": -1}), ("tops", {"coverage": math.nan}), ("idselection", {"gamma": -1}),
             ("agilepruner", {"average_rank": 0}), ("agilepruner", {"limit": -0.1})]  # fmt: skip
    for name, options in wrong:
        with pytest.raises(OptionError, match=name):
            tokenprune.method(name, **options)
