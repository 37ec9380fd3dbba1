# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import Backend, ObservedAt, PerToken
from tokenprune.view.registry import register_observable
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("previous_hidden")
class PreviousHidden(PerToken):
    """`[S, N, D]`: the hidden states that entered the layer before the cut, of which that layer made `hidden`."""

    where = ObservedAt.INPUT_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def values(self, source: TokenSource) -> Tensor:
        return source.input_before.hidden
