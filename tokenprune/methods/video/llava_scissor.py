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
_NEAR = 50  # the search ends within keep / 50 of the requested count


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

    Example:
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
        into = torch.full_like(videos.mask, -1, dtype=torch.long)
        for video, (sizes, keep) in enumerate(zip(videos.frames, videos.keep, strict=True)):
            spot = torch.tensor(
                [f * into.shape[2] + p for f, size in enumerate(sizes) for p in range(size)], device="cpu"
            )
            spot = to_device(spot, into.device)
            x, mask = videos.hidden[video, : len(sizes)], videos.mask[video, : len(sizes)]
            into[video].view(-1)[spot] = spot[self._joined(x, mask, spot, keep)]
        return into, None

    def _joined(self, x: torch.Tensor, mask: torch.Tensor, spot: torch.Tensor, keep: int) -> torch.Tensor:
        """Return the token that each token of a video joins, shape (tokens,), int64.

        Args:
            x: Tokens, shape (frames, patches, channels).
            mask: False for padding, shape (frames, patches).
            spot: Flat index of each token, shape (tokens,).
            keep: Number of kept tokens.
        """
        direction = normalize(x)
        alike = (direction @ direction.transpose(1, 2)).clamp(max=1)
        alike = alike.masked_fill(~(mask.unsqueeze(1) & mask.unsqueeze(2)), -torch.inf)
        if self.exact:
            found = merge_to_count(_searched(x, alike, spot, keep), keep)
        else:
            found = _representatives(x, alike, spot, self.threshold)
        tokens = x.flatten(0, 1)[spot]
        likeness, nearest = (one[0] for one in best_match(tokens[None], found.mean[None]))
        # Select the token with the most neighbours of each representative.
        rank = rank_in_group(found.of[None], found.degree[None])[0]
        stays = rank == 0
        token = torch.empty_like(found.size).scatter(0, found.of[stays], stays.nonzero().flatten())
        if self.exact:
            more = top_mask(
                -likeness[None], ~stays[None], torch.tensor([keep - len(token)], device=x.device), keep
            )[0]  # fmt: skip
            stays = stays | more
        return torch.where(stays, torch.arange(len(tokens), device=x.device), token[nearest])


class _Representatives(NamedTuple):
    """Representatives of a video.

    Attributes:
        mean: Feature of each representative, shape (representatives, channels), float32.
        size: Number of component means in each representative, shape (representatives,), int64.
        of: Representative of each token's component, shape (tokens,), int64.
        degree: Number of neighbours of each token in its frame, shape (tokens,), int64.
    """

    mean: torch.Tensor
    size: torch.Tensor
    of: torch.Tensor
    degree: torch.Tensor


def _representatives(
    x: torch.Tensor, alike: torch.Tensor, spot: torch.Tensor, threshold: float, pairs: SimilarPairs | None = None
) -> _Representatives:
    """Return the components within frames, joined by the components of their means.

    Args:
        x: Tokens, shape (frames, patches, channels).
        alike: Cosines within frames, shape (frames, patches, patches), -inf for padding.
        spot: Flat index of each token, shape (tokens,).
        threshold: Cosine above which two tokens are connected.
        pairs: Similar pairs of all tokens, shared by several thresholds.
    """
    near = alike > threshold
    inside = connected_components(near)  # [F, P], lowest patch index of each component
    start = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    head = (start + inside).flatten()[spot]  # flat index
    means, of_token = _means(x.flatten(0, 1), spot, head)
    if pairs is None:
        joined = connected_components(normalize(means), threshold)
    else:
        alone = (torch.bincount(of_token) == 1)[of_token]
        token = torch.full_like(means[:, 0], -1, dtype=torch.long)
        token[of_token[alone]] = alone.nonzero().flatten()
        joined = pairs.components(normalize(means), token, threshold)
    reps, of_mean = _means(means, torch.arange(len(means), device=x.device), joined)
    size = torch.bincount(of_mean, minlength=len(reps))
    return _Representatives(reps, size, of_mean[of_token], near.sum(2).flatten()[spot])


def _means(x: torch.Tensor, member: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of each group (groups, channels) in order of the heads, and the group of each member (members,).

    Args:
        x: Features, shape (features, channels).
        member: Feature index of each member, shape (members,).
        head: Feature index of the first member of each member's group, shape (members,).
    """
    ones = torch.ones(len(x), dtype=torch.float32, device=x.device)
    own = head == member
    target = torch.where(own, len(x), head)
    heads = member[own]
    number = torch.zeros(len(x), dtype=torch.long, device=x.device)
    number[heads] = torch.arange(len(heads), device=x.device)
    return join(x, None, ones, member, target, ones[: len(member)])[heads], number[head]


def _searched(x: torch.Tensor, alike: torch.Tensor, spot: torch.Tensor, keep: int) -> _Representatives:
    """Return the representatives at the tried threshold with the count nearest to `keep`; the fewer of two."""
    low, high = -1.01, 1.0
    best: _Representatives | None = None
    pairs = SimilarPairs(normalize(x.flatten(0, 1)[spot]))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _representatives(x, alike, spot, middle, pairs)
        number = len(found.mean)
        off = (abs(number - keep), number)
        if best is None or off < (abs(len(best.mean) - keep), len(best.mean)):
            best = found
        low, high = (middle, high) if number < keep else (low, middle)
        if _NEAR * abs(number - keep) <= keep:
            break
    assert best is not None  # the loop runs at least once
    return best


def merge_to_count(found: _Representatives, keep: int) -> _Representatives:
    """Merge the two most similar representatives until at most `keep` remain.

    A merged representative is the mean of all its component means.

    Args:
        found: Representatives of a video.
        keep: Maximum number of representatives.
    """
    mean, size, of = found.mean.clone(), found.size.clone(), found.of.clone()
    count = len(mean)
    if count <= keep:
        return found
    likeness = _Likeness(normalize(mean))
    most, with_ = likeness.best(torch.arange(count, device=mean.device))  # most similar other, updated below
    for _ in range(count - keep):
        one = int(most.argmax())
        first, second = sorted((one, int(with_[one])))
        total = size[first] + size[second]
        mean[first] = (mean[first] * size[first] + mean[second] * size[second]) / total
        size[first] = total
        of = torch.where(of == second, first, of)
        row = likeness.merge(first, second, normalize(mean[first]))
        closer = (row > most) | ((row == most) & (first < with_))
        most, with_ = torch.where(closer, row, most), torch.where(closer, first, with_)
        anew = (((with_ == first) & ~closer) | (with_ == second)).nonzero().flatten()
        most[anew], with_[anew] = likeness.best(anew)
        most[first], with_[first] = row.max(0)
        most[second] = -torch.inf
    left = (~likeness.gone).nonzero().flatten()
    number = torch.zeros(count, dtype=torch.long, device=mean.device)
    number[left] = torch.arange(len(left), device=mean.device)
    return _Representatives(mean[left], size[left], number[of], found.degree)


class _Likeness:
    """Similarities of representatives under merging. Large tables of all pairs are never materialised.

    Attributes:
        direction: Unit features, shape (representatives, channels), float32.
        gone: Representatives that merged into another, shape (representatives,), bool.
        merged: Representatives that changed, shape (representatives,), bool.
    """

    def __init__(self, direction: torch.Tensor) -> None:
        self.direction = direction.clone()
        self._products = Products(direction[None])
        if self._products.fits_in_memory:
            self._products.table  # noqa: B018 (computes and caches the table)
        self.gone, self.merged = torch.zeros(2, len(direction), dtype=torch.bool, device=direction.device)

    def best(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the highest similarity of each representative in `index` to any other, and the index of the other."""
        value, place = torch.empty(len(index), dtype=torch.float32, device=index.device), torch.empty_like(index)
        merged = self.merged.nonzero().flatten()
        for part in torch.arange(len(index), device=index.device).split(_ROWS):
            some = index[part]
            rows = self._products.rows(0, some)
            # The products predate the merges. Recompute merged rows and columns as `merge` does.
            for row in self.merged[some].nonzero().flatten().tolist():
                rows[row] = (self.direction * self.direction[some[row]]).sum(1)
            for row in (~self.merged[some]).nonzero().flatten().tolist() if len(merged) else ():
                rows[row, merged] = (self.direction[merged] * self.direction[some[row]]).sum(1)
            rows[self.gone[some]] = rows[:, self.gone] = -torch.inf
            rows.scatter_(1, some.unsqueeze(1), -torch.inf)
            value[part], place[part] = rows.max(1)
        return value, place

    def merge(self, first: int, second: int, direction: torch.Tensor) -> torch.Tensor:
        """Merge `second` into `first`, which gets `direction`. Return the new similarities of `first`."""
        self.gone[second], self.merged[first] = True, True
        self.direction[first] = direction
        row = (self.direction * direction).sum(1).masked_fill(self.gone, -torch.inf)
        row[first] = -torch.inf
        return row
