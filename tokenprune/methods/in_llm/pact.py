# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.budgets import Budget
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairs import Products, rounded, unit
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LAYER = 4 / 28  # of the layers of the model that the authors' numbers are for, before the one that rates
_DENSITY = 2.0  # distance at which a token counts 1/e for how dense it is around another
_ROOM = 1.5  # tokens in clusters, at least, for each that is to be kept
_HALVINGS = 16  # of the range of cutoffs that is searched


@register(
    "pact", site=Site.IN_LLM, needs=("mean_query_attention", "keys", "previous_hidden"),
    paper="arXiv 2504.08966, CVPR 2025", merges=True,
)  # fmt: skip
@dataclass(frozen=True)
class PACT(Pruner):
    """Leave out the tokens that nothing asks for, and cluster the others by their keys, each cluster within a fixed
    distance of its centre, which becomes the cluster's mean (PACT).

    A token matters by what the mean query of all tokens up to the image's end attends to, without rotation, times the
    length of its hidden state. Of those that matter, visited by falling density, a token is a centre if none so far is
    within the cutoff, by cosine distance of rotated keys. Each joins the nearest centre; so does a token that was left
    out, if it is near enough. The choice knows nothing of the question, and reads no attention weights.

    keep: exact; the smallest cutoff is looked for that leaves at least so many centres, and of those the least dense
    go. At least `share` of the tokens, or one and a half times `keep`, are clustered.
    layer: int >= 1, the decoder layer at whose input the cut is made, by queries, keys and input of the layer before
    it; None: after layer 4 of 28, counted from 0.
    share: in (0, 1], how many of an image's tokens matter.
    cutoff: distance in [0, 2]; the image then decides how many tokens stay, whatever `keep` says, unless that is all of
    them (the authors have 0.21). None: by `keep`.
    reach: how many cutoffs away from a centre a token that was left out may be to join it; 0 drops all but copies.

    Source: "PACT: Pruning and Clustering-Based Token Reduction for Faster Visual Language Models", the authors' code.

    Differs from the paper: attention does not know how many tokens a merged one stands for (the logarithm of that
    number is added to its logits there, in this and all later layers; the code has a switch for that); an exact number
    by default; the cut is one layer later, where queries and keys are there anyway, so that means are of what the
    layer makes of them; each image is by itself, and its mean query is of the tokens up to its own end (there all
    images and videos are one pool). The paper's text was not read.
    """

    asks_device: ClassVar[bool] = True

    layer: Annotated[int, Ge(1)] | None = None
    share: Annotated[float, Gt(0), Le(1)] = 0.55
    cutoff: Annotated[float, Ge(0), Le(2)] | None = None
    reach: Annotated[float, Ge(0)] = 1.5

    @property
    def by_content_count(self) -> bool:
        return self.cutoff is not None

    @property
    def cut_layer(self) -> int:
        return self.layer or 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        layer = self.layer or max(1, min(layers - 1, round(_LAYER * layers) + 1))
        return [(dataclasses.replace(self, layer=layer), budget)]

    def select(self, tokens: VisualTokens) -> Selection:
        weight = tokens.previous_hidden.float().norm(dim=2)
        score = (tokens.mean_query_attention.float().mean(1) * weight).nan_to_num(nan=-torch.inf)
        itself = torch.arange(score.shape[1], device=score.device)
        assign = torch.full_like(tokens.mask, -1, dtype=torch.long)
        for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            if keep == count:
                assign[row, :count] = itself[:count]
            else:
                assign[row, :count] = self._of_image(score[row, :count], unit(tokens.keys[row, :count]), keep)
        counts = None if self.by_content_count else tokens.keep
        return Selection(assign == itself, assign, counts=counts)

    def _of_image(self, score: torch.Tensor, keys: torch.Tensor, keep: int) -> torch.Tensor:
        """long `[n]`: the centre that each of an image's tokens joins, -1 where it joins none. score: `[n]`; keys: `[n,
        D]`, of length 1."""
        count, device = len(score), score.device
        share = self.share if self.by_content_count else min(1.0, max(self.share, _ROOM * keep / count))
        number = max(1, int(share * count))
        everything = torch.ones_like(score, dtype=torch.bool)[None]
        matters = top_mask(score[None], everything, to_device([number], device), number)[0]
        place = matters.nonzero().flatten()
        dense = Products(keys[None, place], round_=True).of_rows(_density)[0]
        # From here on by falling density, of equal ones the first.
        place = place[dense.argsort(descending=True, stable=True)]
        alike = Products(keys[None, place], round_=True)
        cutoff = self._cutoff(alike, keep)
        centre = find_centres(alike, cutoff)
        if not self.by_content_count:
            # Copies are one centre at any cutoff: where that is too few, the densest others are centres as well.
            rank = torch.where(centre, 0, len(place)) + torch.arange(len(place), device=device)
            centre = torch.zeros_like(centre).index_fill_(0, rank.argsort()[:keep], True)
        target, _ = place[centre].sort()
        best, nearest = (one[0] for one in best_match(keys[None], keys[None, target]))
        joins = matters | (1 - rounded(best) <= self.reach * cutoff)
        assign = torch.where(joins, target[nearest], -1)
        return assign.index_copy(0, target, target)

    def _cutoff(self, alike: Products, keep: int) -> float:
        """Return the largest cutoff that bisection finds at which at least `keep` tokens are centres, 0 if there is
        none. alike: cosines, by falling density."""
        if self.cutoff is not None:
            return self.cutoff
        low, high = 0.0, 2.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            number = int(find_centres(alike, middle).sum())
            low, high = (middle, high) if number >= keep else (low, middle)
            if number == keep:
                break
        return low


def _density(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
    """float64 `[n]`: how many tokens are near, each counting the less the farther it is. rows: cosines `[n, m]`."""
    return torch.exp(-((1 - rows).clamp(min=0) / _DENSITY).square()).sum(1, dtype=torch.float64)


def find_centres(alike: Products, cutoff: float) -> torch.Tensor:
    """bool `[m]`: tokens, in their order, of which none before them is within the cutoff that is one itself. alike:
    cosines `[1, m, m]`. Waits for the device."""
    found = torch.zeros(alike.shape[1], dtype=torch.bool, device=alike.a.device)

    def block(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
        near, own = 1 - rows <= cutoff, slice(start, start + len(rows))
        found[own] = select_in_rounds(near[:, own], ~(near[:, :start] & found[:start]).any(1))
        return found[own]

    return alike.of_rows(block)[0]


def select_in_rounds(near: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """bool `[m]`: tokens out of `left` (bool `[m]`), in their order, that are near to none that is so before them.

    near: bool `[m, m]`, symmetric. In rounds, each of all tokens that no token before them can bar any more.
    """
    earlier, centre = near.tril(-1), torch.zeros_like(left)
    while bool(left.any()):
        new = left & ~(earlier & left).any(1)
        centre = centre | new
        left = left & ~near[:, new].any(1) & ~new
    return centre
