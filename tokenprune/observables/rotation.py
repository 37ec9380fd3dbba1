# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.ops.drawn import uniform
from tokenprune.view.observable import Observable, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import Segments, Sizes, TextView
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register_observable("rotation")
class Rotation(Observable):
    """(cos, sin), `[S, N, R]` each: by which angles the layer before the cut turns queries and keys of each token, with
    the factor that some families scale them by."""

    where = ObservedAt.INPUT_BEFORE
    rotary = True

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> tuple[Tensor, Tensor]:
        return self._at(source, segments.position, segments)

    def of_text(self, source: TokenSource, text: TextView) -> tuple[Tensor, Tensor]:
        return self._at(source, text.position, text.segments)

    @staticmethod
    def _at(source: TokenSource, position: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        assert source.input_before.rotation is not None  # `rotary`: engines refuse decoders without
        cos, sin = source.input_before.rotation
        return source.at(cos, position, segments), source.at(sin, position, segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = uniform(sizes.segments, sizes.tokens, sizes.width // sizes.heads, generator=generator)
        return angles.cos(), angles.sin()

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = uniform(sizes.segments, sizes.text, sizes.width // sizes.heads, generator=generator)
        return angles.cos(), angles.sin()
