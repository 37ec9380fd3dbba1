# SPDX-License-Identifier: Apache-2.0
"""Answers of methods: a wrong selection and a wrong score are refused, what ranks is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import pieces
from each import each
from tests.unit.api.test_registry import first, registry_as_it_was  # noqa: F401 - a fixture that runs by itself
from tokenprune import (
    Pruner,
    Selection,
    Site,
    TokenPruneError,
    VisualTokens,
    register,
)
from zoo import FAMILIES

WRONG = {
    "none": lambda tokens: None,
    "a tensor": lambda tokens: tokens.mask,
    "scores": lambda tokens: Selection(torch.rand(tokens.mask.shape)),
    "shape": lambda tokens: Selection(tokens.mask[:, :-1]),
    "nothing kept": lambda tokens: Selection(torch.zeros_like(tokens.mask)),
    "assign to a dropped token": lambda tokens: Selection(first(tokens), torch.full(tokens.mask.shape, 1)),
    "assign out of range": lambda tokens: Selection(first(tokens), torch.full(tokens.mask.shape, 10_000)),
    "assign below -1": lambda tokens: Selection(first(tokens), torch.full(tokens.mask.shape, -7)),
    "assign shape": lambda tokens: Selection(first(tokens), torch.full((2, 2), 0)),
    "assign type": lambda tokens: Selection(first(tokens), torch.zeros(tokens.mask.shape)),
    "weight shape": lambda tokens: Selection(first(tokens), torch.full(tokens.mask.shape, 0), torch.ones(2, 2)),
    "counts": lambda tokens: Selection(first(tokens), counts=[2] * len(tokens.keep)),
}


@each("case", WRONG)
@torch.no_grad()
def test_invalid_selection_is_rejected(case: str, build) -> None:
    @dataclass(frozen=True)
    class Wrong(Pruner):
        """Select nonsense."""

        def select(self, tokens: VisualTokens) -> Any:
            return WRONG[case](tokens)

    register("wrong", site=Site.PRE_LLM, paper="none")(Wrong)
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs()
    before = model(**inputs).logits
    with tokenprune.patched(model, "wrong", keep=0.3), pytest.raises(TokenPruneError, match="wrong"):
        model(**inputs)
    assert torch.equal(model(**inputs).logits, before)


# What a score must not be, and what the error says of it.
WRONG_SCORES = {
    "none": (lambda tokens: None, "not NoneType"),
    "a list": (lambda tokens: tokens.mask.tolist(), "not list"),
    "one for each image": (lambda tokens: tokens.hidden.mean(dim=(1, 2)), r"not float32 \[2\]"),
    "one for each head": (lambda tokens: tokens.hidden.unflatten(2, (4, -1)).mean(3), r"not float32 \[2, 35, 4\]"),
    "transposed": (lambda tokens: tokens.hidden.mean(2).T, r"not float32 \[35, 2\]"),
    "complex": (lambda tokens: tokens.hidden.mean(2) * 1j, "not complex64"),
    "yes or no": (lambda tokens: tokens.mask, "not bool"),
    "elsewhere": (lambda tokens: tokens.hidden.mean(2).to("meta"), "on meta"),
    "no number": (lambda tokens: tokens.hidden.mean(2) * torch.nan, "NaN"),
    "no number in one image": (lambda tokens: first_is_nan(tokens), "NaN"),
}


def first_is_nan(tokens: VisualTokens) -> Tensor:
    score = tokens.hidden.mean(2)
    score[0, : tokens.counts[0]] = torch.nan  # what is behind is padding
    return score


@each("case", WRONG_SCORES)
@torch.no_grad()
def test_invalid_score_is_rejected(case: str, build) -> None:
    score, says = WRONG_SCORES[case]

    @register("loud", site=Site.PRE_LLM, paper="none")
    @dataclass(frozen=True)
    class Loud(Pruner):
        """Score nonsense."""

        def score(self, tokens: VisualTokens) -> Any:
            return score(tokens)

    family = FAMILIES["llava_next"]
    model, inputs = build(family), family.make_inputs(sizes=[(16, 32), (8, 32)])
    shape = [2, max(max(row) for row in inputs.counts)]
    before = model(**inputs).logits
    with tokenprune.patched(model, "loud", keep=0.3), pytest.raises(TokenPruneError) as error:
        model(**inputs)
    assert f"loud.score() must return a float tensor [S, N] = {shape}" in str(error.value)
    assert re.search(says.replace("35", str(shape[1])), str(error.value))
    assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_some_nan_scores_are_accepted(build) -> None:
    """NaN counts as lowest, also in bfloat16."""

    @register("patchy", site=Site.PRE_LLM, paper="none")
    @dataclass(frozen=True)
    class Patchy(Pruner):
        """Score the last third."""

        def score(self, tokens: VisualTokens) -> Tensor:
            place = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
            return torch.where(place < 24, torch.nan, 1.0).bfloat16()

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, "patchy", keep=12, record=True):
        model(**inputs)
        kept = set(tokenprune.stats(model).cuts[0].kept[0])
    (piece,) = pieces(family, inputs)[0]
    assert kept & set(piece) == set(piece[24:])


@torch.no_grad()
def test_integer_scores_are_accepted(build) -> None:
    class Places(Pruner):
        name = "places"

        def score(self, tokens: VisualTokens) -> Tensor:
            return torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, Places(), keep=12, record=True):
        model(**inputs)
        kept = set(tokenprune.stats(model).cuts[0].kept[0])
    (piece,) = pieces(family, inputs)[0]
    assert kept & set(piece) == set(piece[24:])
