# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.methods.fitted import FittedTable, LazyFit
from tokenprune.methods.registry import register
from tokenprune.methods.scores import rescale
from tokenprune.selection.method import Pruner, Site
from tokenprune.selection.tokens import VisualTokens


class HeadWeights(FittedTable):
    """The weight of each attention head: float32 `[H]`."""

    kind = "tokenprune head weights"
    command = "fit hawk"
    dims = 1

    def __str__(self) -> str:
        return f"{len(self.table)} heads; head {int(self.table.argmax())} weighs most, {self.table.max():.2g} of all"


@register("hawk", site=Site.PRE_LLM, needs=("first_layer_scores",), paper="arXiv 2604.07812, CVPR 2026")
@dataclass(frozen=True)
class Hawk(Pruner):
    """Keep the visual tokens that the text after their image asks for in the decoder's first layer, by heads that
    matter more or less (HAWK).

    A head's scores are the products of the mean query of the text and the keys of the visual tokens, without rotation
    and softmax. Each head's scores get one scale over an image, and are added with the head's weight. No layer runs.

    weights: a list of a number >= 0 for each query head of the first layer; a common factor changes nothing. None: all
    weigh the same, which is FastV's idea without rotation, and not the paper's method.
    norm: "l2" divides a head's scores by their length over the image, "minmax" stretches them from 0 to 1, "softmax"
    makes shares of them.
    heads: path of a file that `tokenprune fit hawk` made for the model, in place of `weights`.

    Source: "HAWK: Head Importance-Aware Visual Token Pruning in Multimodal Models", the authors' code.

    Differs from the paper: the authors measure the weights by dropping heads over benchmarks, and release those of one
    checkpoint, which are not shipped here; `tokenprune fit hawk` goes by what the model's own answers lose without each
    head. Each image has a budget, a text of all that comes after it, and a scale of its own; there all images of a
    prompt compete, and the text is the instruction after the last one. Counts are rounded half up (there up). The
    paper's text was not read.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    fit = LazyFit("tokenprune_bench.calibration.head_fitting", "fit_hawk")
    fit_question: ClassVar[str | None] = None  # answers about what the image shows

    weights: Sequence[Annotated[float, Ge(0)]] | None = None
    norm: Literal["l2", "softmax", "minmax"] = "l2"
    heads: str | Path | None = field(default=None, metadata={"file": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.weights is None or (any(self.weights) and all(map(math.isfinite, self.weights)))
        self._check(good, f"weights={self.weights!r} must be one number for each head, and not all 0")
        self._check(self.weights is None or self.heads is None, "weights and heads are two ways to say one thing")
        self._fitted  # noqa: B018 (a file that cannot be read is said here)

    @cached_property
    def _fitted(self) -> HeadWeights | None:
        return None if self.heads is None else HeadWeights.load(self.heads)

    @cached_property
    def _weights(self) -> Sequence[float] | None:
        return self.weights if self._fitted is None else self._fitted.table.tolist()

    def check_model(self, decoder: torch.nn.Module) -> None:
        first = decoder.layers[0]  # type: ignore[index]
        attention: Any = getattr(first, "self_attn", None)
        if not (hasattr(first, "input_layernorm") and hasattr(attention, "q_proj") and hasattr(attention, "k_proj")):
            raise OptionError(
                f"{self.name} reads the queries and keys of the decoder's first layer, and this one has no "
                "input_layernorm and self_attn with q_proj and k_proj; use fastv, or cdpruner before the decoder"
            )
        if any(hasattr(weight, "placements") for weight in attention.parameters()):
            raise UnsupportedSetupError(
                f"{self.name} reads all heads of the decoder's first layer, which several processes share here; use "
                "cdpruner, which reads none"
            )
        if self._fitted is not None and self.heads is not None:
            self._fitted.check_decoder(self.name, self.heads, decoder)
        heads = attention.q_proj.out_features // attention.head_dim
        if self.weights is not None and len(self.weights) != heads:
            raise OptionError(f"{self.name}: weights are of {len(self.weights)} heads, and this decoder has {heads}")

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        scores = tokens.first_layer_scores.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        scaled = self._scaled(scores, tokens.mask.unsqueeze(1))
        if self._weights is None:
            return scaled.mean(1)
        weights = scaled.new_tensor(self._weights) / max(self._weights)
        return (scaled * weights[:, None]).sum(1)

    def _scaled(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float32 `[S, H, N]`: each head's scores on one scale over an image. mask: bool `[S, 1, N]`."""
        if self.norm == "softmax":
            return scores.masked_fill(~mask, -torch.inf).softmax(2)
        if self.norm == "minmax":
            return torch.stack([rescale(head, mask[:, 0]) for head in scores.unbind(1)], dim=1)
        length = scores.masked_fill(~mask, 0).norm(dim=2, keepdim=True)
        return scores / length.clamp(min=torch.finfo(torch.float32).tiny)
