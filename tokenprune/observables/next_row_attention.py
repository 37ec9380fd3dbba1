# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import AttentionToTokens, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("next_row_attention")
class NextRowAttention(AttentionToTokens):
    """float32 `[S, H, N]`: softmax attention that the last prompt token would pay to each visual token in the layer
    after the cut, by that layer's own projections, if nothing was cut."""

    where = ObservedAt.NEXT_LAYER

    def columns(self, source: TokenSource) -> Tensor:
        return source.behind.rows(source.last_slot())[:, :, 0, -source.width :]
