# SPDX-License-Identifier: Apache-2.0
"""Scores of visual tokens that several methods read: what the vision tower attends to, and what the question names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.coverage import cosines
from tokenprune.view.tokens import VisualTokens

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 1e-6


def saliency(tokens: VisualTokens) -> Tensor:
    """float32 `[S, N]`: attention that each token gets in the last block of the vision tower that the model reads, mean
    over heads; 0 for what is no patch, for padding, and where it is not finite.

    Needs "encoder_attention", and -1 among the method's `encoder_layers`.
    """
    attention = tokens.encoder_attention(-1).float().mean(1).masked_fill(~tokens.mask, 0)
    return attention.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0)


def relevance(tokens: VisualTokens) -> Tensor:
    """float32 `[S, N]`: mean cosine of each token to the text tokens after its image, in the language model's space; 0
    where there is no text."""
    text = tokens.text
    if not text.mask.shape[1]:
        return torch.zeros(tokens.mask.shape, dtype=torch.float32, device=tokens.mask.device)
    alike = cosines(tokens.hidden, text.hidden, tokens.mask).masked_fill(~text.mask.unsqueeze(1), 0)
    return alike.sum(2) / text.mask.sum(1, keepdim=True).clamp(min=1)


def stretched(score: Tensor, mask: Tensor, above: float = 0.0) -> Tensor:
    """float32 `[S, N]`: `score` less its lowest in each image, plus `above`, divided by its range there; 1 where all
    are alike, 0 for padding."""
    low = score.masked_fill(~mask, torch.inf).amin(1, keepdim=True)
    high = score.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
    span = high - low
    alike = span <= _ROUNDING * torch.maximum(high.abs(), low.abs())
    return torch.where(alike, 1.0, (score - low + above) / span.masked_fill(alike, 1)).masked_fill(~mask, 0)
