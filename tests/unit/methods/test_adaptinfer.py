# SPDX-License-Identifier: Apache-2.0
"""adaptinfer against naive loops written from its description."""

from __future__ import annotations

import torch

import tokenprune
from several_cuts import best, rows, view
from tokenprune import VisualTokens
from tokenprune.testing import visual_tokens


def test_ties_select_first_token() -> None:
    """Words with equal weights in all heads rank tokens by their summed attention."""

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


def test_head_order_does_not_matter() -> None:
    tokens = view([30, 9], [7, 3], ("text_attention", "last_row_attention"))
    turned = [2, 0, 1]
    given = {"mask": tokens.text.mask, "hidden": tokens.text.hidden, "attention": tokens.text.attention[:, turned]}
    other = visual_tokens(
        tokens.hidden, [30, 9], keep=[7, 3], text=given, text_attention=tokens.text_attention[:, turned],
        last_row_attention=tokens.last_row_attention[:, turned],
    )  # fmt: skip
    method = tokenprune.method("adaptinfer")
    assert rows(method.select(other).keep) == rows(method.select(tokens).keep)
