# SPDX-License-Identifier: Apache-2.0
"""Scores of tokens for `f3a`: frozen random projections, the grid, and the terms of the score."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from tokenprune.kernels.compact import partition
from tokenprune.kernels.host_random import normal
from tokenprune.kernels.pairs import is_finite
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.tokens import VisualTokens

EPSILON = 1e-6
_NUM_OPEN_HEADS = 4  # heads that the text activates, of 16
_NUM_ANGLES = 64  # rotary frequencies of the anchors
_ANCHOR_WIDTH = 0.24  # of the Gaussian around an anchor, as a share of the grid


class FrozenMatrices(NamedTuple):
    """Frozen random projections, float32.

    Attributes:
        tokens: From tokens to the space of the heads.
        cue: From the text mean to the space of the heads.
        heads: The 16 heads.
        tokens_aligned: From tokens to the space in which they are compared with the text.
        cue_aligned: From the text mean to that space.
    """

    tokens: torch.Tensor
    cue: torch.Tensor
    heads: torch.Tensor
    tokens_aligned: torch.Tensor
    cue_aligned: torch.Tensor


@lru_cache(maxsize=8)
def draw_matrices(width: int, text_width: int, seed: int, device: torch.device) -> FrozenMatrices:
    """Return the projections for tokens and text of the given widths."""
    shapes = ((128, width, 32), (128, text_width, 8), (16, 128, 16), (96, width, 24), (96, text_width, 24))
    with torch.inference_mode(False):  # cached tensors may be used in training later
        return FrozenMatrices(
            *(to_device(draw_sparse_matrix(*size, seed + index), device) for index, size in enumerate(shapes))
        )


def draw_sparse_matrix(rows: int, columns: int, num_nonzero: int, seed: int) -> torch.Tensor:
    """Draw a sparse normal matrix on the CPU, float32 (rows, columns).

    Each row draws its nonzero indices first and then their values. This order fixes the random stream.
    """
    generator = torch.Generator("cpu").manual_seed(seed % 2**63)
    matrix = torch.zeros(rows, columns, dtype=torch.float32, device="cpu")
    for row in matrix:
        indices = torch.randperm(columns, generator=generator, device="cpu")[:num_nonzero]
        row[indices] = normal(len(indices), generator=generator) * (1 / math.sqrt(rows))
    return matrix


def average_text(tokens: VisualTokens) -> torch.Tensor:
    """Return the mean embedding of the text after each image, float32 (S, D), or zeros without text.

    The float64 sum does not depend on the order of the tokens.
    """
    text = tokens.text.hidden
    valid = tokens.text.mask & is_finite(text.float())
    total = text.double().masked_fill(~valid.unsqueeze(2), 0).sum(1)
    return (total / valid.sum(1, keepdim=True).clamp(min=1)).float()


class Grid:
    """Grid of an image's tokens, divided into windows of 2 x 2 tokens. Windows at an edge may be smaller.

    Attributes:
        position: Row and column of each token, scaled to [0, 1], float32 (N, 2).
        window: Window index of each token, long (N,).
        slot: Index of each token in its window, long (N,), from 0 to 3.
        num_windows: Number of windows along the rows and along the columns.
    """

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.height, self.width = height, width
        token = torch.arange(height * width, device=device)
        row, column = token // width, token % width
        self.position = torch.stack([row.float() / max(1, height - 1), column.float() / max(1, width - 1)], 1)
        self.num_windows = -(-height // 2), -(-width // 2)
        self.window, self.slot = row // 2 * self.num_windows[1] + column // 2, row % 2 * 2 + column % 2

    def group_by_window(self, score: torch.Tensor) -> torch.Tensor:
        """Return `score` (N,) grouped by window, float32 (W, 4), with -inf for missing tokens."""
        table = score.new_full((math.prod(self.num_windows) * 4,), -torch.inf)
        return table.scatter(0, self.window * 4 + self.slot, score).view(-1, 4)

    def average_by_window(self, selected: torch.Tensor) -> torch.Tensor:
        """Return the share of each window's tokens that is selected, float32 (W,). selected: bool (N,)."""
        inside = self.group_by_window(selected.float())
        return inside.clamp(min=0).sum(1) / (inside >= 0).sum(1)

    def average_neighbors(self, score: torch.Tensor) -> torch.Tensor:
        """Return the mean of 3 x 3 tokens around each token, (N,). Tokens outside of the grid count as 0."""
        return torch.nn.functional.avg_pool2d(score.view(1, self.height, self.width), 3, 1, 1).flatten()

    def max_neighbors(self, score: torch.Tensor) -> torch.Tensor:
        """Return the maximum of 3 x 3 tokens around each token, (N,)."""
        return torch.nn.functional.max_pool2d(score.view(1, self.height, self.width), 3, 1, 1).flatten()

    def max_distance(self, selected: torch.Tensor) -> torch.Tensor:
        """Return the largest distance between two selected tokens. selected: bool (N,)."""
        row, column = self.position.view(self.height, self.width, 2).unbind(2)
        cells = selected.view(self.height, self.width)
        first = column.masked_fill(~cells, torch.inf).amin(1)
        last = column.masked_fill(~cells, -torch.inf).amax(1)
        across = last[:, None] - first
        across = torch.maximum(across, across.T)  # -inf for an empty row
        square = across.square() + (row[:, :1] - row[:, 0]).square()
        return square.masked_fill(across < 0, 0).amax().sqrt()


class Scores(NamedTuple):
    """Scores of each token, float32 (N,).

    Attributes:
        smell: Relevance to the question, averaged with the neighbors.
        lock: `smell` with question agreement, detail and the surroundings, for exploitation.
        jump: `lock` with a bonus for uncertainty, for exploration.
        task: Share in the heads that the question activates.
        detail: Difference to the neighbors.
        anchored: Proximity to an anchor.
    """

    smell: torch.Tensor
    lock: torch.Tensor
    jump: torch.Tensor
    task: torch.Tensor
    detail: torch.Tensor
    anchored: torch.Tensor


def standardize(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Scale `x` to mean 0 and standard deviation 1 along `dim`."""
    x = (x - x.mean(dim, keepdim=True)) / (x.std(dim, correction=0, keepdim=True) + EPSILON)
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def rescale(score: torch.Tensor) -> torch.Tensor:
    """Scale `score` to [0, 1]. Constant scores become 0."""
    low = score.amin()
    return (score - low) / (score.amax() - low + EPSILON)


def top_tokens(score: torch.Tensor, count: int | torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Select the `count` highest scores among `candidates` (bool), bool (N,). Ties go to the lower index."""
    count = torch.zeros(1, dtype=torch.long, device=score.device) + count
    return top_mask(score[None], candidates[None], count, len(score))[0]


def pick_anchors(count: int, num_kept: int, device: torch.device) -> torch.Tensor:
    """Select a tenth of the kept tokens by a rotary embedding of their index, bool (N,).

    Half of the anchors have the largest sum of cosines, the other half the largest sum of sines.
    """
    num_anchors = min(max(1, round(0.1 * num_kept)), max(1, num_kept // 4))
    num_per_part = min(-(-num_anchors // 2), count)
    token = torch.arange(count, dtype=torch.float32, device=device)
    angle = torch.arange(_NUM_ANGLES, dtype=torch.float32, device=device) * (-1 / _NUM_ANGLES)
    phase = token[:, None] * torch.pow(10000.0, angle)
    candidates = torch.ones(count, dtype=torch.bool, device=device)
    anchors = top_tokens(phase.cos().sum(1), num_per_part, candidates)
    anchors = anchors | top_tokens(phase.sin().sum(1), num_per_part, candidates)
    return anchors & (anchors.cumsum(0) <= num_anchors)


def compute_scores(
    x: torch.Tensor, text_mean: torch.Tensor, anchors: torch.Tensor, grid: Grid, matrices: FrozenMatrices
) -> Scores:
    """Return the scores of standardized tokens (N, D) for a standardized text mean (D,)."""
    task = score_in_open_heads(x, text_mean, matrices)
    aligned_text = torch.nn.functional.normalize(matrices.cue_aligned @ text_mean, dim=0)
    aligned = torch.nn.functional.normalize(x @ matrices.tokens_aligned.T, dim=1) @ aligned_text
    relevance = 0.65 * rescale(task) + 0.35 * rescale((aligned.clamp(-1, 1) + 1) / 2)
    coarse, fine = (score_position_agreement(relevance, basis) for basis in build_position_features(grid.position))
    relevance = rescale(relevance + 0.18 * coarse)
    detail = compute_detail(x, grid)
    marked = detail * (0.4 + 0.6 * task)

    smell = relevance + 0.15 * grid.average_neighbors(relevance)
    local = smell + 0.45 * task + 0.20 * marked + 0.22 * fine * (0.35 + 0.65 * task)
    lock = local + 0.35 * (0.5 * grid.average_neighbors(smell) + 0.5 * grid.max_neighbors(local))
    anchored = score_anchor_proximity(anchors, grid)
    jump = lock + 0.25 * (1 - task) + 0.35 * marked + 0.35 * 0.16 * anchored
    return Scores(smell, lock, jump, task, detail, anchored)


def score_in_open_heads(x: torch.Tensor, text_mean: torch.Tensor, matrices: FrozenMatrices) -> torch.Tensor:
    """Return the weighted share of each token in the heads that the text activates, float32 (N,), in [0, 1]."""
    heads = torch.nn.functional.normalize(matrices.heads, dim=1)
    share = ((torch.nn.functional.normalize(x @ matrices.tokens.T, dim=1) @ heads.T) / 0.7).softmax(1)
    energy = (heads @ torch.nn.functional.normalize(matrices.cue @ text_mean, dim=0) + 1) / 2
    opened = energy.argsort(descending=True, stable=True)[:_NUM_OPEN_HEADS]
    return share[:, opened] @ (energy[opened] / 0.5).softmax(0)


def build_position_features(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return coarse and fine features of positions (N, 2), float32 (N, 8) and (N, 10)."""
    y, x = positions.unbind(1)

    def waves(turns: float) -> list[torch.Tensor]:
        return [wave(turns * 2 * math.pi * axis) for axis in (x, y) for wave in (torch.sin, torch.cos)]

    coarse = [x, y, 1 - (2 * x - 1).abs(), 1 - (2 * y - 1).abs(), *waves(0.5)]
    fine = [*waves(1), *waves(2), x * y, (x - y).abs()]
    return torch.stack(coarse, 1), torch.stack(fine, 1)


def score_position_agreement(score: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return the similarity of each token's position to the score-weighted mean position, float32 (N,), in [0, 1]."""
    basis = torch.nn.functional.normalize(basis, dim=1)
    weight = score + (score.sum() <= EPSILON)
    prototype = torch.nn.functional.normalize(basis.T @ (weight / weight.sum()), dim=0)
    return ((basis @ prototype).clamp(-1, 1) + 1) / 2


def compute_detail(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the smoothed difference of each token to its four neighbors, float32 (N,), in [0, 1]."""
    cells = torch.nn.functional.normalize(x, dim=1).view(grid.height, grid.width, -1)
    difference = torch.zeros(grid.height, grid.width, dtype=torch.float32, device=x.device)
    across, down = cells.diff(dim=1).square().mean(2), cells.diff(dim=0).square().mean(2)
    difference[:, 1:] += across
    difference[:, :-1] += across
    difference[1:] += down
    difference[:-1] += down
    return rescale(grid.average_neighbors(difference))


def score_anchor_proximity(anchors: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return a Gaussian of the distance to the nearest anchor, float32 (N,). anchors: bool (N,), at least one."""
    indices = partition(anchors[None])[0, : len(anchors) // 10 + 1]  # anchors are at most a tenth of the tokens
    squared_distance = (
        (grid.position[:, None] - grid.position[indices]).square().sum(2).masked_fill(~anchors[indices], torch.inf)
    )
    return torch.exp(-squared_distance.amin(1) / (2 * _ANCHOR_WIDTH**2 + EPSILON))
