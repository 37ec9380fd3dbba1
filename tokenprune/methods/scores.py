# SPDX-License-Identifier: Apache-2.0
"""Scores of visual tokens shared by several methods: saliency, relevance to the text, and distinctness."""

from __future__ import annotations

from typing import Literal

import torch

from tokenprune.kernels.coverage import cosines
from tokenprune.kernels.pairs import is_finite, normalize
from tokenprune.selection.tokens import VisualTokens

Centering = bool | Literal["standardised", "tower"]
_EPSILON = 1e-6
_RELATIVE_ZERO = 1e-5  # centered norms below this share of the token's norm are rounding errors
_ROUNDING = 1e-6


def compute_saliency(tokens: VisualTokens) -> torch.Tensor:
    """Return the attention of each patch in the last tower block that the model reads, float32 (S, N).

    The attention is the mean over heads. It is 0 for padding, for tokens that are not patches, and for values that are
    not finite. The method must need "encoder_attention" and have -1 in its `encoder_layers`.
    """
    attention = tokens.encoder_attention(-1).float().mean(1).masked_fill(~tokens.mask, 0)
    return attention.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0)


def compute_relevance(tokens: VisualTokens) -> torch.Tensor:
    """Return the mean cosine of each token to the text after its image, float32 (S, N), or zeros without text.

    Cosines are taken in the embedding space of the language model.
    """
    text = tokens.text
    if not text.mask.shape[1]:
        return torch.zeros(tokens.mask.shape, dtype=torch.float32, device=tokens.mask.device)
    similarity = cosines(tokens.hidden, text.hidden, tokens.mask) * text.mask.unsqueeze(1)
    return similarity.sum(2) / text.mask.sum(1, keepdim=True).clamp(min=1)


def rescale(score: torch.Tensor, mask: torch.Tensor, above: float = 0.0) -> torch.Tensor:
    """Rescale scores to [0, 1] over each image, float32 (S, N).

    Args:
        score: Scores, (S, N).
        mask: Valid tokens, bool (S, N). Padding becomes 0.
        above: Added to the score after subtracting the minimum.

    Returns:
        (score - minimum + above) / (maximum - minimum), or 1 if all scores of an image are equal.
    """
    padding = ~mask
    low = score.masked_fill(padding, torch.inf).amin(1, keepdim=True)
    high = score.masked_fill(padding, -torch.inf).amax(1, keepdim=True)
    span = high - low
    is_constant = span <= _ROUNDING * torch.maximum(high.abs(), low.abs())
    scaled = (score - low + above) / span.masked_fill(is_constant, 1)
    return torch.where(is_constant, 1.0, scaled).masked_fill(padding, 0)


def get_center_needs(center: Centering) -> frozenset[str]:
    """Return the observables that the option `center` requires."""
    return frozenset({"encoder_features"} if center == "tower" else set())


def center_tokens(tokens: VisualTokens, center: Centering) -> tuple[torch.Tensor, torch.Tensor]:
    """Center the tokens of each image and compute their distinctness (Cen-Prune, arXiv 2608.30263).

    Distinctness falls with the mean cosine of a token to all others before centering.

    Args:
        tokens: Visual tokens.
        center: True uses the tokens and rescales distinctness over the image. "standardised" divides each feature by
            its standard deviation over the image and passes the standard score of the distinctness through a sigmoid.
            "tower" does the same with the tower's output of each patch.

    Returns:
        The centered tokens, float32 (S, N, D), and the distinctness in [0, 1], float32 (S, N). Tokens that equal the
        mean or are not finite are 0.
    """
    x = (tokens.encoder_features if center == "tower" else tokens.hidden).float()
    valid = (tokens.mask & is_finite(x)).unsqueeze(2)
    x, count = x.masked_fill(~valid, 0), valid.sum(1, keepdim=True).clamp(min=1)
    mean = x.sum(1, keepdim=True) / count
    if center is not True:
        spread = ((x - mean).masked_fill(~valid, 0).square().sum(1, keepdim=True) / count + _EPSILON).sqrt()
        x, mean = x / spread, mean / spread
    centered = (x - mean).masked_fill(~valid, 0)
    is_zero = centered.norm(dim=2, keepdim=True) <= _RELATIVE_ZERO * x.norm(dim=2, keepdim=True)
    directions = normalize(x)
    # The sum of a token's cosines is its product with the sum of all directions, minus its cosine to itself.
    total_similarity = (directions @ directions.sum(1, keepdim=True).transpose(1, 2)).squeeze(2)
    total_similarity = total_similarity - directions.square().sum(2)
    distinctness = -total_similarity / (count.squeeze(2) - 1).clamp(min=1)
    if center is True:
        return centered.masked_fill(is_zero, 0), rescale(distinctness, tokens.mask)
    valid, count = valid.squeeze(2), count.squeeze(2)
    mean_distinctness = distinctness.masked_fill(~valid, 0).sum(1, keepdim=True) / count
    deviation = ((distinctness - mean_distinctness).masked_fill(~valid, 0).square().sum(1, keepdim=True) / count).sqrt()
    distinctness = torch.sigmoid((distinctness - mean_distinctness) / (deviation + _EPSILON))
    return centered.masked_fill(is_zero, 0), distinctness.masked_fill(~tokens.mask, 0)
