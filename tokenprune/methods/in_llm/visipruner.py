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

_SHALLOW_SHARE = 6 / 32  # share of the layers that never drop tokens
_CALM_COSINE = 0.999  # a layer is calm if no token changes the cosine to less than this
_CALM_LAYERS = 2  # number of calm layers before all visual tokens are dropped


@register(
    "visipruner", site=Site.IN_LLM, needs=("last_row_attention", "last_row_output", "value_heads"),
    paper="arXiv 2510.17205, EMNLP 2025",
)  # fmt: skip
@dataclass(frozen=True)
class VisiPruner(MultiCutMethod):
    """Keep tokens that affect a layer's output and drop them when they no longer do (VisiPruner).

    The contribution of a token to a layer is its value vectors times the attention from the prompt's last token, all
    heads concatenated. Visual tokens matter to a layer if removing one contribution turns the layer's output for the
    last token. The first such layer after the shallow ones decides the kept tokens. All visual tokens of an image are
    dropped at the second later layer, not necessarily adjacent, in which no contribution turns the output (cosine of
    0.999 or more).

    `keep` is a share or a count, and an upper bound per image: content decides the number of kept tokens and the
    layers. With 1.0 no tokens are dropped.

    Args:
        turns: Cosine between a layer's outputs with and without a token, in [-1, 1]. Below it the token matters.
        part: Norm of a contribution above which a token is kept. The token with the largest contribution is always
            kept.

    Source:
        "VisiPruner: Decoding Discontinuous Cross-Modal Dynamics for Efficient Multimodal LLMs" (arXiv 2510.17205), the
        stages "middle" and "deep", and the authors' code for the constants.

    Differences from the paper:
        - The stage "shallow", which changes attention in the first layers and drops no tokens, is left out.
        - The upper bound `keep` is an addition.
        - The shallow layers are a share of the depth, 6 of 32.
        - Each image is judged separately, so the images of a prompt may be dropped at different layers.
        - `part` is the authors' value for LLaVA-1.5. It depends on the scale of a model's values.

    Examples:
        >>> model = tokenprune.patch(model, VisiPruner(part=0.1), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out <= 128
        True
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.5
    syncs_device: ClassVar[bool] = True
    chooses_count: ClassVar[bool] = True
    min_tokens: ClassVar[int] = 0

    turns: Annotated[float, Ge(-1), Le(1)] = 0.995
    part: Annotated[float, Ge(0)] = 0.2

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.keep is None:
            raise BudgetError(
                f"{self.name} cannot meet {budget}: content decides the layers of the cuts. Pass an upper bound per "
                "image, such as keep=0.5 or keep=128."
            )
        first = min(layers - 1, round(_SHALLOW_SHARE * layers) + 2)
        return [(CutStage(self, layer - first, layer), budget) for layer in range(first, layers)]

    def select(self, tokens: VisualTokens) -> Selection:
        contribution, cosine = self._compute_contributions(tokens)
        has_started, calm = tokens.carry.get("has_started"), tokens.carry.get("calm")
        has_started = torch.zeros_like(tokens.budget, dtype=torch.bool) if has_started is None else has_started
        calm = torch.zeros_like(tokens.budget) if calm is None else calm
        valid = tokens.mask & cosine.isfinite()
        turns = (valid & (cosine < self.turns)).any(1)
        num_important = (valid & (contribution > self.part)).sum(1).clamp(min=1)
        important = top_mask(contribution, tokens.mask, torch.minimum(num_important, tokens.budget), max(tokens.keep))

        calm = calm + (has_started & (~valid | (cosine >= _CALM_COSINE)).all(1))
        starts = ~has_started & turns
        keep = torch.where(starts[:, None], important, tokens.mask) & (calm < _CALM_LAYERS)[:, None]
        tokens.remember("has_started", has_started | turns, per_token=False)
        tokens.remember("calm", calm, per_token=False)
        return Selection(keep)

    def _compute_contributions(self, tokens: VisualTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors (segments, tokens), float32, about the layer before the cut.

        Returns:
            The norm of each token's contribution to the output for the last token, and the cosine between this output
            with and without the contribution.
        """
        attention, output = tokens.last_row_attention, tokens.last_row_output.float()  # [S, H, N], [S, H, D]
        values = tokens.value_heads.float()  # [S, N, Hkv, D], grouped-query attention
        group = attention.shape[1] // values.shape[2]
        square = values.square().sum(3).transpose(1, 2).repeat_interleave(group, dim=1)
        square = (attention.square() * square).sum(1)
        products = torch.einsum("snhd,shgd->shgn", values, output.unflatten(1, (-1, group))).flatten(1, 2)
        projection = (attention * products).sum(1)
        output_square = output.square().sum((1, 2))[:, None]
        square_without = (output_square - 2 * projection + square).clamp(min=0)
        tiny = torch.finfo(torch.float32).tiny
        return square.sqrt(), (output_square - projection) / (square_without.sqrt() * output_square.sqrt()).clamp(
            min=tiny
        )
