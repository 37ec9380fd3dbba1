# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.observables.hidden import Hidden
from tokenprune.view.observable import Backend, Observable, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import Segments, TextView
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("normed")
class Normed(Observable):
    """`[S, N, D]`: `hidden` after the decoder's final norm."""

    where = ObservedAt.CUT
    backends = frozenset(Backend)

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.final_norm(Hidden().of_visual(source, segments))

    def of_text(self, source: TokenSource, text: TextView) -> Tensor:
        return source.final_norm(text.hidden)
