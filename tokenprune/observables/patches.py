# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.view.observable import Backend, Observable, ObservedAt
from tokenprune.view.registry import observables_of, register_observable
from tokenprune.view.segments import Patches, SeenAttention, Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("patches")
class PatchPlaces(Observable):
    """`Patches`, long `[S, N]` each: where in the vision tower the tokens come from. Whoever reads anything else of the
    tower may read it too."""

    where = ObservedAt.TOWER
    axes = ""
    backends = frozenset({Backend.HF, Backend.VLLM})

    def declared(self, needs: frozenset[str]) -> bool:
        return bool(observables_of(needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK))

    def of_patches(self, seen: SeenAttention, protected: int) -> Tensor:
        """Return `[rows, H, patches]`, of any value: how many patches there are is all that is asked."""
        return seen.key[:, :, protected:, 0]

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Patches:
        return source.patches(segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Patches:
        counts = torch.tensor(sizes.counts, device="cpu")[:, None]
        column = torch.arange(sizes.tokens, device="cpu").expand(sizes.segments, -1)
        row, one = torch.zeros_like(column), torch.ones_like(column)
        return Patches(torch.where(column < counts, 0, -1), row, column, one, counts * one, one, tiles=1)
