# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import TowerOutput
from tokenprune.view.registry import register_observable

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("encoder_features")
class EncoderFeatures(TowerOutput):
    """float32 `[S, N, Dv]`: what the vision tower makes of each patch, before the projector; of the layer that the
    model reads, or of several joined. A token made of several patches gets their mean; what is no patch is 0."""

    def of_features(self, features: Tensor, protected: int) -> Tensor:
        return features[:, protected:]
