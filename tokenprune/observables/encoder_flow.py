# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tokenprune.observables.encoder_received_attention import received
from tokenprune.view.observable import Backend, TowerScores
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention, Sizes

if TYPE_CHECKING:
    from torch import Tensor


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

    def of_patches(self, seen: SeenAttention, protected: int) -> Tensor:
        classless = not protected or seen.starts is not None
        first = torch.zeros(seen.query.shape[0], 1, dtype=torch.long, device=seen.query.device)
        attention = received(seen, protected) if classless else seen.rows(first)[:, :, 0, protected:]
        values = seen.values(seen.query.shape[2]).float().unflatten(-1, (attention.shape[1], -1))
        strength = values.mean(2).abs().sum(-1)[:, protected:]
        attention, values = attention.mean(1), values.transpose(1, 2)  # [rows, H, tokens, Dv]
        if classless:
            return torch.stack([attention, torch.zeros_like(attention), strength], dim=1)
        alike = (values[:, :, :1] @ values.transpose(2, 3)).masked_fill(~seen.visible(first), -torch.inf)
        alike = alike.softmax(-1)[:, :, 0, protected:].mean(1)
        return torch.stack([attention, alike, strength], dim=1)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return super().example(replace(sizes, heads=3), generator)
