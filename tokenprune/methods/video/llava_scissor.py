# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import LikePairs, components
from tokenprune.kernels.join import join
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairs import Products, unit
from tokenprune.kernels.take import rank_in_group, top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_HALVINGS = 12  # of the range of thresholds that is searched
_ROWS = 256  # of products at a time
_NEAR = 50  # one part in so many that the number may be off when the search ends


@register("llava_scissor", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2506.21862", merges=True)
@dataclass(frozen=True)
class LLaVAScissor(VideoMerger):
    """Stand in for each group of similar tokens of a video by one: connected components within frames, then of these
    across the video (LLaVA-Scissor).

    Two tokens of a frame are connected if they are similar enough, and a component becomes its mean; the means of all
    frames are connected alike, and a component of these becomes its mean, a representative. Every token joins the
    most similar representative.

    exact: True searches for the threshold that leads to about as many representatives as are to be kept, and then
    merges the most similar ones, or splits off the tokens least similar to theirs, until it is exact. False takes
    `threshold`: the video decides how many tokens stay, whatever `keep` says, unless that is all of them.
    threshold: cosine above which two tokens are connected, where exact is False.

    Source: Sun et al., "LLaVA-Scissor: Token Compression with Semantic Connected Components for Video LLMs", from its
    formulas alone.

    Differs from the paper: an exact number by default; true components of all tokens (there sampled ones, by a
    union-find that can lose some); a token that stays is the mean of those that join it (there with its representative
    as one more), and stands where the token of the component stood that had most neighbours in its frame.
    """

    asks_device: ClassVar[bool] = True

    exact: bool = True
    threshold: Annotated[float, Ge(-1), Le(1)] = 0.9

    @property
    def by_content_count(self) -> bool:
        return not self.exact

    def merge(self, videos: Videos) -> tuple[torch.Tensor, None]:
        into = torch.full_like(videos.mask, -1, dtype=torch.long)
        for video, (sizes, keep) in enumerate(zip(videos.frames, videos.keep, strict=True)):
            spot = torch.tensor(
                [f * into.shape[2] + p for f, size in enumerate(sizes) for p in range(size)], device="cpu"
            )
            spot = to_device(spot, into.device)
            x, mask = videos.x[video, : len(sizes)], videos.mask[video, : len(sizes)]
            into[video].view(-1)[spot] = spot[self._joined(x, mask, spot, keep)]
        return into, None

    def _joined(self, x: torch.Tensor, mask: torch.Tensor, spot: torch.Tensor, keep: int) -> torch.Tensor:
        """long `[n]`: the token that each of a video's joins. x: `[F, P, D]`; mask: bool `[F, P]`; spot: long `[n]`."""
        direction = unit(x)
        alike = (direction @ direction.transpose(1, 2)).clamp(max=1)
        alike = alike.masked_fill(~(mask.unsqueeze(1) & mask.unsqueeze(2)), -torch.inf)
        if self.exact:
            found = merge_to_count(_searched(x, alike, spot, keep), keep)
        else:
            found = _representatives(x, alike, spot, self.threshold)
        tokens = x.flatten(0, 1)[spot]
        likeness, nearest = (one[0] for one in best_match(tokens[None], found.mean[None]))
        # The token of each representative that had most neighbours.
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
    """Representatives: mean, float32 `[C, D]`; size, long `[C]`, of how many means each is the mean; of, long `[n]`,
    the representative of the component that each token is in; degree, long `[n]`, neighbours of each in its frame."""

    mean: torch.Tensor
    size: torch.Tensor
    of: torch.Tensor
    degree: torch.Tensor


def _representatives(
    x: torch.Tensor, alike: torch.Tensor, spot: torch.Tensor, threshold: float, pairs: LikePairs | None = None
) -> _Representatives:
    """Components within frames, then of their means. alike: `[F, P, P]`, cosines in each frame, -inf for padding;
    pairs: those of all tokens."""
    near = alike > threshold
    inside = components(near)  # [F, P], the lowest place of each one's component
    start = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    head = (start + inside).flatten()[spot]  # its spot
    means, of_token = _means(x.flatten(0, 1), spot, head)
    if pairs is None:
        joined = components(unit(means), threshold)
    else:
        alone = (torch.bincount(of_token) == 1)[of_token]
        token = torch.full_like(means[:, 0], -1, dtype=torch.long)
        token[of_token[alone]] = alone.nonzero().flatten()
        joined = pairs.components(unit(means), token, threshold)
    reps, of_mean = _means(means, torch.arange(len(means), device=x.device), joined)
    size = torch.bincount(of_mean, minlength=len(reps))
    return _Representatives(reps, size, of_mean[of_token], near.sum(2).flatten()[spot])


def _means(x: torch.Tensor, member: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of each group, `[C, D]`, in order of their heads, and the group of each member, long `[n]`.

    x: `[m, D]`; member: long `[n]`, indices into x; head: long `[n]`, the index into x of the first of its group.
    """
    ones = torch.ones(len(x), dtype=torch.float32, device=x.device)
    own = head == member
    target = torch.where(own, len(x), head)
    heads = member[own]
    number = torch.zeros(len(x), dtype=torch.long, device=x.device)
    number[heads] = torch.arange(len(heads), device=x.device)
    return join(x, None, ones, member, target, ones[: len(member)])[heads], number[head]


def _searched(x: torch.Tensor, alike: torch.Tensor, spot: torch.Tensor, keep: int) -> _Representatives:
    """Return the representatives of the threshold, of those that bisection tries, at which their number is nearest to
    `keep`; of two the fewer."""
    low, high = -1.01, 1.0
    best: _Representatives | None = None
    pairs = LikePairs(unit(x.flatten(0, 1)[spot]))
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
    assert best is not None  # it tried at least one threshold
    return best


def merge_to_count(found: _Representatives, keep: int) -> _Representatives:
    """Merge the most similar two representatives until at most `keep` are left; a mean goes on being that of all its
    components' means."""
    mean, size, of = found.mean.clone(), found.size.clone(), found.of.clone()
    count = len(mean)
    if count <= keep:
        return found
    likeness = _Likeness(unit(mean))
    most, with_ = likeness.best(
        torch.arange(count, device=mean.device)
    )  # of each the most similar one, kept up to date
    for _ in range(count - keep):
        one = int(most.argmax())
        first, second = sorted((one, int(with_[one])))
        total = size[first] + size[second]
        mean[first] = (mean[first] * size[first] + mean[second] * size[second]) / total
        size[first] = total
        of = torch.where(of == second, first, of)
        row = likeness.merge(first, second, unit(mean[first]))
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
    """Similarities of representatives of which some merge, without a table of all pairs where they are many.

    direction: float32 `[C, D]`. gone: bool `[C]`, those that merged into another; merged: bool `[C]`, those that are
    not what they were.
    """

    def __init__(self, direction: torch.Tensor) -> None:
        self.direction = direction.clone()
        self._products = Products(direction[None])
        if self._products.fits:
            self._products.table  # noqa: B018 (rows are read from it then)
        self.gone, self.merged = torch.zeros(2, len(direction), dtype=torch.bool, device=direction.device)

    def best(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return to what of all others each of these (long `[n]`) is most similar: how much, and which."""
        value, place = torch.empty(len(index), dtype=torch.float32, device=index.device), torch.empty_like(index)
        merged = self.merged.nonzero().flatten()
        for part in torch.arange(len(index), device=index.device).split(_ROWS):
            some = index[part]
            rows = self._products.rows(0, some)
            # Of what changed since, as `merge` returned it.
            for row in self.merged[some].nonzero().flatten().tolist():
                rows[row] = (self.direction * self.direction[some[row]]).sum(1)
            for row in (~self.merged[some]).nonzero().flatten().tolist() if len(merged) else ():
                rows[row, merged] = (self.direction[merged] * self.direction[some[row]]).sum(1)
            rows[self.gone[some]] = rows[:, self.gone] = -torch.inf
            rows.scatter_(1, some.unsqueeze(1), -torch.inf)
            value[part], place[part] = rows.max(1)
        return value, place

    def merge(self, first: int, second: int, direction: torch.Tensor) -> torch.Tensor:
        """Let `second` join `first`, which then has another direction; return how similar that is to each, `[C]`."""
        self.gone[second], self.merged[first] = True, True
        self.direction[first] = direction
        row = (self.direction * direction).sum(1).masked_fill(self.gone, -torch.inf)
        row[first] = -torch.inf
        return row
