# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.budgets import Budget
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairs import Products, normalize, round_cosines
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LAYER = 4 / 28  # the authors' layer, as a share of the decoder's depth
_BANDWIDTH = 2.0  # bandwidth of the Gaussian density, as a cosine distance
_MIN_CLUSTERED = 1.5  # minimum number of clustered tokens per kept token
_HALVINGS = 16  # bisection steps of the search for the cutoff


@register(
    "pact", site=Site.IN_LLM, needs=("mean_query_attention", "keys", "previous_hidden"),
    paper="arXiv 2504.08966, CVPR 2025", merges=True,
)  # fmt: skip
@dataclass(frozen=True)
class PACT(Pruner):
    """Drop unimportant tokens and cluster the others by their keys (PACT).

    The importance of a token is its attention score under the mean query of all tokens up to the end of the image,
    without rotation, times the norm of its hidden state. The important tokens are visited by descending density; a
    token becomes a centre unless an earlier centre is within the cutoff (cosine distance of rotated keys). Each token
    joins its nearest centre, and a cluster becomes its mean. An unimportant token joins only if it is close enough. The
    selection does not depend on the question and reads no attention weights.

    `keep` is exact: a bisection finds the largest cutoff with at least `keep` centres, and the densest of them stay. At
    least `share` of the tokens, or 1.5 times `keep`, are clustered.

    Args:
        layer: First decoder layer that runs on the kept tokens. The layer before it provides queries, keys and hidden
            states. None: the layer after layer 4 of 28 (counted from 0), scaled to the depth of the decoder.
        share: Share of an image's tokens that count as important, in (0, 1].
        cutoff: Fixed cosine distance in [0, 2]; the authors use 0.21. The content then decides the number of kept
            tokens, regardless of `keep`, unless `keep` is 1.0. None: derived from `keep`.
        reach: Maximum distance, in cutoffs, at which an unimportant token joins a centre. 0 drops all but exact copies.

    Source:
        "PACT: Pruning and Clustering-Based Token Reduction for Faster Visual Language Models" (arXiv 2504.08966), the
        authors' code. The paper's text was not available.

    Differences from the paper:
        - Attention ignores the size of merged tokens. The authors add the logarithm of the size to the attention logits
          of all later layers; their code has a switch for it.
        - The number of kept tokens is exact by default.
        - The cut is one layer later, after queries and keys have been computed. Means are of the layer's outputs.
        - Each image is clustered separately, with the mean query up to its own end. The authors pool all images and
          videos.

    Examples:
        >>> model = tokenprune.patch(model, PACT(layer=2), keep=0.25)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    syncs_device: ClassVar[bool] = True

    layer: Annotated[int, Ge(1)] | None = None
    share: Annotated[float, Gt(0), Le(1)] = 0.55
    cutoff: Annotated[float, Ge(0), Le(2)] | None = None
    reach: Annotated[float, Ge(0)] = 1.5

    @property
    def chooses_count(self) -> bool:
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
        token_index = torch.arange(score.shape[1], device=score.device)
        assignment = torch.full_like(tokens.mask, -1, dtype=torch.long)
        for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            if keep == count:
                assignment[row, :count] = token_index[:count]
            else:
                assignment[row, :count] = self._assign_image(
                    score[row, :count], normalize(tokens.keys[row, :count]), keep
                )
        counts = None if self.chooses_count else tokens.keep
        return Selection(assignment == token_index, assignment, counts=counts)

    def _assign_image(self, score: torch.Tensor, keys: torch.Tensor, keep: int) -> torch.Tensor:
        """Return the centre that each token of an image joins, shape (tokens,), int64; -1 for dropped tokens.

        Args:
            score: Importance, shape (tokens,).
            keys: Unit keys, shape (tokens, channels).
            keep: Number of kept tokens.
        """
        count, device = len(score), score.device
        share = self.share if self.chooses_count else min(1.0, max(self.share, _MIN_CLUSTERED * keep / count))
        num_important = max(1, int(share * count))
        all_tokens = torch.ones_like(score, dtype=torch.bool)[None]
        important = top_mask(score[None], all_tokens, to_device([num_important], device), num_important)[0]
        index = important.nonzero().flatten()
        density = Products(keys[None, index], round_=True).reduce_rows(_compute_density)[0]
        # Sort by descending density. A stable sort puts the earlier of equal tokens first.
        index = index[density.argsort(descending=True, stable=True)]
        similarity = Products(keys[None, index], round_=True)
        cutoff = self._find_cutoff(similarity, keep)
        centre = find_centres(similarity, cutoff)
        if not self.chooses_count:
            # Identical tokens share one centre at any cutoff. If there are too few centres, add the densest tokens.
            rank = torch.where(centre, 0, len(index)) + torch.arange(len(index), device=device)
            centre = torch.zeros_like(centre).index_fill_(0, rank.argsort()[:keep], True)
        target, _ = index[centre].sort()
        best, nearest = (result[0] for result in best_match(keys[None], keys[None, target]))
        joins = important | (1 - round_cosines(best) <= self.reach * cutoff)
        assignment = torch.where(joins, target[nearest], -1)
        return assignment.index_copy(0, target, target)

    def _find_cutoff(self, similarity: Products, keep: int) -> float:
        """Return the largest cutoff, by bisection, with at least `keep` centres; 0 if there is none."""
        if self.cutoff is not None:
            return self.cutoff
        low, high = 0.0, 2.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            num_centres = int(find_centres(similarity, middle).sum())
            low, high = (middle, high) if num_centres >= keep else (low, middle)
            if num_centres == keep:
                break
        return low


def _compute_density(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
    """Return the density of each token, float64: a sum of Gaussians of the cosine distances. `rows` are cosines."""
    return torch.exp(-((1 - rows).clamp(min=0) / _BANDWIDTH).square()).sum(1, dtype=torch.float64)


def find_centres(similarity: Products, cutoff: float) -> torch.Tensor:
    """Return the tokens without an earlier centre within the cutoff, shape (tokens,), bool. Device sync.

    Args:
        similarity: Cosines of all pairs of tokens, sorted by descending density.
        cutoff: Cosine distance.
    """
    is_centre = torch.zeros(similarity.shape[1], dtype=torch.bool, device=similarity.a.device)

    def select_block(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
        is_near, block_slice = 1 - rows <= cutoff, slice(start, start + len(rows))
        is_centre[block_slice] = select_in_rounds(
            is_near[:, block_slice], ~(is_near[:, :start] & is_centre[:start]).any(1)
        )
        return is_centre[block_slice]

    return similarity.reduce_rows(select_block)[0]


def select_in_rounds(is_near: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Greedily select tokens that are not near an earlier selected token, shape (tokens,), bool.

    Each round selects all tokens that no earlier candidate can exclude, so there are few rounds.

    Args:
        is_near: Symmetric mask of near pairs, shape (tokens, tokens), bool.
        candidates: Candidate tokens, shape (tokens,), bool.
    """
    earlier, centre = is_near.tril(-1), torch.zeros_like(candidates)
    while bool(candidates.any()):
        selected = candidates & ~(earlier & candidates).any(1)
        centre = centre | selected
        candidates = candidates & ~is_near[:, selected].any(1) & ~selected
    return centre
