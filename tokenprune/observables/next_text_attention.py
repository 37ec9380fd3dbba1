# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tokenprune.view.observable import AttentionOfText, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention
from tokenprune.view.source import TokenSource


@register_observable("next_text_attention")
class NextTextAttention(AttentionOfText):
    """float32 `[S, H, M, N]`: the same as `text_attention` in the layer after the cut, by that layer's own
    projections, if nothing was cut; `tokens.text.next_attention` is that to the text."""

    where = ObservedAt.NEXT_LAYER
    text_name = "next_attention"

    def observed(self, source: TokenSource) -> SeenAttention:
        return source.behind
