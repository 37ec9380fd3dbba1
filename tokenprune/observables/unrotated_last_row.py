# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import AttentionToTokens, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("unrotated_last_row")
class UnrotatedLastRow(AttentionToTokens):
    """float32 `[S, H, N]`: softmax attention of the last prompt token over each visual token, in the layer before the
    cut, if queries and keys were not rotated: what it attends to whatever the distance. Tokens of earlier turns are
    left out of the softmax."""

    where = ObservedAt.UNROTATED
    rotary = True

    def columns(self, source: TokenSource) -> Tensor:
        return source.unrotated.rows(source.last_slot())[:, :, 0, -source.width :]
