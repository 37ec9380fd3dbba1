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
_DISABLED = 2.0  # threshold above all cosines


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

    Examples:
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
        target = torch.full_like(videos.mask, -1, dtype=torch.long)
        weight = torch.ones_like(target, dtype=torch.float32)
        num_patches = target.shape[2]
        for video, (sizes, keep) in enumerate(zip(videos.frames, videos.keep, strict=True)):
            frames, size = len(sizes), max(sizes)
            trees = _Trees(videos.hidden[video, :frames, :size], *_get_grid(videos.grids[video], size))
            absorbing, token_weight = self._merge_video(trees, keep)
            target[video, :frames, :size] = absorbing.div(size, rounding_mode="floor") * num_patches + absorbing % size
            weight[video, :frames, :size] = token_weight
        return target, weight

    def _merge_video(self, trees: _Trees, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the absorbing token of each token of a video, and its weight in the mean, both (frames, patches)."""
        spatial = _SPATIAL if self.spatial is None else self.spatial
        temporal = _TEMPORAL if self.temporal is None else self.temporal
        along_time = temporal > 0
        if not self.exact:
            return trees.merge(spatial, temporal if along_time else _DISABLED)
        best = trees.merge(_DISABLED, _DISABLED)
        distances = [1 - spatial, *([1 - temporal] if along_time else [])]
        low, high = 0.0, 2 / min((distance for distance in distances if distance > 0), default=2.0)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            merged = trees.merge(1 - middle * distances[0], 1 - middle * distances[1] if along_time else _DISABLED)
            num_kept = _count_kept(merged[0])
            if num_kept >= keep:
                low, best = middle, merged
            else:
                high = middle
            if num_kept == keep:
                break
        return _merge_to_count(trees.x, *best, keep), best[1]


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
        self._min_cosine = [torch.full(values.shape[:3], torch.inf, dtype=torch.float32, device=device)]
        sides = [*_iterate_levels(height, width)]
        for level, (high, wide) in enumerate(sides):
            if level:
                odd_rows, odd_columns = sides[level - 1][0] % 2, sides[level - 1][1] % 2
                parts = torch.ones(1, *sides[level - 1], 1, dtype=torch.float32, device=device)
                num_parts = _split_squares(parts, odd_rows, odd_columns).sum((2, 4))
                values = _split_squares(values, odd_rows, odd_columns).sum((2, 4)) / num_parts
                row, column = (row + odd_rows) // 2, (column + odd_columns) // 2
                weight = weight / num_parts[0, :, :, 0][row][:, column]
                direction = normalize(values)
                parts_below = self._unit[-1].unflatten(1, sides[level - 1])
                cosine = (parts_below * _expand_squares(direction, *sides[level - 1])).sum(-1, keepdim=True)
                least = _split_squares(round_cosines(cosine), odd_rows, odd_columns, torch.inf).amin((2, 4))
                self._min_cosine.append(torch.where(num_parts > 1, least, -torch.inf).squeeze(-1))
            self._unit.append(normalize(values).flatten(1, 2))
            top, left = _find_first(row, high), _find_first(column, wide)
            self._square.append((row[:, None] * wide + column).flatten())
            self._corner.append((top[row][:, None] * width + left[column]).flatten())
            self._weight.append(weight.flatten())
        self._time_cosines = [
            [self._compute_cosines(first_level, second_level) for second_level in range(len(sides))]
            for first_level in range(len(sides))
        ]

    def _compute_cosines(self, first_level: int, second_level: int) -> torch.Tensor:
        """Return the cosines of the squares at two levels in consecutive frames, (frames - 1, patches), float32."""
        fine, square = min(first_level, second_level), self._square[min(first_level, second_level)]
        first = torch.zeros(self._unit[fine].shape[1], dtype=torch.long, device=square.device)
        first = first.scatter(0, square, torch.arange(len(square), device=square.device))  # one token per fine square
        before, after = (self._unit[level][:, self._square[level][first]] for level in (first_level, second_level))
        return round_cosines((before[:-1] * after[1:]).sum(-1))[:, square]

    def merge(self, spatial: float, temporal: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the absorbing token of each token, and its weight in the mean, both (frames, patches). Device sync.

        Args:
            spatial: Minimum cosine of a square's parts to their mean.
            temporal: Minimum cosine of squares along time.
        """
        frames, size = self.x.shape[:2]
        start = torch.arange(frames, device=self.x.device)[:, None] * size
        level = torch.full((frames, size), -1, device=self.x.device)
        for index in range(len(self._square) - 1, -1, -1):
            is_merged = (
                (self._min_cosine[index] >= spatial).flatten(1) if index else torch.ones_like(level, dtype=torch.bool)
            )
            level = torch.where((level < 0) & is_merged[:, self._square[index]], index, level)
        corner = start + torch.stack(self._corner).gather(0, level)
        weight = torch.stack(self._weight).gather(0, level)
        cosine = torch.zeros(max(0, frames - 1), size, dtype=torch.float32, device=self.x.device)
        for first_level, row in enumerate(self._time_cosines):
            for second_level, cosines in enumerate(row):
                cosine = torch.where((level[:-1] == first_level) & (level[1:] == second_level), cosines, cosine)
        is_near = cosine >= temporal
        return _find_representatives(frames * size, corner[:-1][is_near], corner[1:][is_near])[corner], weight


def _get_grid(grid: tuple[int, int, int] | None, size: int) -> tuple[int, int]:
    """Return the height and width of a frame with `size` tokens."""
    if grid is not None and grid[1] * grid[2] == size:
        return grid[1], grid[2]
    side = math.isqrt(size)
    return (side, side) if side * side == size else (1, size)


def _iterate_levels(height: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the height and width of each level, from the tokens up to the coarsest level with sides above 2."""
    yield height, width
    height, width = (height + 1) // 2, (width + 1) // 2
    while min(height, width) > 2:
        yield height, width
        height, width = (height + 1) // 2, (width + 1) // 2


def _split_squares(x: torch.Tensor, odd_rows: int, odd_columns: int, fill: float = 0.0) -> torch.Tensor:
    """Split into 2 x 2 squares, (F, H, W, D) to (F, ceil(H / 2), 2, ceil(W / 2), 2, D), padding odd sides first."""
    x = torch.nn.functional.pad(x, (0, 0, odd_columns, 0, odd_rows, 0), value=fill)
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))


def _expand_squares(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Repeat each square for its parts: (F, ceil(H / 2), ceil(W / 2), D) to (F, H, W, D)."""
    x = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return x[:, height % 2 :, width % 2 :]


def _find_first(sorted_values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first index of each value 0 .. count - 1 in a sorted tensor, shape (count,), int64."""
    return torch.searchsorted(sorted_values, torch.arange(count, device=sorted_values.device))


def _find_representatives(count: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the representative of each token, shape (count,), int64. Paired tokens `first` and `second` share it.

    The rounds end as soon as all representatives represent themselves, so a pair may still differ.
    """
    representative = torch.arange(count, device=first.device)
    while True:
        minimum = torch.minimum(representative[first], representative[second])
        for member in (first, second):
            representative = representative.scatter_reduce(0, member, minimum, "amin")
        representative = representative[representative]
        if torch.equal(representative, representative[representative]):
            return representative


def _count_kept(target: torch.Tensor) -> int:
    """Return the number of kept tokens. Device sync."""
    return int((target.flatten() == torch.arange(target.numel(), device=target.device)).sum())


def _merge_to_count(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, keep: int) -> torch.Tensor:
    """Merge kept tokens into the most similar kept token before them until `keep` remain. Earlier tokens win ties.

    Args:
        x: Tokens, shape (frames, patches, channels).
        target: Absorbing token of each token, shape (frames, patches), int64.
        weight: Weight of each token in its mean, shape (frames, patches).
        keep: Number of kept tokens.

    Returns:
        The new absorbing tokens, shape (frames, patches), int64.
    """
    flat, count = target.flatten(), target.numel()
    kept = (flat == torch.arange(count, device=flat.device)).nonzero().flatten()
    if len(kept) == keep:
        return target
    kept_index = torch.zeros_like(flat).index_copy(0, kept, torch.arange(len(kept), device=flat.device))
    total = torch.zeros(len(kept), x.shape[-1], dtype=torch.float32, device=x.device)
    total = total.index_add(0, kept_index[flat], x.flatten(0, 1) * weight.flatten()[:, None])
    similarity = Products(normalize(total)[None], round_=True)
    column = torch.arange(len(kept), device=flat.device)

    def find_earlier(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
        best, nearest = rows.masked_fill(column >= column[start : start + len(rows), None], -torch.inf).max(1)
        return torch.stack([best.double(), nearest.double()], 1)

    best, nearest = similarity.reduce_rows(find_earlier)[0].unbind(1)
    has_earlier = column > 0  # the first token has no earlier token
    num_merges = to_device([len(kept) - keep], flat.device)
    joins = top_mask(best.float()[None], has_earlier[None], num_merges, len(kept) - keep)[0]
    parent = find_roots(torch.where(joins, nearest.long(), column)[None], len(kept))[0]
    return kept[parent][kept_index[flat]].view_as(target)
