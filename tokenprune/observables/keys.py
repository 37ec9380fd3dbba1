# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import Backend, ObservedAt, PerToken
from tokenprune.view.registry import register_observable
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("keys")
class Keys(PerToken):
    """`[S, N, Hkv * Dh]`: keys of the layer before the cut, after rotary embedding, heads flattened."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def values(self, source: TokenSource) -> Tensor:
        return source.before.keys(source.width)
