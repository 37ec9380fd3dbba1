# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import TowerBlock
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("encoder_keys")
class EncoderKeys(TowerBlock):
    """float32 `[S, N, H * Dh]`: keys of a block of the vision tower, after rotary embedding where it has one, heads
    flattened; 0 for tokens that are no patch. A token made of several patches gets their mean.

    layer: one of the method's `encoder_layers`.
    """

    def of_patches(self, seen: SeenAttention, protected: int) -> Tensor:
        return seen.key[:, :, protected:]
