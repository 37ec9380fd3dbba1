# SPDX-License-Identifier: Apache-2.0
"""Scores of visual tokens that several methods read: what the vision tower attends to, what the question names, and how
distinct each is (Cen-Prune: what tokens have in common is taken away before they are compared)."""

from __future__ import annotations

from typing import Literal

import torch

from tokenprune.kernels.coverage import cosines
from tokenprune.kernels.pairs import finite, unit
from tokenprune.selection.tokens import VisualTokens

Centering = bool | Literal["standardised", "tower"]
_TINY = 1e-6
_NOTHING = 1e-5  # share of a token's length below which what is left of it is rounding
_ROUNDING = 1e-6


def compute_saliency(tokens: VisualTokens) -> torch.Tensor:
    """float32 `[S, N]`: attention that each token gets in the last block of the vision tower that the model reads, mean
    over heads; 0 for what is no patch, for padding, and where it is not finite.

    Needs "encoder_attention", and -1 among the method's `encoder_layers`.
    """
    attention = tokens.encoder_attention(-1).float().mean(1).masked_fill(~tokens.mask, 0)
    return attention.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0)


def compute_relevance(tokens: VisualTokens) -> torch.Tensor:
    """float32 `[S, N]`: mean cosine of each token to the text tokens after its image, in the language model's space; 0
    where there is no text."""
    text = tokens.text
    if not text.mask.shape[1]:
        return torch.zeros(tokens.mask.shape, dtype=torch.float32, device=tokens.mask.device)
    alike = cosines(tokens.hidden, text.hidden, tokens.mask) * text.mask.unsqueeze(1)
    return alike.sum(2) / text.mask.sum(1, keepdim=True).clamp(min=1)


def rescale(score: torch.Tensor, mask: torch.Tensor, above: float = 0.0) -> torch.Tensor:
    """float32 `[S, N]`: `score` less its lowest in each image, plus `above`, divided by its range there; 1 where all
    are alike, 0 for padding."""
    absent = ~mask
    low = score.masked_fill(absent, torch.inf).amin(1, keepdim=True)
    high = score.masked_fill(absent, -torch.inf).amax(1, keepdim=True)
    span = high - low
    alike = span <= _ROUNDING * torch.maximum(high.abs(), low.abs())
    return torch.where(alike, 1.0, (score - low + above) / span.masked_fill(alike, 1)).masked_fill(absent, 0)


def get_center_needs(center: Centering) -> frozenset[str]:
    """Return the observables that a method with this option reads for it."""
    return frozenset({"encoder_features"} if center == "tower" else set())


def center_tokens(tokens: VisualTokens, center: Centering) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens less the mean of their image, float32 `[S, N, D]`, and how distinct each is, float32 `[S, N]`
    from 0 to 1: the less, the more alike it is to the others on average, by cosine before the mean is taken away.

    center: True takes the tokens as they are, and the range of what is distinct in the image; "standardised" divides
    each feature by its standard deviation over the image, and has a sigmoid of the standard score; "tower" does so with
    what the vision tower makes of each patch. A token that equals the mean, or is not finite, points nowhere.
    """
    x = (tokens.encoder_features if center == "tower" else tokens.hidden).float()
    real = (tokens.mask & finite(x)).unsqueeze(2)
    x, number = x.masked_fill(~real, 0), real.sum(1, keepdim=True).clamp(min=1)
    mean = x.sum(1, keepdim=True) / number
    if center is not True:
        spread = ((x - mean).masked_fill(~real, 0).square().sum(1, keepdim=True) / number + _TINY).sqrt()
        x, mean = x / spread, mean / spread
    left = (x - mean).masked_fill(~real, 0)
    nowhere = left.norm(dim=2, keepdim=True) <= _NOTHING * x.norm(dim=2, keepdim=True)
    own = unit(x)
    # The sum of all cosines of a token is its cosine with the sum of all unit vectors; its own is left out.
    alike = (own @ own.sum(1, keepdim=True).transpose(1, 2)).squeeze(2) - own.square().sum(2)
    distinct = -alike / (number.squeeze(2) - 1).clamp(min=1)
    if center is True:
        return left.masked_fill(nowhere, 0), rescale(distinct, tokens.mask)
    real, number = real.squeeze(2), number.squeeze(2)
    middle = distinct.masked_fill(~real, 0).sum(1, keepdim=True) / number
    deviation = ((distinct - middle).masked_fill(~real, 0).square().sum(1, keepdim=True) / number).sqrt()
    distinct = torch.sigmoid((distinct - middle) / (deviation + _TINY))
    return left.masked_fill(nowhere, 0), distinct.masked_fill(~tokens.mask, 0)
