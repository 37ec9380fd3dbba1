# SPDX-License-Identifier: Apache-2.0
"""Check greedy methods, which pick one token at a time, against naive loops in float64 on made-up tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

import tokenprune
from tokenprune import VisualTokens
from tokenprune.testing import visual_tokens

# Token counts and budgets of the images of a batch.
SIZES = [([64], [1], torch.float32), ([64, 40], [63, 17], torch.float32), ([150, 96], [32, 12], torch.bfloat16)]
LARGE = [([576], [24], torch.float32), ([2880], [3], torch.bfloat16)]


def image_tokens(
    counts: list[int], keep: list[int], dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any
) -> VisualTokens:
    """Return clustered tokens, as images have, with attention, features and text. Padding holds other values."""
    g = torch.Generator().manual_seed(seed)
    rows, longest = len(counts), max(counts)
    padding = torch.arange(longest) >= torch.tensor(counts)[:, None]

    def clustered(width: int) -> Tensor:
        centres = torch.randn(rows, 12, width, generator=g)
        cluster = torch.randint(12, (rows, longest, 1), generator=g).expand(-1, -1, width)
        x = 0.7 + centres.gather(1, cluster) + 0.45 * torch.randn(rows, longest, width, generator=g)
        return x.masked_fill(padding.unsqueeze(2), 5.0).to(dtype)

    text = torch.randn(rows, 9, 32, generator=g).to(dtype)
    text_mask = torch.arange(9) < torch.tensor([[9], [5]])[:rows]
    attention = torch.rand(rows, 2, longest, generator=g).pow(4)
    observables = {
        "hidden": clustered(32),
        "encoder_features": clustered(24).float(),
        "encoder_attention": {-1: attention.masked_fill(padding.unsqueeze(1), 9)},
        "text": {"hidden": text, "mask": text_mask},
    }
    observables |= more
    return visual_tokens(observables.pop("hidden"), counts, keep=keep, **observables)


def picked(method: Any, tokens: VisualTokens) -> list[list[int]]:
    """Return the indices of the kept tokens of each image, after checking their number."""
    selection = method.select(tokens)
    assert selection.keep.dtype == torch.bool and not (selection.keep & ~tokens.mask).any()
    assert selection.keep.sum(1).tolist() == tokens.keep == selection.counts
    return [row.nonzero().flatten().tolist() for row in selection.keep]


def alone(tokens: VisualTokens, row: int) -> dict[str, Tensor]:
    """Return the inputs of a naive loop for one image, in float64."""
    count, text = tokens.counts[row], tokens.text
    return {
        "x": tokens.hidden[row, :count].double(),
        "z": tokens.encoder_features[row, :count].double(),
        "a": tokens.encoder_attention(-1)[row, :, :count].double().mean(0),
        "t": text.hidden[row, text.mask[row]].double(),
    }


def next_pick(score: Tensor, picks: list[int], kept: Collection[int] = (), slack: float = 0.0) -> int:
    """Return the best remaining token, the first of equal ones. Among tokens within `slack` of the best, prefer
    `kept`."""
    score = score.double().clone()
    score[picks] = -torch.inf
    best = float(score.max())
    candidates = (score >= best - slack * max(1e-12, abs(best))).nonzero().flatten().tolist()
    candidates.sort(key=lambda i: -float(score[i]))
    return next((i for i in candidates if i in kept), candidates[0])


Naive = Callable[..., list[int]]


def check_against(naive: Naive, name: str, sizes: Any, slack: float, **options: Any) -> None:
    """Assert that a method keeps the same tokens as a naive loop.

    The loop gets the entries of `alone`, the budget `keep`, the tokens `kept` by the method, and the relative `slack`
    within which either of two tokens may be picked. It returns its picks.
    """
    method = tokenprune.method(name, **options)
    for counts, keep, dtype in sizes:
        tokens = image_tokens(counts, keep, dtype)
        actual = picked(method, tokens)
        for row, budget in enumerate(keep):
            expected = naive(**alone(tokens, row), keep=budget, kept=set(actual[row]), slack=slack)
            assert len(set(expected)) == budget and sorted(expected) == actual[row], (counts, keep, dtype, row)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def cosine_table(x: Tensor) -> Tensor:
    """Return all cosines, precise enough that two ways of rounding agree."""
    return unit(x) @ unit(x).T
