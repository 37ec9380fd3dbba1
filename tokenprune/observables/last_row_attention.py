# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import AttentionToTokens, Backend, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("last_row_attention")
class LastRowAttention(AttentionToTokens):
    """float32 `[S, H, N]`: softmax attention of the last prompt token over each visual token, in the layer before the
    cut."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def columns(self, source: TokenSource) -> Tensor:
        return source.last_row[:, :, -source.width :]
