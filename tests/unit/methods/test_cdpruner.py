# SPDX-License-Identifier: Apache-2.0
"""cdpruner and divprune, with and without Cen-Prune: behavior that their loops in naive/ do not cover."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tokenprune
from each import each
from greedy import alone, cosine_table, image_tokens, picked
from tests.unit.methods.naive.cdpruner import naive_relevance
from tokenprune.methods.scores import center_tokens, rescale


@pytest.mark.parametrize("center", [True, "standardised"])
def test_tokens_equal_to_the_mean_become_zero(center: Any) -> None:
    """Their difference to the mean is a rounding error. Tokens that are not finite become zero, too."""
    x = torch.randn(1, 37, 8, generator=torch.Generator().manual_seed(0)) + 100
    x[:, -1] = x[:, :-1].mean(1)
    assert not center_tokens(image_tokens([37], [4], hidden=x), center)[0][0, -1].any()
    x[:, 5] = math.nan
    centered, distinct = center_tokens(image_tokens([37], [4], hidden=x), center)
    assert (
        not centered[0, 5].any()
        and centered[0, :5].any(1).all()
        and centered.isfinite().all()
        and distinct.isfinite().all()
    )


def test_rescale() -> None:
    mask = torch.tensor([[True] * 3 + [False]] * 3)
    score = torch.tensor([[2.0, 4.0, 3.0, 99.0], [0.5, 0.5 + 1e-7, 0.5, 9.0], [0.0, 0.0, 0.0, -1.0]])
    got = rescale(score, mask, above=0.2)
    assert got[0].tolist() == pytest.approx([0.1, 1.1, 0.6, 0.0]) and got[1:].tolist() == [[1.0, 1.0, 1.0, 0.0]] * 2


def test_each_pick_maximizes_the_determinant() -> None:
    """Compare with log-determinants that are recomputed for each candidate."""
    tokens = image_tokens([11], [5])
    inputs = alone(tokens, 0)
    weight = naive_relevance(inputs["x"], inputs["t"], 1, 0.5)
    kernel, picks = weight[:, None] * cosine_table(inputs["x"]) * weight, []
    for _ in range(5):
        gain = {i: float(torch.logdet(kernel[[*picks, i]][:, [*picks, i]])) for i in range(11) if i not in picks}
        picks.append(max(gain, key=gain.get))
    assert picked(tokenprune.method("cdpruner"), tokens) == [sorted(picks)]


def test_text_changes_the_choice_unless_theta_is_0() -> None:
    method = tokenprune.method("cdpruner", theta=1.0)
    tokens = image_tokens([40], [6])
    text = {"hidden": tokens.hidden[:, [7]] + 0.1, "mask": torch.ones(1, 1, dtype=torch.bool)}
    assert 7 in picked(method, image_tokens([40], [6], text=text))[0]
    dissimilar = tokenprune.method("cdpruner", theta=1.0, sign=-1)
    assert 7 not in picked(dissimilar, image_tokens([40], [6], text=text))[0]
    (plain,) = picked(tokenprune.method("cdpruner", theta=0), tokens)
    assert picked(tokenprune.method("cdpruner", theta=0), image_tokens([40], [6], text=text)) == [plain]
    # Without text, or with uniform relevance, all tokens have equal weight.
    for mask in (torch.zeros(1, 2, dtype=torch.bool), torch.zeros(1, 0, dtype=torch.bool)):
        silent = {"hidden": torch.randn(1, mask.shape[1], 32), "mask": mask}
        assert picked(method, image_tokens([40], [6], text=silent)) == [plain]
    assert tokenprune.method("cdpruner").query_aware and not tokenprune.method("cdpruner", theta=0).query_aware


@each("name", ["cdpruner", "divprune"])
@each("center", [False, True, "standardised"])
def test_duplicates_come_last(name: str, center: Any) -> None:
    method = tokenprune.method(name, center=center)
    text = {"hidden": torch.zeros(1, 1, 8)}
    distinct = torch.eye(5, 8).repeat_interleave(4, 0)[None]
    for keep in (1, 4, 5, 9, 20):
        (got,) = picked(method, image_tokens([20], [keep], hidden=distinct, text=text))
        if center is False:
            assert len({i // 4 for i in got}) == min(keep, 5)
    for same in (torch.full((1, 9, 8), 0.3), torch.zeros(1, 9, 8)):
        assert picked(method, image_tokens([9], [4], hidden=same, text=text)) == [[0, 1, 2, 3]]


def test_needs_follow_the_options() -> None:
    for name in ("cdpruner", "divprune"):
        assert tokenprune.method(name, center="tower").needs == {"encoder_features"}
        assert not tokenprune.method(name, center=True).needs
