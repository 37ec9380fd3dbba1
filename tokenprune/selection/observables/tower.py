# SPDX-License-Identifier: Apache-2.0
"""Observables of the vision tower: its features, and queries, keys and attention of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.kernels.host_random import uniform
from tokenprune.models.families import Family
from tokenprune.selection.observable import Backend, TowerBlock, TowerInput, TowerOutput, TowerScores
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import ObservedAttention, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("encoder_features")
class EncoderFeatures(TowerOutput):
    """float32 `[S, N, Dv]`: output of the vision tower for each patch, before the projector; of the layer that the
    model reads, or of several joined. A token made of several patches gets their mean, and in a tower that merges them
    itself (GLM-4V) the output of the token. Tokens that are no patch get 0."""

    def compute_from_features(self, features: Tensor, protected: int) -> Tensor:
        return features[:, protected:]


@register_observable("encoder_queries")
class EncoderQueries(TowerBlock):
    """float32 `[S, N, H * Dh]`: queries of a block of the vision tower, after rotary embedding where it has one, heads
    flattened; 0 for tokens that are no patch. A token made of several patches gets their mean.

    layer: one of the method's `encoder_layers`.
    """

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        return seen.query[:, :, protected:]


@register_observable("encoder_keys")
class EncoderKeys(TowerBlock):
    """float32 `[S, N, H * Dh]`: keys of a block of the vision tower, after rotary embedding where it has one, heads
    flattened; 0 for tokens that are no patch. A token made of several patches gets their mean.

    layer: one of the method's `encoder_layers`.
    """

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        return seen.key[:, :, protected:]


@register_observable("encoder_received_attention")
class EncoderReceivedAttention(TowerScores):
    """float32 `[S, H, N]`: mean attention that a patch gets from all tokens of its tile or frame in a block of the
    vision tower, the class token among them where there is one; 0 for tokens that are no patch.

    layer: one of the method's `encoder_layers`.
    """

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        return received(seen, protected)


def received(seen: ObservedAttention, protected: int) -> Tensor:
    """Return float32 `[rows, H, patches]`: the mean attention that each patch gets."""
    if seen.starts is not None:  # several sequences on one axis
        whole: ObservedAttention = replace(cast(Any, seen), mask=None, causal=False)  # engines give dataclasses
        return whole.column_means(starts=seen.starts)
    rows, _, queries = seen.query.shape[:3]
    first = torch.zeros(rows, 1, dtype=torch.long, device=seen.query.device)
    # Patches of padding are keys that nobody sees, and their own rows do not count.
    asking = seen.visible_keys(first)[:, 0, 0].expand(rows, queries)
    return seen.column_means(asking)[..., protected:]


@register_observable("encoder_attention")
class EncoderAttention(TowerScores):
    """float32 `[S, H, N]`: attention that visual tokens get in a block of the vision tower, 0 for tokens that are no
    patch.

    The class token's attention to each patch where the tower has one, else the mean over all patches of the tile or
    frame. layer: one of the method's `encoder_layers`.
    """

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        if not protected or seen.starts is not None:
            return received(seen, protected)
        first = torch.zeros(seen.query.shape[0], 1, dtype=torch.long, device=seen.query.device)
        return seen.rows(first)[:, :, 0, protected:]


@register_observable("encoder_logits")
class EncoderLogits(TowerScores):
    """float32 `[S, H, N]`: logits of the class token to each patch in a block of the vision tower, ahead of the softmax
    and with its factor, which may be negative; in a tower without a class token, the mean over the tile's patches. 0
    for tokens that are no patch.

    layer: one of the method's `encoder_layers`.
    """

    def find_obstacle(self, row: Family) -> str | None:
        # Towers that lay the patches of several images on one axis would have to be asked by image.
        return "a row of the vision tower for each tile" if row.patches in ("runs", "sized") else None

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        query, key = seen.query.float(), seen.key[:, :, protected:].float()
        if protected:
            asking = query[:, :, :1]
        else:
            first = torch.zeros(query.shape[0], 1, dtype=torch.long, device=query.device)
            # Patches of padding are keys that nobody sees, and their own rows do not count.
            real = seen.visible_keys(first)[:, :1, 0, :, None].expand(query.shape[0], 1, query.shape[2], 1).float()
            asking = (query * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
        return (asking @ key.transpose(2, 3)).squeeze(2) * seen.scaling


@register_observable("encoder_flow")
class EncoderFlow(TowerScores):
    """float32 `[S, 3, N]`: what flows from each patch to the class token in a block of the vision tower: the class
    token's attention to it; the softmax of the products of the class token's value with all values; the sum of the
    absolute entries of the patch's value. The first two are means over heads, of the last the value is. 0 for tokens
    that are no patch.

    In a tower without a class token the first is the mean attention that a patch receives, and the second is 0. layer:
    one of the method's `encoder_layers`.
    """

    backends = frozenset({Backend.HF})

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        classless = not protected or seen.starts is not None
        first = torch.zeros(seen.query.shape[0], 1, dtype=torch.long, device=seen.query.device)
        attention = received(seen, protected) if classless else seen.rows(first)[:, :, 0, protected:]
        values = seen.values(seen.query.shape[2]).float().unflatten(-1, (attention.shape[1], -1))
        strength = values.mean(2).abs().sum(-1)[:, protected:]
        attention, values = attention.mean(1), values.transpose(1, 2)  # [rows, H, tokens, Dv]
        if classless:
            return torch.stack([attention, torch.zeros_like(attention), strength], dim=1)
        alike = (values[:, :, :1] @ values.transpose(2, 3)).masked_fill(~seen.visible_keys(first), -torch.inf)
        alike = alike.softmax(-1)[:, :, 0, protected:].mean(1)
        return torch.stack([attention, alike, strength], dim=1)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return super().example(replace(sizes, heads=3), generator)


@register_observable("patch_entropy")
class PatchEntropy(TowerInput):
    """float32 `[S, N]`: entropy of the greys of each token's pixels, in nats, from 0 (flat) to ln 256; of towers that
    pack patches, and with `processor=`.

    Colours are rounded to 0..255, and greys, 0.299 R + 0.587 G + 0.114 B in float32, truncated; 1e-10 is added to the
    share of each of the 256. A token of a video holds the pixels of all frames that it joins.
    """

    axes = "SN"

    def compute_from_colors(self, colours: Tensor) -> Tensor:
        red, green, blue = colours.mul(255).round().clamp(0, 255).unbind(2)
        grey = (0.299 * red + 0.587 * green + 0.114 * blue).long().flatten(1)
        count = colours.new_zeros(len(grey), 256).scatter_add_(1, grey, torch.ones_like(grey, dtype=colours.dtype))
        share = count / grey.shape[1] + 1e-10
        return -(share * share.log()).sum(1, keepdim=True)

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return super().compute_visual(source, segments).squeeze(-1)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.tokens, generator=generator) * 5
