# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.ops.drawn import normal
from tokenprune.view.observable import ObservedAt, PerToken
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register_observable("value_heads")
class ValueHeads(PerToken):
    """`[S, N, Hkv, Dv]`: values of the layer before the cut, head by head; those of `values` otherwise."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SNHD"

    def values(self, source: TokenSource) -> Tensor:
        return source.before.value_heads(source.width)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.tokens, sizes.heads, sizes.width // sizes.heads, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.text, sizes.heads, sizes.width // sizes.heads, generator=generator)
