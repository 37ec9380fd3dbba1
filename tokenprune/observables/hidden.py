# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.view.observable import Backend, ObservedAt, PerToken
from tokenprune.view.registry import register_observable
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("hidden")
class Hidden(PerToken):
    """`[S, N, D]`, model dtype: the tokens as they arrive at the cut (PRE_LLM: the projected embeddings)."""

    where = ObservedAt.CUT
    backends = frozenset(Backend)

    def values(self, source: TokenSource) -> Tensor:
        return source.hidden
