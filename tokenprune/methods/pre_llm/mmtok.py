# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.coverage import cosine_products, greedy_cover
from tokenprune.kernels.pairs import Products, Relation, normalize
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("mmtok", site=Site.PRE_LLM, paper="arXiv 2508.18264, ICLR 2026")
@dataclass(frozen=True)
class MMTok(Pruner):
    """Keep tokens that cover the question's words and the whole image.

    Each text token after the image, and each visual token, distributes itself over the visual tokens by a softmax of
    cosines. It is covered by its largest share among the picks. Each pick adds most to the sum of coverages.

    Args:
        alpha: Weight of the visual tokens' coverage, relative to the text's.
        text_temperature: Softmax temperature of text tokens.
        temperature: Softmax temperature of visual tokens.
        features: Features that compare visual tokens with each other: "tower" is the tower's output before the
            projector, "projected" the input of the language model.
        question: False ignores the text, and the choice does not depend on the question.

    Source:
        "MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs" (arXiv 2508.18264), method section and
        the authors' code.

    Differences from the paper:
        - The text is everything after the image, token by token. The authors' LLaVA code splits it into words, and
          omits English stop words and the prompts of two benchmarks.
        - Without text, only the image is covered.
        - Tokens of a padded image's border can be kept.
        - Each image is pruned by itself.
        - Kept tokens keep their positions in the prompt.
        - The default `text_temperature` is the authors' for LLaVA. They use 0.01 for Qwen2.5-VL.

    Examples:
        >>> model = tokenprune.patch(model, MMTok(alpha=1.0), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    query_free: ClassVar[Mapping[str, Any]] = {"question": False}
    fallback_options: ClassVar[Mapping[str, Any]] = {"features": "projected"}

    alpha: Annotated[float, Ge(0)] = 0.5
    text_temperature: Annotated[float, Gt(0)] = 0.02
    temperature: Annotated[float, Gt(0)] = 0.2
    features: Literal["tower", "projected"] = "tower"
    question: bool = True

    @property
    def query_aware(self) -> bool:
        return self.question

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_features"} if self.features == "tower" else set())

    def select(self, tokens: VisualTokens) -> Selection:
        x, mask, max_tokens = tokens.hidden, tokens.mask, max(tokens.keep)
        features = tokens.encoder_features if self.features == "tower" else x
        text, text_mask = (tokens.text.hidden, tokens.text.mask) if self.question else (x[:, :0], mask[:, :0])

        def pick_rows(
            x: torch.Tensor,
            features: torch.Tensor,
            mask: torch.Tensor,
            num_kept: torch.Tensor,
            text: torch.Tensor,
            text_mask: torch.Tensor,
        ) -> torch.Tensor:
            text_coverage = build_softmax_relation(
                Products(normalize(text), normalize(x, mask)), self.text_temperature, 1.0, mask, text_mask
            )
            image_coverage = build_softmax_relation(
                cosine_products(features, mask), self.temperature, self.alpha, mask, mask
            )
            return greedy_cover([text_coverage, image_coverage], mask, num_kept, max_tokens)

        entries = 3 * x.shape[1] * (x.shape[1] + text_mask.shape[1])
        return Selection(
            map_rows(pick_rows, entries, x, features, mask, tokens.budget, text, text_mask), counts=tokens.keep
        )


def build_softmax_relation(
    products: Products, temperature: float, weight: float, mask: torch.Tensor, rows: torch.Tensor
) -> Relation:
    """Return the relation between rows and candidates: the softmax of each row over its candidates.

    Shares are multiplied by `weight` and divided by the number of valid rows. Invalid rows are 0.

    Args:
        products: Cosines of rows and candidates.
        temperature: Temperature of the softmax.
        weight: Total weight of the rows.
        mask: Valid candidates, bool (S, N).
        rows: Valid rows, bool (S, R).
    """

    def compute_log_sum(x: torch.Tensor, segment: int, start: int) -> torch.Tensor:
        return (x / temperature).masked_fill_(~mask[segment], -torch.inf).logsumexp(1)

    normalizer = products.reduce_rows(compute_log_sum)
    row_weight = weight * rows.float() / rows.sum(1, keepdim=True).clamp(min=1)
    return Relation(
        products,
        lambda x, normalizer, row_weight: (x / temperature - normalizer).exp() * row_weight,
        normalizer,
        row_weight,
    )
