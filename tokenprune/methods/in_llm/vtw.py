# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.methods.registry import register
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.tokens import VisualTokens


@register("vtw", site=Site.IN_LLM, paper="arXiv 2405.05803, AAAI 2025")
@dataclass(frozen=True)
class Vtw(Pruner):
    """Withdraw all visual tokens at one decoder layer (VTW).

    `keep` is the average number of tokens over the decoder's layers, rounded down to whole layers. The default 0.47
    gives the paper's 15 layers of 32, as does keep=15/32. Budgets that depend on the size of an image withdraw each
    image at its own layer.

    Source:
        Lin et al., "Boosting Multimodal Large Language Models with Visual Tokens Withdrawal for Rapid Inference" (arXiv
        2405.05803), section 3, and the authors' code. Text tokens keep their positions, as in the code's default.

    Differences from the paper:
        - The layer follows from `keep`. The paper searches it by the KL divergence of the first answer token.
          `tokenprune tune` finds the smallest `keep` that preserves a model's accuracy.

    Examples:
        >>> model = tokenprune.patch(model, Vtw(), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_per_layer
        [256, 256, 256, 0, 0, 0]
    """

    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.47
    min_tokens: ClassVar[int] = 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.is_identity():
            return [(_Withdrawal(1), budget)]
        if budget.target in ("keep", "average_share"):
            layer = _round_down(budget, layers * budget.amount)
            return [(_Withdrawal(layer), _LayerBudget.from_budget(budget, layer))]
        # The layer depends on the prompt's sizes, so a stage at each layer resolves the budget in the forward.
        return [(_Withdrawal(layer), _LayerBudget.from_budget(budget)) for layer in range(1, layers)]


@dataclass(frozen=True)
class _Withdrawal(Pruner):
    """Keep or drop all tokens of an image at decoder layer `layer`, as its budget requires."""

    never_nan: ClassVar[bool] = True
    name: ClassVar[str] = "vtw"
    site: ClassVar[Site] = Site.IN_LLM
    min_tokens: ClassVar[int] = 0

    layer: int

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return torch.zeros_like(tokens.mask, dtype=torch.float32)


@dataclass(frozen=True, repr=False)
class _LayerBudget(Budget):
    """Budget that keeps all tokens of an image until the layers have spent it, then none.

    Args:
        layer: First layer without visual tokens, if it is already known.
    """

    layer: int | None = None

    @staticmethod
    def from_budget(budget: Budget, layer: int | None = None) -> _LayerBudget:
        return _LayerBudget(**budget.init_values(), layer=layer)

    def resolve(
        self, counts: Sequence[int], *, layer: int, shape: DecoderShape, text_tokens: int,
        original: Sequence[int] | None = None,
    ) -> list[int]:  # fmt: skip
        layers_per_image = [self._count_layers(count, counts, shape, text_tokens) for count in counts]
        return [count if layer < num_layers else 0 for count, num_layers in zip(counts, layers_per_image, strict=True)]

    def _count_layers(self, count: int, counts: Sequence[int], shape: DecoderShape, text: int) -> int:
        """Return the number of layers that see an image of `count` tokens. `counts` are the images of the prompt."""
        if self.layer is not None:
            return self.layer
        if self.target == "kv_share":
            available, widths = self.amount * sum(shape.kv_widths), shape.kv_widths
            return _round_down(
                self, sum(sum(widths[: num_layers + 1]) <= available + 1e-9 for num_layers in range(shape.layers))
            )
        if self.target == "flops_share":
            all_tokens = text + sum(counts)
            unpruned = shape.prefill_flops([all_tokens] * shape.layers)
            spent = [
                shape.prefill_flops([all_tokens] * num_layers + [text] * (shape.layers - num_layers))
                for num_layers in range(1, shape.layers + 1)
            ]
            return _round_down(self, sum(flops <= self.amount * unpruned for flops in spent))
        return _round_down(self, shape.layers * float(self.amount) / count)


def _round_down(budget: Budget, layers: float) -> int:
    if layers + 1e-9 < 1:
        raise BudgetError(f"vtw cannot meet {budget}: a single layer exceeds it. Pass a larger budget.")
    return int(layers + 1e-9)
