# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.kernels.match import TIE
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.encoder import EncoderMethod, Matcher, Tower

if TYPE_CHECKING:
    from torch import Tensor

_ROUND_DIVISOR = 16  # a round drops 1/16 of the remaining tokens
_SHARPNESS = 10  # weight of the similarity of partners against their number


@register("saint", site=Site.IN_ENCODER, paper="arXiv 2503.11549")
@dataclass(frozen=True)
class SAINT(EncoderMethod):
    """Drop the tokens most similar to all others in an early tower block (SAINT).

    The score of a token is the sum of its key's cosines (averaged over heads) with all remaining tokens, including
    itself. In each round, a sixteenth of the remaining tokens (at least one) with the highest scores is dropped, until
    exactly `keep` tokens of an image, or of each frame of a video, remain. So the most typical tokens go first. Tokens
    are dropped between attention and MLP, and the later blocks of the tower run on the rest. Class tokens are kept. If
    several patches form a visual token, they are dropped together, by their concatenated keys before rotary embeddings.

    Args:
        layer: Index of the block that drops tokens. None: an eighth of the tower's depth.
        threshold: Similarity from which two tokens are partners, such as 0.7. If set, the content decides the count:
            tokens at even positions with at least `partners` partners at odd positions are dropped at once. `keep` is
            then an upper bound, met by further rounds; keep=1000000 sets no bound.
        partners: Required number of partners. Only with `threshold`.

    Source:
        "Similarity-Aware Token Pruning: Your VLM but Faster" (arXiv 2503.11549), the full graph, and the bipartite
        graph with `threshold`, from the authors' code. Only the first page of the paper was available.

    Differences from the paper:
        - The share dropped per round is constant. The code overwrites it with the previous round's share, so that it
          grows, or reaches zero and never ends.
        - With `threshold`, each image has its own count. The code uses the mean of the batch.
        - One block drops tokens. The code has a list of blocks.
        - Kept tokens keep their order.
        - Units, the upper bound, and the default block are additions.

    Examples:
        >>> model = tokenprune.patch(model, SAINT(layer=1), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        128
    """

    proportional, drops = False, True

    layer: Annotated[int, Ge(0)] | None = None
    threshold: Annotated[float, Ge(-1)] | None = None
    partners: Annotated[int, Ge(1)] = 5

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return self.threshold is not None

    @property
    def inexact(self) -> str | None:
        return None if self.threshold is None else "With threshold, the content decides the count. Leave threshold out."

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return a matcher for the block that drops tokens, and None for the others.

        Raises:
            OptionError: If the model does not read the block.
        """
        layer, num_kept = tower.blocks // 8 if self.layer is None else self.layer, tower.count_kept(budget)
        self._check(
            layer < tower.blocks_read,
            f"layer={layer} is not read: the model reads {tower.blocks_read} blocks of its tower.",
        )
        plan: list[Matcher | None] = [None] * tower.blocks
        if self.threshold is not None or num_kept < tower.patches:
            plan[layer] = partial(self._match, num_kept, tower.protected)
        return plan

    def _match(self, max_kept: int, protected: int, keys: Tensor, counts: list[int] | None) -> Merge | None:
        """Return a merge plan that keeps `max_kept` patches, or fewer if a threshold is set.

        Rows have no padding, because no other block drops tokens.
        """
        # In float64, rounded to steps of `TIE`, equal tokens have equal scores, independent of the batch.
        unit = torch.nn.functional.normalize(keys[:, protected:].double().nan_to_num(0.0, 0.0, 0.0), dim=-1)
        kept = unit.new_ones(unit.shape[:2], dtype=torch.bool)
        if self.threshold is not None:
            kept[:, ::2] = ~_find_partners(unit.float(), self.threshold, self.partners)
        num_kept = [kept.shape[1]] * len(kept) if self.threshold is None else kept.sum(1).tolist()
        while max(num_kept) > max_kept:
            to_drop = [max(0, min(count - max_kept, max(1, count // _ROUND_DIVISOR))) for count in num_kept]
            total = kept.to(unit.dtype)[:, None] @ unit  # its product with a key is the sum of cosines
            score = (unit @ total.transpose(1, 2)).squeeze(2) / max(num_kept)
            score = (score / TIE).round()
            kept = kept & ~top_mask(score, kept, to_device(to_drop, unit.device), max(to_drop))
            num_kept = [count - num_dropped for count, num_dropped in zip(num_kept, to_drop, strict=True)]
        if min(num_kept) == kept.shape[1]:
            return None
        first = kept.new_ones(len(kept), protected)
        return Merge.from_kept(torch.cat([first, kept], dim=1), [count + protected for count in num_kept])


def _find_partners(unit: Tensor, threshold: float, partners: int) -> Tensor:
    """Return the dropped tokens at even positions, shape (B, n), bool. `unit` are the normalised keys (B, N, D)."""
    cosine = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    cosine = (cosine / TIE).round() * TIE
    is_partner = cosine >= threshold
    num_partners = is_partner.sum(2)
    mean = cosine.masked_fill(~is_partner, 0).sum(2) / num_partners.clamp(min=1)
    score = torch.where(num_partners > 0, num_partners * (_SHARPNESS * (mean - threshold)).exp(), cosine.mean(2))
    count = (num_partners >= partners).sum(1)
    return top_mask(score, torch.ones_like(score, dtype=torch.bool), count, score.shape[1])
