# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tokenprune.view.observable import AttentionOfText, Backend, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention
from tokenprune.view.source import TokenSource


@register_observable("text_attention")
class TextAttention(AttentionOfText):
    """float32 `[S, H, M, N]`: softmax attention of each text token behind an image to each visual token, in the layer
    before the cut; 0 at padding. `tokens.text.attention`, `[S, H, M, M]`, is that to each text token, and
    `tokens.attention_from(weights)`, `[S, H, N]`, the weighted sum over the text, which never holds all rows."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})
    text_name = "attention"

    def observed(self, source: TokenSource) -> SeenAttention:
        return source.before
