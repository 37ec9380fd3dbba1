# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.kernels.take import top_mask
from tokenprune.methods.multi_cut import CutStage, MultiCutMethod
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_SHALLOW = 6 / 32  # of the layers, in which nothing leaves
_CALM = 0.999  # cosine above which nothing that is left matters to a layer
_CALM_LAYERS = 2  # as many of which end it


@register(
    "visipruner", site=Site.IN_LLM, needs=("last_row_attention", "last_row_output", "value_heads"),
    paper="arXiv 2510.17205, EMNLP 2025",
)  # fmt: skip
@dataclass(frozen=True)
class VisiPruner(MultiCutMethod):
    """Wait for the first layer that visual tokens matter to, keep those that do, and withdraw these when they no longer
    do (VisiPruner).

    A token's part in a layer is its values times the attention that the prompt's last token pays it, all heads side by
    side. A layer is one that visual tokens matter to if without the part of some token its output for that last token
    would point elsewhere.

    keep: a share or a number, the most that stay of an image; content decides how many do, and where. 1.0 prunes
    nothing.
    turns: cosine in [-1, 1] between a layer's output with and without a token below which that token matters.
    part: length above which a token's part makes it stay; the largest one stays whatever it is.

    Source: "VisiPruner: Decoding Discontinuous Cross-Modal Dynamics for Efficient Multimodal LLMs", and the authors'
    code for the numbers: its stages "middle" and "deep", the latter at the second layer (not necessarily the next) that
    no token changes by a cosine of 0.999.

    Differs from the paper: the stage "shallow", which changes attention in the first layers and removes nothing, is
    left out. `keep` is a limit of ours. The first layers are a share of the depth, 6 of 32. Each image is judged by
    itself, so that images of a prompt leave at layers of their own. `part` is the authors' number for LLaVA-1.5, and
    depends on the scale of a model's values.
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.5
    asks_device: ClassVar[bool] = True
    by_content_count: ClassVar[bool] = True
    least: ClassVar[int] = 0

    turns: Annotated[float, Ge(-1), Le(1)] = 0.995
    part: Annotated[float, Ge(0)] = 0.2

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.keep is None:
            raise BudgetError(
                f"{self.name}: {budget} cannot be promised, since content decides where the tokens leave; give a share "
                "or a number, keep=0.5 or keep=128, which is the most that stay"
            )
        first = min(layers - 1, round(_SHALLOW * layers) + 2)
        return [(CutStage(self, layer - first, layer), budget) for layer in range(first, layers)]

    def select(self, tokens: VisualTokens) -> Selection:
        part, cosine = self._parts(tokens)
        found, calm = tokens.carry.get("found"), tokens.carry.get("calm")
        found = torch.zeros_like(tokens.budget, dtype=torch.bool) if found is None else found
        calm = torch.zeros_like(tokens.budget) if calm is None else calm
        there = tokens.mask & cosine.isfinite()
        turns = (there & (cosine < self.turns)).any(1)
        number = (there & (part > self.part)).sum(1).clamp(min=1)
        important = top_mask(part, tokens.mask, torch.minimum(number, tokens.budget), max(tokens.keep))

        calm = calm + (found & (~there | (cosine >= _CALM)).all(1))
        now = ~found & turns
        keep = torch.where(now[:, None], important, tokens.mask) & (calm < _CALM_LAYERS)[:, None]
        tokens.remember("found", found | turns, per_token=False)
        tokens.remember("calm", calm, per_token=False)
        return Selection(keep)

    def _parts(self, tokens: VisualTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[S, N]` each: the length of each token's part in the output of the layer before, and the cosine
        between that output without the part and with it."""
        attention, output = tokens.last_row_attention, tokens.last_row_output.float()  # [S, H, N], [S, H, D]
        values = tokens.value_heads.float()  # [S, N, Hkv, D]: several heads share a head of values
        group = attention.shape[1] // values.shape[2]
        square = values.square().sum(3).transpose(1, 2).repeat_interleave(group, dim=1)
        square = (attention.square() * square).sum(1)
        towards = torch.einsum("snhd,shgd->shgn", values, output.unflatten(1, (-1, group))).flatten(1, 2)
        along = (attention * towards).sum(1)
        whole = output.square().sum((1, 2))[:, None]
        left = (whole - 2 * along + square).clamp(min=0)
        tiny = torch.finfo(torch.float32).tiny
        return square.sqrt(), (whole - along) / (left.sqrt() * whole.sqrt()).clamp(min=tiny)
