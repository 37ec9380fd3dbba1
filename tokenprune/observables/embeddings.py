# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.ops.drawn import normal
from tokenprune.view.observable import Backend, Observable, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import Segments, Sizes, TextView
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register_observable("embeddings")
class Embeddings(Observable):
    """`[S, N, D]`: what enters the decoder, wherever the cut is; at its entry the same as `hidden`."""

    where = ObservedAt.ENTRY
    backends = frozenset({Backend.HF, Backend.VLLM})

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.entered(segments.position, segments)

    def of_text(self, source: TokenSource, text: TextView) -> Tensor:
        return source.entered(text.position, text.segments)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.text, sizes.width, generator=generator)
