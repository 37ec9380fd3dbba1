# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import SimilarPairs, connected_components
from tokenprune.kernels.join import join
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairs import Products, normalize
from tokenprune.kernels.take import rank_in_group, top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_HALVINGS = 12  # bisection steps of the search for a threshold
_ROWS = 256  # rows of similarities computed at a time
_TOLERANCE = 50  # the search ends within keep / 50 of the requested count


@register("llava_scissor", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2506.21862", merges=True)
@dataclass(frozen=True)
class LLaVAScissor(VideoMerger):
    """Merge connected components of similar tokens across a video (LLaVA-Scissor).

    Two tokens of a frame are connected if they are similar enough, and each component becomes its mean. The means of
    all frames are connected in the same way, and each component becomes a representative. Every token joins the most
    similar representative.

    Args:
        exact: Find a threshold by bisection that gives about `keep` representatives. Then merge the most similar
            representatives, or split off the tokens least similar to theirs, until the count is exact. False: use
            `threshold`; the content then decides the number of kept tokens, regardless of `keep`, unless `keep` is 1.0.
        threshold: Cosine above which two tokens are connected, for exact=False.

    Source:
        Sun et al., "LLaVA-Scissor: Token Compression with Semantic Connected Components for Video LLMs" (arXiv
        2506.21862), implemented from its formulas only.

    Differences from the paper:
        - The number of kept tokens is exact by default.
        - Components are exact and use all tokens. The paper samples tokens, and its union-find can lose some.
        - A kept token is the mean of the tokens that join it. The paper adds its representative to the mean.
        - A kept token takes the position of the component's token with the most neighbours in its frame.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, LLaVAScissor(exact=False, threshold=0.95))
    """

    syncs_device: ClassVar[bool] = True

    exact: bool = True
    threshold: Annotated[float, Ge(-1), Le(1)] = 0.9

    @property
    def chooses_count(self) -> bool:
        return not self.exact

    def merge(self, videos: Videos) -> tuple[torch.Tensor, None]:
        target = torch.full_like(videos.mask, -1, dtype=torch.long)
        for video, (sizes, keep) in enumerate(zip(videos.frames, videos.keep, strict=True)):
            index = torch.tensor(
                [f * target.shape[2] + p for f, size in enumerate(sizes) for p in range(size)], device="cpu"
            )
            index = to_device(index, target.device)
            x, mask = videos.hidden[video, : len(sizes)], videos.mask[video, : len(sizes)]
            target[video].view(-1)[index] = index[self._find_targets(x, mask, index, keep)]
        return target, None

    def _find_targets(self, x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor, keep: int) -> torch.Tensor:
        """Return the token that each token of a video joins, shape (tokens,), int64.

        Args:
            x: Tokens, shape (frames, patches, channels).
            mask: False for padding, shape (frames, patches).
            index: Flat index of each token, shape (tokens,).
            keep: Number of kept tokens.
        """
        direction = normalize(x)
        cosines = (direction @ direction.transpose(1, 2)).clamp(max=1)
        cosines = cosines.masked_fill(~(mask.unsqueeze(1) & mask.unsqueeze(2)), -torch.inf)
        if self.exact:
            representatives = merge_to_count(_search_threshold(x, cosines, index, keep), keep)
        else:
            representatives = _find_representatives(x, cosines, index, self.threshold)
        tokens = x.flatten(0, 1)[index]
        similarity, nearest = (result[0] for result in best_match(tokens[None], representatives.mean[None]))
        # Select the token with the most neighbours of each representative.
        rank = rank_in_group(representatives.group[None], representatives.degree[None])[0]
        kept = rank == 0
        token = torch.empty_like(representatives.size).scatter(0, representatives.group[kept], kept.nonzero().flatten())
        if self.exact:
            extra = top_mask(
                -similarity[None], ~kept[None], torch.tensor([keep - len(token)], device=x.device), keep
            )[0]  # fmt: skip
            kept = kept | extra
        return torch.where(kept, torch.arange(len(tokens), device=x.device), token[nearest])


class _Representatives(NamedTuple):
    """Representatives of a video.

    Attributes:
        mean: Feature of each representative, shape (representatives, channels), float32.
        size: Number of component means in each representative, shape (representatives,), int64.
        group: Representative of each token's component, shape (tokens,), int64.
        degree: Number of neighbours of each token in its frame, shape (tokens,), int64.
    """

    mean: torch.Tensor
    size: torch.Tensor
    group: torch.Tensor
    degree: torch.Tensor


def _find_representatives(
    x: torch.Tensor, cosines: torch.Tensor, index: torch.Tensor, threshold: float, pairs: SimilarPairs | None = None
) -> _Representatives:
    """Return the components within frames, joined by the components of their means.

    Args:
        x: Tokens, shape (frames, patches, channels).
        cosines: Cosines within frames, shape (frames, patches, patches), -inf for padding.
        index: Flat index of each token, shape (tokens,).
        threshold: Cosine above which two tokens are connected.
        pairs: Similar pairs of all tokens, shared by several thresholds.
    """
    is_near = cosines > threshold
    component = connected_components(is_near)  # [F, P], lowest patch index of each component
    start = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    group_head = (start + component).flatten()[index]  # flat index
    means, token_group = _compute_group_means(x.flatten(0, 1), index, group_head)
    if pairs is None:
        joined_component = connected_components(normalize(means), threshold)
    else:
        is_single = (torch.bincount(token_group) == 1)[token_group]
        token = torch.full_like(means[:, 0], -1, dtype=torch.long)
        token[token_group[is_single]] = is_single.nonzero().flatten()
        joined_component = pairs.components(normalize(means), token, threshold)
    group_means, mean_group = _compute_group_means(means, torch.arange(len(means), device=x.device), joined_component)
    size = torch.bincount(mean_group, minlength=len(group_means))
    return _Representatives(group_means, size, mean_group[token_group], is_near.sum(2).flatten()[index])


def _compute_group_means(
    x: torch.Tensor, member: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of each group (groups, channels) in order of the heads, and the group of each member (members,).

    Args:
        x: Features, shape (features, channels).
        member: Feature index of each member, shape (members,).
        head: Feature index of the first member of each member's group, shape (members,).
    """
    ones = torch.ones(len(x), dtype=torch.float32, device=x.device)
    is_head = head == member
    target = torch.where(is_head, len(x), head)
    heads = member[is_head]
    group_index = torch.zeros(len(x), dtype=torch.long, device=x.device)
    group_index[heads] = torch.arange(len(heads), device=x.device)
    return join(x, None, ones, member, target, ones[: len(member)])[heads], group_index[head]


def _search_threshold(x: torch.Tensor, cosines: torch.Tensor, index: torch.Tensor, keep: int) -> _Representatives:
    """Return the representatives at the tried threshold with the count nearest to `keep`; the fewer of two."""
    low, high = -1.01, 1.0
    best: _Representatives | None = None
    pairs = SimilarPairs(normalize(x.flatten(0, 1)[index]))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        representatives = _find_representatives(x, cosines, index, middle, pairs)
        count = len(representatives.mean)
        error = (abs(count - keep), count)
        if best is None or error < (abs(len(best.mean) - keep), len(best.mean)):
            best = representatives
        low, high = (middle, high) if count < keep else (low, middle)
        if _TOLERANCE * abs(count - keep) <= keep:
            break
    assert best is not None  # the loop runs at least once
    return best


def merge_to_count(representatives: _Representatives, keep: int) -> _Representatives:
    """Merge the two most similar representatives until at most `keep` remain.

    A merged representative is the mean of all its component means.

    Args:
        representatives: Representatives of a video.
        keep: Maximum number of representatives.
    """
    mean, size, group = representatives.mean.clone(), representatives.size.clone(), representatives.group.clone()
    count = len(mean)
    if count <= keep:
        return representatives
    similarities = _Similarities(normalize(mean))
    # Highest similarity of each representative and its partner, updated after each merge.
    best_similarity, best_index = similarities.find_best(torch.arange(count, device=mean.device))
    for _ in range(count - keep):
        first_index = int(best_similarity.argmax())
        first, second = sorted((first_index, int(best_index[first_index])))
        total = size[first] + size[second]
        mean[first] = (mean[first] * size[first] + mean[second] * size[second]) / total
        size[first] = total
        group = torch.where(group == second, first, group)
        row = similarities.merge(first, second, normalize(mean[first]))
        closer = (row > best_similarity) | ((row == best_similarity) & (first < best_index))
        best_similarity, best_index = torch.where(closer, row, best_similarity), torch.where(closer, first, best_index)
        outdated = (((best_index == first) & ~closer) | (best_index == second)).nonzero().flatten()
        best_similarity[outdated], best_index[outdated] = similarities.find_best(outdated)
        best_similarity[first], best_index[first] = row.max(0)
        best_similarity[second] = -torch.inf
    remaining = (~similarities.absorbed).nonzero().flatten()
    new_index = torch.zeros(count, dtype=torch.long, device=mean.device)
    new_index[remaining] = torch.arange(len(remaining), device=mean.device)
    return _Representatives(mean[remaining], size[remaining], new_index[group], representatives.degree)


class _Similarities:
    """Similarities of representatives under merging. Large tables of all pairs are never materialised.

    Attributes:
        direction: Unit features, shape (representatives, channels), float32.
        absorbed: Representatives that merged into another, shape (representatives,), bool.
        merged: Representatives that changed, shape (representatives,), bool.
    """

    def __init__(self, direction: torch.Tensor) -> None:
        self.direction = direction.clone()
        self._products = Products(direction[None])
        if self._products.fits_in_memory:
            self._products.table  # noqa: B018 (computes and caches the table)
        self.absorbed, self.merged = torch.zeros(2, len(direction), dtype=torch.bool, device=direction.device)

    def find_best(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the highest similarity of each queried representative to any other, and the index of the other."""
        value = torch.empty(len(queries), dtype=torch.float32, device=queries.device)
        best_index = torch.empty_like(queries)
        merged = self.merged.nonzero().flatten()
        for part in torch.arange(len(queries), device=queries.device).split(_ROWS):
            part_queries = queries[part]
            rows = self._products.rows(0, part_queries)
            # The products predate the merges. Recompute merged rows and columns as `merge` does.
            for row in self.merged[part_queries].nonzero().flatten().tolist():
                rows[row] = (self.direction * self.direction[part_queries[row]]).sum(1)
            for row in (~self.merged[part_queries]).nonzero().flatten().tolist() if len(merged) else ():
                rows[row, merged] = (self.direction[merged] * self.direction[part_queries[row]]).sum(1)
            rows[self.absorbed[part_queries]] = rows[:, self.absorbed] = -torch.inf
            rows.scatter_(1, part_queries.unsqueeze(1), -torch.inf)
            value[part], best_index[part] = rows.max(1)
        return value, best_index

    def merge(self, first: int, second: int, direction: torch.Tensor) -> torch.Tensor:
        """Merge `second` into `first`, which gets `direction`. Return the new similarities of `first`."""
        self.absorbed[second], self.merged[first] = True, True
        self.direction[first] = direction
        row = (self.direction * direction).sum(1).masked_fill(self.absorbed, -torch.inf)
        row[first] = -torch.inf
        return row
