# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.families import Family
from tokenprune.view.observable import TowerScores
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("encoder_logits")
class EncoderLogits(TowerScores):
    """float32 `[S, H, N]`: logits of the class token to each patch in a block of the vision tower, ahead of the softmax
    and with its factor, which may be negative; in a tower without a class token, the mean over the tile's patches. 0
    for tokens that are no patch.

    layer: one of the method's `encoder_layers`.
    """

    def obstacle(self, row: Family) -> str | None:
        # Towers that lay the patches of several images on one axis would have to be asked by image.
        return "a row of the vision tower for each tile" if row.patches in ("runs", "sized") else None

    def of_patches(self, seen: SeenAttention, protected: int) -> Tensor:
        query, key = seen.query.float(), seen.key[:, :, protected:].float()
        if protected:
            asking = query[:, :, :1]
        else:
            first = torch.zeros(query.shape[0], 1, dtype=torch.long, device=query.device)
            # Patches of padding are keys that nobody sees, and their own rows do not count.
            real = seen.visible(first)[:, :1, 0, :, None].expand(query.shape[0], 1, query.shape[2], 1).float()
            asking = (query * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
        return (asking @ key.transpose(2, 3)).squeeze(2) * seen.scaling
