# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import alike, cover
from tokenprune.kernels.pairs import Products, Relation, unit
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("mmtok", site=Site.PRE_LLM, paper="arXiv 2508.18264, ICLR 2026")
@dataclass(frozen=True)
class MMTok(Pruner):
    """Keep the visual tokens that cover both the words of the question and the image itself best (MMTok).

    Each text token after an image, and each visual token, shares itself out among the visual tokens by a softmax of
    its cosines to them, and is covered as well as its largest share among the picks. The next pick adds most to the
    sum.

    alpha: weight of the visual tokens; that of the text is 1.
    text_temperature, temperature: of the softmax over the cosines of a text token, and of a visual one.
    features: what visual tokens are compared by with each other, "tower" for what the vision tower makes of each patch
    before the projector, "projected" for the tokens as they enter the language model.
    question: False leaves out the text: the choice then knows nothing of the question.

    Source: "MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs", the section on the method, and
    the authors' code.

    Differs from the paper: the text is what stands behind the image, token by token (the LLaVA code leaves out English
    stop words and the prompts of two benchmarks, and splits the text into words); without text the image alone is
    covered; the letterbox of a padded image can be picked; each image is chosen from by itself; tokens keep their
    positions. `text_temperature` is LLaVA's, 0.02; on Qwen2.5-VL the authors have 0.01.
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
        x, mask, most = tokens.hidden, tokens.mask, max(tokens.keep)
        z = tokens.encoder_features if self.features == "tower" else x
        text, words = (tokens.text.hidden, tokens.text.mask) if self.question else (x[:, :0], mask[:, :0])

        def of(
            x: torch.Tensor,
            z: torch.Tensor,
            mask: torch.Tensor,
            number: torch.Tensor,
            text: torch.Tensor,
            words: torch.Tensor,
        ) -> torch.Tensor:
            said = build_softmax_relation(Products(unit(text), unit(x, mask)), self.text_temperature, 1.0, mask, words)
            seen = build_softmax_relation(alike(z, mask), self.temperature, self.alpha, mask, mask)
            return cover([said, seen], mask, number, most)

        entries = 3 * x.shape[1] * (x.shape[1] + words.shape[1])
        return Selection(by_rows(of, entries, x, z, mask, tokens.budget, text, words), counts=tokens.keep)


def build_softmax_relation(
    products: Products, temperature: float, weight: float, mask: torch.Tensor, rows: torch.Tensor
) -> Relation:
    """Return the shares of candidates in each row: its softmax over those of `mask` (bool `[S, N]`) at a temperature,
    times `weight`, by how many rows there are; 0 where `rows` (bool `[S, R]`) is False. products: of length 1."""

    def whole(x: torch.Tensor, segment: int, start: int) -> torch.Tensor:
        return (x / temperature).masked_fill_(~mask[segment], -torch.inf).logsumexp(1)

    total = products.of_rows(whole)
    each = weight * rows.float() / rows.sum(1, keepdim=True).clamp(min=1)
    return Relation(products, lambda x, total, each: (x / temperature - total).exp() * each, total, each)
