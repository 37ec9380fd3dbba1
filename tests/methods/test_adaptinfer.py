# SPDX-License-Identifier: Apache-2.0
"""adaptinfer against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from several_cuts import Arrived, best, check_in_model, rows, view
from tokenprune import OptionError, VisualTokens
from tokenprune.testing import visual_tokens


@pytest.mark.parametrize("dynamic", [1.0, 0.4])
def test_words_weigh_by_what_words_make_of_them(dynamic: float, build: Any) -> None:
    def naive(seen: Arrived) -> list[int]:
        score = dict.fromkeys(seen.places, 0.0)
        for head in seen.before.double():
            weight = []
            for j in seen.text:
                gave = sum(float(head[j, i]) for i in seen.text)
                got = sum(float(head[i, j]) for i in seen.text)
                weight.append(gave + got - float(head[j, j]))
            mean = sum(weight) / len(weight)
            for j, one in zip(seen.text, weight, strict=True):
                for i in seen.places:
                    score[i] += (dynamic * one + (1 - dynamic) * mean) * float(head[j, i])
        return sorted(seen.places, key=lambda i: (-score[i], i))[: seen.keep]

    cuts = check_in_model("adaptinfer", naive, build, keep=0.5, dynamic=dynamic)
    assert [cut.layer for cut in cuts] == [1, 2, 3]


def test_ties_go_to_the_first() -> None:
    """Of words that weigh alike in all heads, the order is that of their sum."""

    def naive(tokens: VisualTokens, cut: int) -> list[list[int]]:
        score = tokens.attention_from(torch.ones(tokens.text.mask.shape)).mean(1).tolist()
        return [best(row[:n], k) for row, n, k in zip(score, tokens.counts, tokens.keep, strict=True)]

    for counts, keep in (([30, 7], [9, 2]), ([64], [1])):
        tokens = view(counts, keep, ("text_attention", "last_row_attention"), levels=4)
        even = torch.eye(5).expand(len(counts), 3, 5, 5)
        given = {"mask": tokens.text.mask, "hidden": tokens.text.hidden, "attention": even}
        alike = visual_tokens(
            tokens.hidden, counts, keep=keep, text=given, text_attention=tokens.text_attention,
            last_row_attention=tokens.last_row_attention,
        )  # fmt: skip
        assert rows(tokenprune.method("adaptinfer").select(alike).keep) == naive(alike, 0)


def test_the_order_of_heads_changes_nothing() -> None:
    tokens = view([30, 9], [7, 3], ("text_attention", "last_row_attention"))
    turned = [2, 0, 1]
    given = {"mask": tokens.text.mask, "hidden": tokens.text.hidden, "attention": tokens.text.attention[:, turned]}
    other = visual_tokens(
        tokens.hidden, [30, 9], keep=[7, 3], text=given, text_attention=tokens.text_attention[:, turned],
        last_row_attention=tokens.last_row_attention[:, turned],
    )  # fmt: skip
    method = tokenprune.method("adaptinfer")
    assert rows(method.select(other).keep) == rows(method.select(tokens).keep)


def test_options_are_checked() -> None:
    for options in (dict(dynamic=1.5), dict(dynamic="1"), dict(layers=(1, 2, 2))):
        with pytest.raises(OptionError, match="adaptinfer"):
            tokenprune.method("adaptinfer", **options)
