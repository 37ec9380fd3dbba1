# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import AttentionToTokens, Backend, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("received_attention")
class ReceivedAttention(AttentionToTokens):
    """float32 `[S, H, N]`: mean attention that each visual token receives from all tokens that may see it, in the layer
    before the cut."""

    where = ObservedAt.LAYER_BEFORE
    all_rows = True
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def columns(self, source: TokenSource) -> Tensor:
        return source.before.received(source.real())
