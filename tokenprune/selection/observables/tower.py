# SPDX-License-Identifier: Apache-2.0
"""Observables of the vision tower: output features, pixel entropy, and queries, keys and attention of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.kernels.host_random import uniform
from tokenprune.models.families import Family
from tokenprune.selection.observable import Backend, Input
from tokenprune.selection.observable_bases import TowerBlock, TowerInput, TowerOutput, TowerScores
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import ObservedAttention, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("encoder_features")
class EncoderFeatures(TowerOutput):
    """Output of the vision tower for each token, before the projector, shape (S, N, Dv), float32.

    Read from the layer that the model uses, or from several layers, concatenated. A token made of several patches gets
    their mean. In a tower that merges patches itself (GLM-4V), it gets the output of the token. Tokens without a patch
    get 0.
    """

    def compute_from_features(self, features: Tensor, protected: int) -> Tensor:
        return features[:, protected:]


@register_observable("encoder_queries")
class EncoderQueries(TowerBlock):
    """Queries of a block of the vision tower, after any rotary embedding, shape (S, N, H * Dh), float32.

    Call it with a block of `encoder_layers`. A token made of several patches gets their mean. Tokens without a patch
    get 0.
    """

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        return attention.query[:, :, protected:]


@register_observable("encoder_keys")
class EncoderKeys(TowerBlock):
    """Keys of a block of the vision tower, after any rotary embedding, shape (S, N, H * Dh), float32.

    Call it with a block of `encoder_layers`. A token made of several patches gets their mean. Tokens without a patch
    get 0.
    """

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        return attention.key[:, :, protected:]


@register_observable("encoder_received_attention")
class EncoderReceivedAttention(TowerScores):
    """Mean attention that each token receives from its tile or frame in a tower block, (S, H, N), float32.

    Call it with a block of `encoder_layers`. The mean includes any class token. Tokens without a patch get 0.
    """

    from_input = Input.TOWER_ATTENTION

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        return compute_received(attention, protected)


def compute_received(attention: ObservedAttention, protected: int) -> Tensor:
    """Return the mean attention that each patch receives, shape (rows, H, patches), float32."""
    if attention.starts is not None:  # packed sequences
        # The attention of every engine is a dataclass.
        unmasked: ObservedAttention = replace(cast(Any, attention), mask=None, causal=False)
        return unmasked.column_means(starts=attention.starts)
    rows, _, queries = attention.query.shape[:3]
    first = torch.zeros(rows, 1, dtype=torch.long, device=attention.query.device)
    # Padding patches are masked as keys, and excluded from the mean as queries.
    valid = attention.visible_keys(first)[:, 0, 0].expand(rows, queries)
    return attention.column_means(valid)[..., protected:]


@register_observable("encoder_attention")
class EncoderAttention(TowerScores):
    """Attention from the class token to each token in a block of the vision tower, shape (S, H, N), float32.

    Call it with a block of `encoder_layers`. Without a class token, it is the mean attention from all patches of the
    tile or frame. Tokens without a patch get 0.
    """

    from_input = Input.TOWER_ATTENTION

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        if not protected or attention.starts is not None:
            return compute_received(attention, protected)
        first = torch.zeros(attention.query.shape[0], 1, dtype=torch.long, device=attention.query.device)
        return attention.rows(first)[:, :, 0, protected:]


@register_observable("encoder_logits")
class EncoderLogits(TowerScores):
    """Scaled attention logits from the class token to each token in a tower block, shape (S, H, N), float32.

    Call it with a block of `encoder_layers`. Without a class token, it is the mean over the patches of the tile. Tokens
    without a patch get 0.
    """

    def find_obstacle(self, row: Family) -> str | None:
        # Towers that pack the patches of several images into one sequence would need a mask per image.
        return "a row of the vision tower for each tile" if row.patches in ("runs", "sized") else None

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        query, key = attention.query.float(), attention.key[:, :, protected:].float()
        if protected:
            source_query = query[:, :, :1]
        else:
            first = torch.zeros(query.shape[0], 1, dtype=torch.long, device=query.device)
            # Padding patches are masked as keys, and excluded from the mean as queries.
            valid = (
                attention.visible_keys(first)[:, :1, 0, :, None].expand(query.shape[0], 1, query.shape[2], 1).float()
            )
            source_query = (query * valid).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)
        return (source_query @ key.transpose(2, 3)).squeeze(2) * attention.scaling


@register_observable("encoder_flow")
class EncoderFlow(TowerScores):
    """Information flow from each token to the class token in a block of the vision tower, shape (S, 3, N), float32.

    The entries are the attention from the class token, the softmax of the products of its value with all values, and
    the L1 norm of the value, averaged over the heads (before the norm for the last entry). Without a class token, the
    first entry is the mean attention that a patch receives, and the second is 0. Tokens without a patch get 0. Call it
    with a block of `encoder_layers`.
    """

    backends = frozenset({Backend.HF})

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        has_class_token = bool(protected) and attention.starts is None
        first = torch.zeros(attention.query.shape[0], 1, dtype=torch.long, device=attention.query.device)
        if has_class_token:
            weights = attention.rows(first)[:, :, 0, protected:]
        else:
            weights = compute_received(attention, protected)
        values = attention.values(attention.query.shape[2]).float().unflatten(-1, (weights.shape[1], -1))
        strength = values.mean(2).abs().sum(-1)[:, protected:]
        weights, values = weights.mean(1), values.transpose(1, 2)  # values: [rows, H, tokens, Dv]
        if not has_class_token:
            return torch.stack([weights, torch.zeros_like(weights), strength], dim=1)
        similarity = (values[:, :, :1] @ values.transpose(2, 3)).masked_fill(~attention.visible_keys(first), -torch.inf)
        similarity = similarity.softmax(-1)[:, :, 0, protected:].mean(1)
        return torch.stack([weights, similarity, strength], dim=1)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return super().example(replace(sizes, heads=3), generator)


@register_observable("patch_entropy")
class PatchEntropy(TowerInput):
    """Entropy of the grey values of each token's pixels in nats, from 0 (uniform) to ln 256, shape (S, N), float32.

    Colors are rounded to 0..255. Grey values, 0.299 R + 0.587 G + 0.114 B in float32, are truncated. 1e-10 is added to
    the share of each of the 256 values. A video token has the pixels of all frames that it joins. Requires a tower that
    packs patches, and `processor=`.
    """

    axes = "SN"

    def compute_from_colors(self, colors: Tensor) -> Tensor:
        red, green, blue = colors.mul(255).round().clamp(0, 255).unbind(2)
        grey = (0.299 * red + 0.587 * green + 0.114 * blue).long().flatten(1)
        count = colors.new_zeros(len(grey), 256).scatter_add_(1, grey, torch.ones_like(grey, dtype=colors.dtype))
        share = count / grey.shape[1] + 1e-10
        return -(share * share.log()).sum(1, keepdim=True)

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return super().compute_visual(source, segments).squeeze(-1)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.tokens, generator=generator) * 5
