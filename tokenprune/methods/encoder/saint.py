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

_ROUND = 16  # a part of this of what is left leaves in a round
_SHARPNESS = 10  # of the similarity to partners, against their number


@register("saint", site=Site.IN_ENCODER, paper="arXiv 2503.11549")
@dataclass(frozen=True)
class SAINT(EncoderMethod):
    """Drop the tokens whose keys are most like all others, between attention and MLP of an early block of the vision
    tower, so that the tower itself gets cheaper.

    A token's score is the sum of the cosines of its key, mean over the heads, with those of all that are left, itself
    included. Round by round a sixteenth of these, at least one, leaves with the highest score, until exactly `keep` of
    an image is left, and of a video in each frame alike. So the most typical tokens go first. Class tokens stay. Where
    several patches become one visual token, they leave as one, by their keys end to end; keys are those before rotary
    places.

    layer: index of the block; None: an eighth of the tower's depth.
    threshold: similarity from which two tokens are partners, such as 0.7. With it the content decides: patches at even
    places, that have at least `partners` among those at odd places, leave at once, and `keep` is an upper bound, down
    to which the rounds go on where more are left. keep=1000000 bounds nothing.
    partners: int, with `threshold` alone.

    Source: "Similarity-Aware Token Pruning: Your VLM but Faster", the full graph, and with `threshold` the bipartite
    one. The paper itself could not be read beyond its first page: the algorithm is that of the authors' code.

    Differs from the authors' code: the share that leaves in a round is constant, where theirs overwrites it by the
    round before, so that it grows, and may come to nothing and never end; any image of a batch decides for itself,
    where their count is the mean of the batch; one block drops, where theirs are a list; what is left keeps its order;
    units, the bound and the block are ours.
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
        return None if self.threshold is None else "threshold lets the content decide. Leave threshold out."

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return what drops in the one block that does; raise OptionError for a block that nobody reads."""
        layer, left = tower.blocks // 8 if self.layer is None else self.layer, tower.count_kept(budget)
        self._check(
            layer < tower.blocks_read,
            f"the model reads {tower.blocks_read} blocks of its vision tower, no block {layer}",
        )
        plan: list[Matcher | None] = [None] * tower.blocks
        if self.threshold is not None or left < tower.patches:
            plan[layer] = partial(self._match, left, tower.protected)
        return plan

    def _match(self, left: int, protected: int, keys: Tensor, counts: list[int] | None) -> Merge | None:
        """Return what drops all patches but `left`, or with `threshold` at most these. No row has padding: this block
        is the only one that drops."""
        # In float64 equal tokens, and the last two, have equal scores but for steps of `TIE`, in a batch as alone.
        unit = torch.nn.functional.normalize(keys[:, protected:].double().nan_to_num(0.0, 0.0, 0.0), dim=-1)
        stays = unit.new_ones(unit.shape[:2], dtype=torch.bool)
        if self.threshold is not None:
            stays[:, ::2] = ~_alike(unit.float(), self.threshold, self.partners)
        number = [stays.shape[1]] * len(stays) if self.threshold is None else stays.sum(1).tolist()
        while max(number) > left:
            leave = [max(0, min(one - left, max(1, one // _ROUND))) for one in number]
            total = stays.to(unit.dtype)[:, None] @ unit  # whose product with a key is the sum of its cosines
            score = (unit @ total.transpose(1, 2)).squeeze(2) / max(number)
            score = (score / TIE).round()
            stays = stays & ~top_mask(score, stays, to_device(leave, unit.device), max(leave))
            number = [one - gone for one, gone in zip(number, leave, strict=True)]
        if min(number) == stays.shape[1]:
            return None
        first = stays.new_ones(len(stays), protected)
        return Merge.from_kept(torch.cat([first, stays], dim=1), [one + protected for one in number])


def _alike(unit: Tensor, threshold: float, partners: int) -> Tensor:
    """Return which of the tokens at even places leave, bool `[B, n]`: as many as have `partners`. unit: `[B, N, D]`."""
    cosine = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    cosine = (cosine / TIE).round() * TIE
    valid = cosine >= threshold
    found = valid.sum(2)
    mean = cosine.masked_fill(~valid, 0).sum(2) / found.clamp(min=1)
    score = torch.where(found > 0, found * (_SHARPNESS * (mean - threshold)).exp(), cosine.mean(2))
    count = (found >= partners).sum(1)
    return top_mask(score, torch.ones_like(score, dtype=torch.bool), count, score.shape[1])
