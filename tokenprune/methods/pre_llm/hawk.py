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
    """Weight of each attention head, float32 (H,)."""

    kind = "tokenprune head weights"
    command = "fit hawk"
    dims = 1

    def __str__(self) -> str:
        return f"{len(self.table)} heads; head {int(self.table.argmax())} weighs most, {self.table.max():.2g} of all"


@register("hawk", site=Site.PRE_LLM, needs=("first_layer_scores",), paper="arXiv 2604.07812, CVPR 2026")
@dataclass(frozen=True)
class Hawk(Pruner):
    """Keep tokens by the text attention of weighted first-layer heads.

    The score of a head is the product of the text's mean query and the key of a visual token, without rotary embedding
    and softmax. The scores of each head are normalized over the image and added with the head's weight. No decoder
    layer runs for this.

    Args:
        weights: One weight >= 0 for each query head of the first layer. A common factor is ignored. None weights all
            heads equally, which is FastV without rotary embedding and not the paper's method.
        norm: Normalization of a head's scores over the image: "l2" divides by the norm, "minmax" rescales to [0, 1],
            "softmax" takes the softmax.
        heads: Path of a file written by `tokenprune fit hawk`, instead of `weights`.

    Source:
        "HAWK: Head Importance-Aware Visual Token Pruning in Multimodal Models" (arXiv 2604.07812), from the authors'
        code. The text of the paper was not read.

    Differences from the paper:
        - The authors measure the weights by ablating heads on benchmarks and release the weights of one checkpoint,
          which are not shipped. `tokenprune fit hawk` measures the loss of the model's own answers without each head.
        - Each image has its own budget and normalization, and its text is everything after it. In the authors' code all
          images of a prompt compete, and the text is the instruction after the last image.
        - The number of kept tokens is rounded half up. The authors round up.

    Examples:
        >>> model = tokenprune.patch(model, Hawk(norm="softmax"), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    fit = LazyFit("tokenprune_bench.calibration.head_fitting", "fit_hawk")
    fit_question: ClassVar[str | None] = None  # use the question of the drawn scene

    weights: Sequence[Annotated[float, Ge(0)]] | None = None
    norm: Literal["l2", "softmax", "minmax"] = "l2"
    heads: str | Path | None = field(default=None, metadata={"file": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = self.weights is None or (any(self.weights) and all(map(math.isfinite, self.weights)))
        self._check(is_valid, f"weights={self.weights!r} must be one finite number per head, not all 0")
        self._check(self.weights is None or self.heads is None, "pass either weights or heads, not both")
        self._fitted  # noqa: B018 (raise errors of the file early)

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
                f"{self.name} reads the queries and keys of the decoder's first layer, which lacks input_layernorm, "
                "q_proj or k_proj. Use fastv or cdpruner."
            )
        if any(hasattr(weight, "placements") for weight in attention.parameters()):
            raise UnsupportedSetupError(
                f"{self.name} does not support tensor parallelism: it reads all heads of the decoder's first layer. "
                "Use cdpruner."
            )
        if self._fitted is not None and self.heads is not None:
            self._fitted.check_decoder(self.name, self.heads, decoder)
        heads = attention.q_proj.out_features // attention.head_dim
        if self.weights is not None and len(self.weights) != heads:
            raise OptionError(f"{self.name}: weights has {len(self.weights)} heads, but the decoder has {heads}")

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        scores = tokens.first_layer_scores.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        scaled = self._scale_heads(scores, tokens.mask.unsqueeze(1))
        if self._weights is None:
            return scaled.mean(1)
        weights = scaled.new_tensor(self._weights) / max(self._weights)
        return (scaled * weights[:, None]).sum(1)

    def _scale_heads(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Normalize the scores of each head over the image, float32 (S, H, N). mask: bool (S, 1, N)."""
        if self.norm == "softmax":
            return scores.masked_fill(~mask, -torch.inf).softmax(2)
        if self.norm == "minmax":
            return torch.stack([rescale(head, mask[:, 0]) for head in scores.unbind(1)], dim=1)
        norm = scores.masked_fill(~mask, 0).norm(dim=2, keepdim=True)
        return scores / norm.clamp(min=torch.finfo(torch.float32).tiny)
