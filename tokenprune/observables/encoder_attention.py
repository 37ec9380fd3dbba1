# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.observables.encoder_received_attention import received
from tokenprune.view.observable import TowerScores
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("encoder_attention")
class EncoderAttention(TowerScores):
    """float32 `[S, H, N]`: attention that visual tokens get in a block of the vision tower, 0 for tokens that are no
    patch.

    The class token's attention to each patch where the tower has one, else the mean over all patches of the tile or
    frame. layer: one of the method's `encoder_layers`.
    """

    def of_patches(self, seen: SeenAttention, protected: int) -> Tensor:
        if not protected or seen.starts is not None:
            return received(seen, protected)
        first = torch.zeros(seen.query.shape[0], 1, dtype=torch.long, device=seen.query.device)
        return seen.rows(first)[:, :, 0, protected:]
