# SPDX-License-Identifier: Apache-2.0
"""cdpruner, and Cen-Prune on it and on divprune, against naive loops written from their descriptions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from greedy import alone, check_against, cosine_table, image_tokens, next_pick, picked, unit
from tokenprune import OptionError
from tokenprune.methods.centering import centred
from tokenprune.methods.scores import stretched


def naive_centred(x: Tensor, z: Tensor, center: Any) -> tuple[Tensor, Tensor]:
    """Cosines without the mean, and how distinct each token is."""
    x = z if center == "tower" else x
    if center in ("tower", "standardised"):
        x = x / (x.var(0, unbiased=False) + 1e-6).sqrt()
    alike, count = cosine_table(x), len(x)
    others = [[float(alike[i, j]) for j in range(count) if j != i] for i in range(count)]
    distinct = torch.tensor([-sum(one) / max(1, count - 1) for one in others])
    if center is True:
        distinct = (distinct - distinct.min()) / (distinct.max() - distinct.min())
    else:
        distinct = 1 / (1 + torch.exp(-(distinct - distinct.mean()) / (distinct.std(unbiased=False) + 1e-6)))
    return cosine_table(x - x.mean(0)), distinct.double()


def naive_relevance(x: Tensor, t: Tensor, sign: int, theta: float) -> Tensor:
    relevant = torch.stack([sign * sum(unit(one) @ unit(word) for word in t) / len(t) for one in x])
    relevant = (relevant - relevant.min() + 1e-6) / (relevant.max() - relevant.min())
    return relevant if theta == 1 else torch.exp(theta / (2 * (1 - theta)) * relevant)


def naive(x: Tensor, z: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, sign: int = 1,
          theta: float = 0.5, center: Any = False, a: Any = None) -> list[int]:  # fmt: skip
    alike, weight = cosine_table(x), naive_relevance(x, t, sign, theta)
    if center:
        alike, distinct = naive_centred(x, z, center)
        weight = weight * distinct
    kernel = weight[:, None] * alike * weight
    left, rows, picks = kernel.diagonal().clone(), [], []
    for _ in range(keep):
        j = next_pick(torch.where(left > 1e-5 * kernel.diagonal(), left, -1 / (1e-30 + weight)), picks, kept, slack)
        if left[j] > 1e-5 * kernel[j, j]:
            told = torch.stack([row[j] * row for row in rows]).sum(0) if rows else 0
            rows.append((kernel[j] - told) / left[j].sqrt())
            left = left - rows[-1] ** 2
        picks.append(j)
    return picks


def naive_cen_divprune(
    x: Tensor, z: Tensor, keep: int, center: Any, kept: Any = (), slack: float = 0.0, **_: Any
) -> list[int]:
    alike, distinct = naive_centred(x, z, center)
    distance = 1 - alike
    others = distance.clone().fill_diagonal_(torch.inf)
    picks = [next_pick(others.amin(0), [], kept, slack)]
    while len(picks) < keep:
        picks.append(next_pick(distinct * distance[picks].amin(0), picks, kept, slack))
    return picks


@pytest.mark.parametrize("center", [True, "standardised"])
def test_a_token_that_equals_the_mean_points_nowhere(center: Any) -> None:
    """What is left of it is rounding, and no direction; so is what is not finite."""
    x = torch.randn(1, 37, 8, generator=torch.Generator().manual_seed(0)) + 100
    x[:, -1] = x[:, :-1].mean(1)
    assert not centred(image_tokens([37], [4], hidden=x), center)[0][0, -1].any()
    x[:, 5] = math.nan
    left, distinct = centred(image_tokens([37], [4], hidden=x), center)
    assert not left[0, 5].any() and left[0, :5].any(1).all() and left.isfinite().all() and distinct.isfinite().all()


def test_stretched() -> None:
    mask = torch.tensor([[True] * 3 + [False]] * 3)
    score = torch.tensor([[2.0, 4.0, 3.0, 99.0], [0.5, 0.5 + 1e-7, 0.5, 9.0], [0.0, 0.0, 0.0, -1.0]])
    got = stretched(score, mask, above=0.2)
    assert got[0].tolist() == pytest.approx([0.1, 1.1, 0.6, 0.0]) and got[1:].tolist() == [[1.0, 1.0, 1.0, 0.0]] * 2


CASES = [
    {},
    {"theta": 1.0, "sign": -1},
    {"center": True, "theta": 1.0},
    {"center": "standardised"},
    {"center": "tower"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_equals_the_naive_loop(options: dict) -> None:
    check_against(lambda **given: naive(**given, **options), "cdpruner", large=not options, slack=1e-3, **options)


@pytest.mark.parametrize("center", [True, "standardised", "tower"])
def test_centred_divprune_equals_the_naive_loop(center: Any) -> None:
    check_against(lambda **given: naive_cen_divprune(**given, center=center), "divprune", slack=1e-4, center=center)


def test_the_greedy_choice_raises_the_determinant_most() -> None:
    """Equal to logarithms of determinants, computed anew for every candidate."""
    tokens = image_tokens([11], [5])
    seen = alone(tokens, 0)
    weight = naive_relevance(seen["x"], seen["t"], 1, 0.5)
    kernel, picks = weight[:, None] * cosine_table(seen["x"]) * weight, []
    for _ in range(5):
        gain = {i: float(torch.logdet(kernel[[*picks, i]][:, [*picks, i]])) for i in range(11) if i not in picks}
        picks.append(max(gain, key=gain.get))
    assert picked(tokenprune.method("cdpruner"), tokens) == [sorted(picks)]


@pytest.mark.parametrize("name", ["cdpruner", "divprune"])
@pytest.mark.parametrize("center", [False, True])
def test_invariance(name: str, center: bool) -> None:
    method = tokenprune.method(name, center=center)
    tokens = image_tokens([40], [12])
    (want,) = picked(method, tokens)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    (got,) = picked(method, image_tokens([40], [12], hidden=tokens.hidden[:, order]))
    assert sorted(order[got].tolist()) == want
    for fewer in (1, 5, 11):
        assert set(picked(method, image_tokens([40], [fewer]))[0]) <= set(want)
    scale = 2.0 ** torch.randint(-3, 4, (1, 40, 1), generator=torch.Generator().manual_seed(3))
    # Tokens of other lengths have another mean; without it only directions count.
    assert (picked(method, image_tokens([40], [12], hidden=tokens.hidden * scale)) == [want]) is not center
    assert picked(method, image_tokens([40], [12], hidden=tokens.hidden * 4)) == [want]
    if center:
        features = 2.0 ** torch.randint(-3, 4, (1, 1, 32), generator=torch.Generator().manual_seed(4)) * 1e3
        standardised = tokenprune.method(name, center="standardised")
        text = {"hidden": torch.zeros(1, 1, 32)}
        assert picked(standardised, image_tokens([40], [12], hidden=tokens.hidden * 1e3, text=text)) == picked(
            standardised, image_tokens([40], [12], hidden=tokens.hidden * features, text=text)
        )


def test_the_text_is_heard_and_can_be_left_out() -> None:
    method = tokenprune.method("cdpruner", theta=1.0)
    tokens = image_tokens([40], [6])
    text = {"hidden": tokens.hidden[:, [7]] + 0.1, "mask": torch.ones(1, 1, dtype=torch.bool)}
    assert 7 in picked(method, image_tokens([40], [6], text=text))[0]
    away = tokenprune.method("cdpruner", theta=1.0, sign=-1)
    assert 7 not in picked(away, image_tokens([40], [6], text=text))[0]
    (plain,) = picked(tokenprune.method("cdpruner", theta=0), tokens)
    assert picked(tokenprune.method("cdpruner", theta=0), image_tokens([40], [6], text=text)) == [plain]
    # No text, or one that says the same of all: all tokens count alike.
    for none in (torch.zeros(1, 2, dtype=torch.bool), torch.zeros(1, 0, dtype=torch.bool)):
        silent = {"hidden": torch.randn(1, none.shape[1], 32), "mask": none}
        assert picked(method, image_tokens([40], [6], text=silent)) == [plain]
    assert tokenprune.method("cdpruner").query_aware and not tokenprune.method("cdpruner", theta=0).query_aware


@pytest.mark.parametrize("name", ["cdpruner", "divprune"])
@pytest.mark.parametrize("center", [False, True, "standardised"])
def test_duplicates(name: str, center: Any) -> None:
    """What differs comes first; more than there are directions, and images of one colour, are no error."""
    method = tokenprune.method(name, center=center)
    text = {"hidden": torch.zeros(1, 1, 8)}
    distinct = torch.eye(5, 8).repeat_interleave(4, 0)[None]
    for keep in (1, 4, 5, 9, 20):
        (got,) = picked(method, image_tokens([20], [keep], hidden=distinct, text=text))
        if center is False:
            assert len({i // 4 for i in got}) == min(keep, 5)
    for same in (torch.full((1, 9, 8), 0.3), torch.zeros(1, 9, 8)):
        assert picked(method, image_tokens([9], [4], hidden=same, text=text)) == [[0, 1, 2, 3]]


def test_the_first_pick_of_centred_divprune_is_not_weighed() -> None:
    for seed in range(5):
        tokens = image_tokens([30], [1], seed=seed)
        alike, _ = naive_centred(tokens.hidden[0].double(), None, True)
        nearest = (1 - alike).fill_diagonal_(torch.inf).amin(0)
        assert picked(tokenprune.method("divprune", center=True), tokens) == [[int(nearest.argmax())]]


def test_options() -> None:
    for name in ("cdpruner", "divprune"):
        assert tokenprune.method(name, center="tower").needs == {"encoder_features"}
        assert not tokenprune.method(name, center=True).needs
        with pytest.raises(OptionError, match="center"):
            tokenprune.method(name, center="yes")
    for wrong in ({"sign": 0}, {"sign": True}, {"theta": 1.5}, {"theta": math.nan}):
        with pytest.raises(OptionError, match="cdpruner"):
            tokenprune.method("cdpruner", **wrong)
