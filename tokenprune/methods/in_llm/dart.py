# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge

from tokenprune.kernels.match import cosines
from tokenprune.kernels.take import take_in_turn, top_mask
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("dart", site=Site.IN_LLM, needs=("keys",), paper="arXiv 2502.11494, EMNLP 2025")
@dataclass(frozen=True)
class Dart(Pruner):
    """Keep the visual tokens that least duplicate a few pivot tokens, after the first decoder layers.

    Pivots are the visual tokens, and the text tokens after the image, whose keys have the largest L1 norm. In turn
    each pivot takes its share of the remaining visual tokens: those least similar to it by cosine of the final-normed
    hidden states. Needs no attention weights.

    layer: int >= 1, the decoder layer at whose input the cut is made; keys come from the layer before it.
    pivot_image, pivot_text: how many pivots of either kind. With pivot_text=0 the choice knows nothing of the question,
    since no visual token sees later text in a causal decoder: it is then safe with a prefix cache.
    exact: True keeps exactly what `keep` asks for: the image pivots count, and what is left is shared evenly, earlier
    pivots getting one more. False keeps the authors' count, pivot_image + P * (keep // P) with P pivots, which is up to
    pivot_image more.

    Source: Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More",
    section 3, and the authors' code where the two differ (fixed shares instead of a threshold; text pivots; the final
    norm).

    Differs from the paper: exact counts by default; pivots go in order of descending norm, image pivots first (the
    authors iterate over a Python set, an arbitrary order); norms and cosines in float32; shares are clamped to what is
    left (the authors' code fails); every image has pivots of its own, and text pivots come from the text after it.
    """

    query_free: ClassVar[Mapping[str, Any]] = {"pivot_text": 0}

    layer: Annotated[int, Ge(1)] = 2
    pivot_image: Annotated[int, Ge(1)] = 4
    pivot_text: Annotated[int, Ge(0)] = 4
    exact: bool = True

    @property
    def query_aware(self) -> bool:
        return self.pivot_text > 0

    def resolve_count(self, count: int, keep: int) -> int:
        pivots = self.pivot_image + self.pivot_text
        return keep if self.exact else self.pivot_image + pivots * (keep // pivots)

    def select(self, tokens: VisualTokens) -> Selection:
        kept, pivots, exists = self._pivots(tokens)
        # How many tokens each pivot adds: an even share of what the image pivots leave, the remainder to the first
        # ones.
        left, turn = (tokens.budget - kept.sum(1))[:, None], exists.cumsum(1)
        number = turn[:, -1:].clamp(min=1)
        share = (left + number - turn).div(number, rounding_mode="floor") * exists
        similarity = cosines(tokens.normed, pivots)  # [S, N, P]
        added = take_in_turn(-similarity.transpose(1, 2), tokens.mask ^ kept, share, max(tokens.keep))
        return Selection(kept | added, counts=tokens.keep)

    def _pivots(self, tokens: VisualTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the image pivots (bool `[S, N]`), and all pivots' states `[S, P, D]` with which of them exist (`[S,
        P]`)."""
        image_norm = torch.linalg.vector_norm(tokens.keys, ord=1, dim=-1, dtype=torch.float32)
        kept = top_mask(image_norm, tokens.mask, tokens.budget.clamp(max=self.pivot_image), self.pivot_image)
        order = image_norm.masked_fill(~kept, -1).argsort(dim=1, descending=True, stable=True)[:, : self.pivot_image]
        exists = kept.gather(1, order)
        states = tokens.normed.gather(1, order.unsqueeze(-1).expand(-1, -1, tokens.normed.shape[-1]))
        if self.pivot_text == 0:
            return kept, states, exists
        text = tokens.text
        text_norm = torch.linalg.vector_norm(text.keys, ord=1, dim=-1, dtype=torch.float32).masked_fill(~text.mask, -1)
        order = text_norm.argsort(dim=1, descending=True, stable=True)[:, : self.pivot_text]
        text_states = tokens.final_norm(text.hidden)
        text_states = text_states.gather(1, order.unsqueeze(-1).expand(-1, -1, text_states.shape[-1]))
        exists = torch.cat([exists, text.mask.gather(1, order)], dim=1)
        return kept, torch.cat([states, text_states], dim=1), exists
