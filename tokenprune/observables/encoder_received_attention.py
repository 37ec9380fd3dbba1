# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.view.observable import TowerScores
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("encoder_received_attention")
class EncoderReceivedAttention(TowerScores):
    """float32 `[S, H, N]`: mean attention that a patch gets from all tokens of its tile or frame in a block of the
    vision tower, the class token among them where there is one; 0 for tokens that are no patch.

    layer: one of the method's `encoder_layers`.
    """

    def of_patches(self, seen: SeenAttention, protected: int) -> Tensor:
        return received(seen, protected)


def received(seen: SeenAttention, protected: int) -> Tensor:
    """Return float32 `[rows, H, patches]`: the mean attention that each patch gets."""
    if seen.starts is not None:  # several sequences on one axis
        whole: SeenAttention = replace(cast(Any, seen), mask=None, causal=False)  # engines give dataclasses
        return whole.received(starts=seen.starts)
    rows, _, queries = seen.query.shape[:3]
    first = torch.zeros(rows, 1, dtype=torch.long, device=seen.query.device)
    # Patches of padding are keys that nobody sees, and their own rows do not count.
    asking = seen.visible(first)[:, 0, 0].expand(rows, queries)
    return seen.received(asking)[..., protected:]
