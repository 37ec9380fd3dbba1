# SPDX-License-Identifier: Apache-2.0
"""Cen-Prune: what tokens have in common is taken away before they are compared, and how distinct each is weighs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from tokenprune.kernels.pairs import unit
from tokenprune.methods.scores import stretched
from tokenprune.view.tokens import VisualTokens

if TYPE_CHECKING:
    from torch import Tensor

Centering = bool | Literal["standardised", "tower"]
_TINY = 1e-6
_ROUNDING = 1e-5  # share of a token's length below which what is left of it is rounding


def needs_of(center: Centering) -> frozenset[str]:
    """Return the observables that a method with this option reads for it."""
    return frozenset({"encoder_features"} if center == "tower" else set())


def centred(tokens: VisualTokens, center: Centering) -> tuple[Tensor, Tensor]:
    """Return the tokens less the mean of their image, float32 `[S, N, D]`, and how distinct each is, float32 `[S, N]`
    from 0 to 1: the less, the more alike it is to the others on average, by cosine before the mean is taken away.

    center: True takes the tokens as they are, and the range of what is distinct in the image; "standardised" divides
    each feature by its standard deviation over the image, and has a sigmoid of the standard score; "tower" does so with
    what the vision tower makes of each patch. A token that equals the mean, or is not finite, points nowhere.
    """
    x = (tokens.encoder_features if center == "tower" else tokens.hidden).float()
    real = (tokens.mask & x.isfinite().all(2)).unsqueeze(2)
    x, number = x.masked_fill(~real, 0), real.sum(1, keepdim=True).clamp(min=1)
    mean = x.sum(1, keepdim=True) / number
    if center is not True:
        spread = ((x - mean).masked_fill(~real, 0).square().sum(1, keepdim=True) / number + _TINY).sqrt()
        x, mean = x / spread, mean / spread
    left = (x - mean).masked_fill(~real, 0)
    nowhere = left.norm(dim=2, keepdim=True) <= _ROUNDING * x.norm(dim=2, keepdim=True)
    own = unit(x)
    # The sum of all cosines of a token is its cosine with the sum of all unit vectors; its own is left out.
    alike = (own @ own.sum(1, keepdim=True).transpose(1, 2)).squeeze(2) - own.square().sum(2)
    distinct = -alike / (number.squeeze(2) - 1).clamp(min=1)
    if center is True:
        return left.masked_fill(nowhere, 0), stretched(distinct, tokens.mask)
    real, number = real.squeeze(2), number.squeeze(2)
    middle = distinct.masked_fill(~real, 0).sum(1, keepdim=True) / number
    deviation = ((distinct - middle).masked_fill(~real, 0).square().sum(1, keepdim=True) / number).sqrt()
    distinct = torch.sigmoid((distinct - middle) / (deviation + _TINY))
    return left.masked_fill(nowhere, 0), distinct.masked_fill(~tokens.mask, 0)
