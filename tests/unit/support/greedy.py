# SPDX-License-Identifier: Apache-2.0
"""Methods that pick one token after the other, against naive loops in float64, on made-up tokens of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

import tokenprune
from tokenprune import VisualTokens
from tokenprune.testing import visual_tokens

# Tokens of each image of a batch, and how many are kept.
SIZES = [([64], [1], torch.float32), ([64, 40], [63, 17], torch.float32), ([150, 96], [32, 12], torch.bfloat16)]
LARGE = [([576], [24], torch.float32), ([2880], [3], torch.bfloat16)]


def image_tokens(
    counts: list[int], keep: list[int], dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any
) -> VisualTokens:
    """Tokens that lie in clusters, as those of an image do, with attention, features and text; something else stands at
    padding."""
    g = torch.Generator().manual_seed(seed)
    rows, longest = len(counts), max(counts)
    padding = torch.arange(longest) >= torch.tensor(counts)[:, None]

    def clustered(width: int) -> Tensor:
        centres = torch.randn(rows, 12, width, generator=g)
        of = torch.randint(12, (rows, longest, 1), generator=g).expand(-1, -1, width)
        x = 0.7 + centres.gather(1, of) + 0.45 * torch.randn(rows, longest, width, generator=g)
        return x.masked_fill(padding.unsqueeze(2), 5.0).to(dtype)

    text = torch.randn(rows, 9, 32, generator=g).to(dtype)
    behind = torch.arange(9) < torch.tensor([[9], [5]])[:rows]
    attention = torch.rand(rows, 2, longest, generator=g).pow(4)
    given = {
        "hidden": clustered(32),
        "encoder_features": clustered(24).float(),
        "encoder_attention": {-1: attention.masked_fill(padding.unsqueeze(1), 9)},
        "text": {"hidden": text, "mask": behind},
    }
    given |= more
    return visual_tokens(given.pop("hidden"), counts, keep=keep, **given)


def picked(method: Any, tokens: VisualTokens) -> list[list[int]]:
    """Which tokens of each image a method keeps; exactly as many as it should."""
    selection = method.select(tokens)
    assert selection.keep.dtype == torch.bool and not (selection.keep & ~tokens.mask).any()
    assert selection.keep.sum(1).tolist() == tokens.keep == selection.counts
    return [row.nonzero().flatten().tolist() for row in selection.keep]


def alone(tokens: VisualTokens, row: int) -> dict[str, Tensor]:
    """What a naive loop may see of an image, in float64."""
    count, text = tokens.counts[row], tokens.text
    return {
        "x": tokens.hidden[row, :count].double(),
        "z": tokens.encoder_features[row, :count].double(),
        "a": tokens.encoder_attention(-1)[row, :, :count].double().mean(0),
        "t": text.hidden[row, text.mask[row]].double(),
    }


def next_pick(score: Tensor, picks: list[int], kept: Collection[int] = (), slack: float = 0.0) -> int:
    """The best token that is not picked yet, of equal ones the first; of those that are all but equal one of `kept`."""
    score = score.double().clone()
    score[picks] = -torch.inf
    best = float(score.max())
    near = (score >= best - slack * max(1e-12, abs(best))).nonzero().flatten().tolist()
    near.sort(key=lambda i: -float(score[i]))
    return next((i for i in near if i in kept), near[0])


Naive = Callable[..., list[int]]


def check_against(naive: Naive, name: str, sizes: Any, slack: float, **options: Any) -> None:
    """Assert that a method keeps what a naive loop does. naive: of `alone`'s entries by name, the number to keep, what
    the method kept, and by how much two tokens may differ of which either is the better one; returns its picks."""
    method = tokenprune.method(name, **options)
    for counts, keep, dtype in sizes:
        tokens = image_tokens(counts, keep, dtype)
        got = picked(method, tokens)
        for row, number in enumerate(keep):
            want = naive(**alone(tokens, row), keep=number, kept=set(got[row]), slack=slack)
            assert len(set(want)) == number and sorted(want) == got[row], (counts, keep, dtype, row)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def cosine_table(x: Tensor) -> Tensor:
    """Of vectors whose cosines two ways of rounding must agree about."""
    return unit(x) @ unit(x).T
