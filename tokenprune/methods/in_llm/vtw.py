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
    """Withdraw all visual tokens at one layer of the decoder: the layers after it see text alone (VTW).

    keep: tokens averaged over the decoder's layers, as near below it as whole layers allow; 0.47 (default) are the 15
    layers of 32 of the paper, as keep=15/32 is.

    Source: Lin et al., "Boosting Multimodal Large Language Models with Visual Tokens Withdrawal for Rapid Inference",
    section 3, and the authors' code. Text keeps its positions, as by default there.

    Differs from the paper: the layer follows from `keep`, and is not searched for by the KL divergence of the first
    answer token; `tokenprune tune` finds the smallest `keep` that a model bears. Budgets that depend on an image's
    size withdraw each image at a layer of its own.
    """

    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.47
    min_tokens: ClassVar[int] = 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.is_identity():
            return [(_Withdrawal(1), budget)]
        if budget.target in ("keep", "average_share"):
            layer = _whole(budget, layers * budget.amount)
            return [(_Withdrawal(layer), _AsLongAs.of(budget, layer))]
        # How long depends on sizes that are known in a call only: it is asked at each layer.
        return [(_Withdrawal(layer), _AsLongAs.of(budget)) for layer in range(1, layers)]


@dataclass(frozen=True)
class _Withdrawal(Pruner):
    """Keeps all tokens of an image, or none, as its budget says. layer: at whose input."""

    never_nan: ClassVar[bool] = True
    name: ClassVar[str] = "vtw"
    site: ClassVar[Site] = Site.IN_LLM
    min_tokens: ClassVar[int] = 0

    layer: int

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return torch.zeros_like(tokens.mask, dtype=torch.float32)


@dataclass(frozen=True, repr=False)
class _AsLongAs(Budget):
    """Keeps all tokens of an image as long as the layers that have run do not spend the budget, and then none.

    layer: from which on, if that is known.
    """

    layer: int | None = None

    @staticmethod
    def of(budget: Budget, layer: int | None = None) -> _AsLongAs:
        return _AsLongAs(**budget.init_values(), layer=layer)

    def resolve(
        self, counts: Sequence[int], *, layer: int, shape: DecoderShape, text_tokens: int,
        original: Sequence[int] | None = None,
    ) -> list[int]:  # fmt: skip
        most_layers = [self._layers(count, counts, shape, text_tokens) for count in counts]
        return [count if layer < most else 0 for count, most in zip(counts, most_layers, strict=True)]

    def _layers(self, count: int, counts: Sequence[int], shape: DecoderShape, text: int) -> int:
        """Return how many layers see an image of `count` tokens, of a prompt's images of `counts`."""
        if self.layer is not None:
            return self.layer
        if self.target == "kv_share":
            left, widths = self.amount * sum(shape.kv_widths), shape.kv_widths
            return _whole(self, sum(sum(widths[: number + 1]) <= left + 1e-9 for number in range(shape.layers)))
        if self.target == "flops_share":
            all_of = text + sum(counts)
            full = shape.prefill_flops([all_of] * shape.layers)
            spent = [
                shape.prefill_flops([all_of] * number + [text] * (shape.layers - number))
                for number in range(1, shape.layers + 1)
            ]
            return _whole(self, sum(one <= self.amount * full for one in spent))
        return _whole(self, shape.layers * float(self.amount) / count)


def _whole(budget: Budget, layers: float) -> int:
    if layers + 1e-9 < 1:
        raise BudgetError(f"{budget} cannot be reached by vtw: one layer alone spends more; ask for more")
    return int(layers + 1e-9)
