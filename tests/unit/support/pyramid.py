# SPDX-License-Identifier: Apache-2.0
"""A method with several cuts in a file outside the library, as a user writes it: PyramidDrop (arXiv 2410.17247)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokenprune import Budget, Method, Pruner, Site, VisualTokens
from tokenprune.budgets.schedule import plan_cuts


@dataclass(frozen=True)
class Pyramid(Pruner):
    """Halve the visual tokens after each quarter of the decoder, ranked by attention of the next layer's last row.

    keep: average tokens over the decoder's layers. depths: positions of the cuts, as shares of the decoder's depth.
    """

    name: ClassVar[str] = "pyramid"
    site: ClassVar[Site] = Site.IN_LLM
    depths: tuple[float, ...] = (0.25, 0.5, 0.75)

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        cuts = [(depth, 0.5 ** (index + 1)) for index, depth in enumerate(self.depths)]
        return [(PyramidStage(cut.layer), cut.budget) for cut in plan_cuts(layers, cuts, budget)]


@dataclass(frozen=True)
class PyramidStage(Pruner):
    """One cut of `Pyramid`, at the input of decoder layer `layer`."""

    name: ClassVar[str] = "pyramid"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"next_row_attention"})
    layer: int = 1

    @property
    def query_aware(self) -> bool:
        return True

    def score(self, tokens: VisualTokens) -> Tensor:
        return tokens.next_row_attention.mean(dim=1)
