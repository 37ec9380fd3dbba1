# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import find_roots
from tokenprune.kernels.pairs import Products, normalize, round_cosines
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_SPATIAL, _TEMPORAL = 0.85, 0.55  # the authors' thresholds for LLaVA-Video-7B at keep=0.5
_HALVINGS = 18  # bisection steps of the search for thresholds
_NOTHING = 2.0  # threshold above all cosines


@register("sttm", site=Site.IN_LLM, needs=("frames",), paper="arXiv 2507.07990, ICCV 2025", merges=True)
@dataclass(frozen=True)
class STTM(VideoMerger):
    """Merge each frame with a quadtree and the quadtrees along time (STTM).

    From the coarsest level down, a square of 2 x 2 parts becomes its mean if all parts have a cosine of at least
    `spatial` to it. Squares of consecutive frames merge if one contains the other and their cosine is at least
    `temporal`. Connected squares become the mean of their means, at the upper left token of the earliest square. The
    method acts on the hidden states that enter one decoder layer, does not depend on the question, and reads no
    attention weights.

    `keep` is exact: both thresholds are scaled, with a fixed ratio of their distances from 1, to the loosest values
    that leave at least `keep` tokens. Surplus tokens join the most similar token before them.

    Args:
        layer: Decoder layer that first sees the merged tokens.
        spatial: Minimum cosine of a square's parts to their mean, in [-1, 2]. Above 1, no squares merge. None: 0.85.
        temporal: Minimum cosine of squares along time, in [-1, 2]. 0 or less disables merging along time. None: 0.55.
        exact: Keep exactly `keep` tokens. False uses the thresholds unchanged; the content then decides the number of
            kept tokens, regardless of `keep`, unless `keep` is 1.0.

    Source:
        "Multi-Granular Spatio-Temporal Token Merging for Training-Free Acceleration of Video LLMs" (arXiv 2507.07990),
        implemented from a description of the authors' code. The paper's text was not available.

    Differences from the paper:
        - The number of kept tokens is exact by default.
        - A token keeps its position. The authors truncate the positions to the new length.
        - With an odd side, the first row or column forms half squares, as in the code, but is compared only with
          itself. Every token belongs to exactly one square.
        - Without a known grid, frames are square if a newline ends the video. Otherwise they are rows that merge along
          time only.
        - As in the code, connected squares are found in a limited number of rounds. If two squares meet one square of
          the next frame, the second may stay separate.

    Example:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, STTM(layer=2), keep=0.5)
    """

    syncs_device: ClassVar[bool] = True

    layer: Annotated[int, Ge(1)] = 2
    spatial: Annotated[float, Ge(-1), Le(2)] | None = None
    temporal: Annotated[float, Ge(-1), Le(2)] | None = None
    exact: bool = True

    @property
    def chooses_count(self) -> bool:
        return not self.exact

    @property
    def cut_layer(self) -> int:
        return self.layer

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        into = torch.full_like(videos.mask, -1, dtype=torch.long)
        weight = torch.ones_like(into, dtype=torch.float32)
        places = into.shape[2]
        for video, (sizes, keep) in enumerate(zip(videos.frames, videos.keep, strict=True)):
            frames, size = len(sizes), max(sizes)
            trees = _Trees(videos.hidden[video, :frames, :size], *_grid(videos.grids[video], size))
            found, own = self._of_video(trees, keep)
            into[video, :frames, :size] = found.div(size, rounding_mode="floor") * places + found % size
            weight[video, :frames, :size] = own
        return into, weight

    def _of_video(self, trees: _Trees, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the absorbing token of each token of a video, and its weight in the mean, both (frames, patches)."""
        spatial = _SPATIAL if self.spatial is None else self.spatial
        temporal = _TEMPORAL if self.temporal is None else self.temporal
        along_time = temporal > 0
        if not self.exact:
            return trees.merged(spatial, temporal if along_time else _NOTHING)
        best = trees.merged(_NOTHING, _NOTHING)
        apart = [1 - spatial, *([1 - temporal] if along_time else [])]
        low, high = 0.0, 2 / min((one for one in apart if one > 0), default=2.0)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = trees.merged(1 - middle * apart[0], 1 - middle * apart[1] if along_time else _NOTHING)
            number = _count(found[0])
            if number >= keep:
                low, best = middle, found
            else:
                high = middle
            if number == keep:
                break
        return _united(trees.x, *best, keep), best[1]


class _Trees:
    """Quadtrees of a video's frames.

    Args:
        x: Tokens, shape (frames, patches, channels), float32.
        height: Rows of the token grid.
        width: Columns of the token grid.
    """

    def __init__(self, x: torch.Tensor, height: int, width: int) -> None:
        self.x = x
        device = x.device
        row, column = torch.arange(height, device=device), torch.arange(width, device=device)
        values = x.unflatten(1, (height, width))
        weight = torch.ones(height, width, dtype=torch.float32, device=device)
        # Per level, from the tokens up. Per token: index of its square, upper left token, weight in the mean.
        # Per square: unit mean, and the minimum cosine of its parts.
        self._square, self._corner, self._weight = [], [], []
        self._unit: list[torch.Tensor] = []
        self._least = [torch.full(values.shape[:3], torch.inf, dtype=torch.float32, device=device)]
        sides = [*_sides(height, width)]
        for level, (high, wide) in enumerate(sides):
            if level:
                odd_rows, odd_columns = sides[level - 1][0] % 2, sides[level - 1][1] % 2
                parts = torch.ones(1, *sides[level - 1], 1, dtype=torch.float32, device=device)
                number = _pooled(parts, odd_rows, odd_columns).sum((2, 4))
                values = _pooled(values, odd_rows, odd_columns).sum((2, 4)) / number
                row, column = (row + odd_rows) // 2, (column + odd_columns) // 2
                weight = weight / number[0, :, :, 0][row][:, column]
                direction = normalize(values)
                below = self._unit[-1].unflatten(1, sides[level - 1])
                cosine = (below * _spread(direction, *sides[level - 1])).sum(-1, keepdim=True)
                least = _pooled(round_cosines(cosine), odd_rows, odd_columns, torch.inf).amin((2, 4))
                self._least.append(torch.where(number > 1, least, -torch.inf).squeeze(-1))
            self._unit.append(normalize(values).flatten(1, 2))
            top, left = (_first(one, side) for one, side in ((row, high), (column, wide)))
            self._square.append((row[:, None] * wide + column).flatten())
            self._corner.append((top[row][:, None] * width + left[column]).flatten())
            self._weight.append(weight.flatten())
        self._along = [[self._cosines(one, other) for other in range(len(sides))] for one in range(len(sides))]

    def _cosines(self, one: int, other: int) -> torch.Tensor:
        """Return the cosines of the squares at two levels in consecutive frames, (frames - 1, patches), float32."""
        fine, place = min(one, other), self._square[min(one, other)]
        first = torch.zeros(self._unit[fine].shape[1], dtype=torch.long, device=place.device)
        first = first.scatter(0, place, torch.arange(len(place), device=place.device))  # one token per fine square
        before, after = (self._unit[level][:, self._square[level][first]] for level in (one, other))
        return round_cosines((before[:-1] * after[1:]).sum(-1))[:, place]

    def merged(self, spatial: float, temporal: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the absorbing token of each token, and its weight in the mean, both (frames, patches). Device sync.

        Args:
            spatial: Minimum cosine of a square's parts to their mean.
            temporal: Minimum cosine of squares along time.
        """
        frames, size = self.x.shape[:2]
        start = torch.arange(frames, device=self.x.device)[:, None] * size
        level = torch.full((frames, size), -1, device=self.x.device)
        for number in range(len(self._square) - 1, -1, -1):
            whole = (self._least[number] >= spatial).flatten(1) if number else torch.ones_like(level, dtype=torch.bool)
            level = torch.where((level < 0) & whole[:, self._square[number]], number, level)
        corner = start + torch.stack(self._corner).gather(0, level)
        weight = torch.stack(self._weight).gather(0, level)
        cosine = torch.zeros(max(0, frames - 1), size, dtype=torch.float32, device=self.x.device)
        for one, row in enumerate(self._along):
            for other, cosines in enumerate(row):
                cosine = torch.where((level[:-1] == one) & (level[1:] == other), cosines, cosine)
        near = cosine >= temporal
        return _representatives(frames * size, corner[:-1][near], corner[1:][near])[corner], weight


def _grid(grid: tuple[int, int, int] | None, size: int) -> tuple[int, int]:
    """Return the height and width of a frame with `size` tokens."""
    if grid is not None and grid[1] * grid[2] == size:
        return grid[1], grid[2]
    side = math.isqrt(size)
    return (side, side) if side * side == size else (1, size)


def _sides(height: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the height and width of each level, from the tokens up to the coarsest level with sides above 2."""
    yield height, width
    height, width = (height + 1) // 2, (width + 1) // 2
    while min(height, width) > 2:
        yield height, width
        height, width = (height + 1) // 2, (width + 1) // 2


def _pooled(x: torch.Tensor, odd_rows: int, odd_columns: int, fill: float = 0.0) -> torch.Tensor:
    """Split into 2 x 2 squares, (F, H, W, D) to (F, ceil(H / 2), 2, ceil(W / 2), 2, D), padding odd sides first."""
    x = torch.nn.functional.pad(x, (0, 0, odd_columns, 0, odd_rows, 0), value=fill)
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))


def _spread(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Repeat each square for its parts: (F, ceil(H / 2), ceil(W / 2), D) to (F, H, W, D)."""
    x = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return x[:, height % 2 :, width % 2 :]


def _first(of: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first index of each value 0 .. count - 1 in the sorted tensor `of`, shape (count,), int64."""
    return torch.searchsorted(of, torch.arange(count, device=of.device))


def _representatives(count: int, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the representative of each token, shape (count,), int64. Paired tokens `one` and `other` share it.

    The rounds end as soon as all representatives represent themselves, so a pair may still differ.
    """
    found = torch.arange(count, device=one.device)
    while True:
        least = torch.minimum(found[one], found[other])
        found = found.scatter_reduce(0, one, least, "amin").scatter_reduce(0, other, least, "amin")
        found = found[found]
        if torch.equal(found, found[found]):
            return found


def _count(into: torch.Tensor) -> int:
    """Return the number of kept tokens. Device sync."""
    return int((into.flatten() == torch.arange(into.numel(), device=into.device)).sum())


def _united(x: torch.Tensor, into: torch.Tensor, weight: torch.Tensor, keep: int) -> torch.Tensor:
    """Merge kept tokens into the most similar kept token before them until `keep` remain. Earlier tokens win ties.

    Args:
        x: Tokens, shape (frames, patches, channels).
        into: Absorbing token of each token, shape (frames, patches), int64.
        weight: Weight of each token in its mean, shape (frames, patches).
        keep: Number of kept tokens.

    Returns:
        The new absorbing tokens, shape (frames, patches), int64.
    """
    flat, count = into.flatten(), into.numel()
    stays = (flat == torch.arange(count, device=flat.device)).nonzero().flatten()
    if len(stays) == keep:
        return into
    place = torch.zeros_like(flat).index_copy(0, stays, torch.arange(len(stays), device=flat.device))
    total = torch.zeros(len(stays), x.shape[-1], dtype=torch.float32, device=x.device)
    total = total.index_add(0, place[flat], x.flatten(0, 1) * weight.flatten()[:, None])
    alike = Products(normalize(total)[None], round_=True)
    column = torch.arange(len(stays), device=flat.device)

    def earlier(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
        best, nearest = rows.masked_fill(column >= column[start : start + len(rows), None], -torch.inf).max(1)
        return torch.stack([best.double(), nearest.double()], 1)

    best, nearest = alike.reduce_rows(earlier)[0].unbind(1)
    later = column > 0  # the first token has no earlier token
    number = to_device([len(stays) - keep], flat.device)
    joins = top_mask(best.float()[None], later[None], number, len(stays) - keep)[0]
    parent = find_roots(torch.where(joins, nearest.long(), column)[None], len(stays))[0]
    return stays[parent][place[flat]].view_as(into)
