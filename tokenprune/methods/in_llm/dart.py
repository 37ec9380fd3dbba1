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
    """Keep the tokens that duplicate a few pivot tokens least (DART).

    Pivots are the visual tokens, and the text tokens after the image, with the largest L1 norm of their keys. Each
    pivot in turn takes an equal share of the remaining visual tokens: the tokens with the lowest cosine similarity to
    the pivot. The similarity uses hidden states after the decoder's final norm. The method reads no attention weights.

    Args:
        layer: First decoder layer that runs on the kept tokens. The layer before it provides the keys.
        pivot_image: Number of visual pivots. They are kept.
        pivot_text: Number of text pivots. With 0 the selection does not depend on the question, so it is safe with a
            prefix cache: in a causal decoder no visual token sees later text.
        exact: Keep exactly `keep` tokens, including the visual pivots; earlier pivots take the remainder of an uneven
            division. False: keep the authors' count, pivot_image + P * (keep // P) for P pivots.

    Source:
        Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More" (arXiv
        2502.11494), section 3. The authors' code decides where the two differ: fixed shares instead of a threshold,
        text pivots, and the final norm.

    Differences from the paper:
        - Counts are exact by default.
        - Pivots are processed by descending norm, visual pivots first. The authors iterate over a Python set.
        - Norms and cosines are computed in float32.
        - A share is clamped to the remaining tokens. The authors' code fails.
        - Each image has its own pivots. Text pivots come from the text after the image.

    Examples:
        >>> model = tokenprune.patch(model, Dart(layer=2, pivot_text=0), keep=0.25)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        64
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
        kept, pivots, exists = self._find_pivots(tokens)
        # Tokens that each pivot adds: an equal share of the rest of the budget. Earlier pivots take the remainder.
        rest, turn = (tokens.budget - kept.sum(1))[:, None], exists.cumsum(1)
        num_pivots = turn[:, -1:].clamp(min=1)
        share = (rest + num_pivots - turn).div(num_pivots, rounding_mode="floor") * exists
        similarity = cosines(tokens.normed, pivots)  # [S, N, P]
        added = take_in_turn(-similarity.transpose(1, 2), tokens.mask ^ kept, share, max(tokens.keep))
        return Selection(kept | added, counts=tokens.keep)

    def _find_pivots(self, tokens: VisualTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the visual pivots, and the states of all pivots.

        Returns:
            Mask of visual pivots (segments, tokens), states of all pivots (segments, pivots, hidden size), and mask of
            the pivots that exist (segments, pivots).
        """
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
