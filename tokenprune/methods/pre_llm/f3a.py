# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import torch

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.compact import partition
from tokenprune.kernels.drawn import normal
from tokenprune.kernels.pairs import PickedRows, Products, finite, unit
from tokenprune.kernels.picks import Picks
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_EPSILON = 1e-6
_NUM_OPEN_HEADS = 4  # heads, of 16, that a question opens
_NUM_ANGLES = 64  # of a token's index, from which anchors follow
_ANCHOR_WIDTH = 0.24  # of an anchor's surroundings, as a share of a side
_FIXED_SCORE = 1e3  # above any score


@register("f3a", site=Site.PRE_LLM, paper="arXiv 2605.16359")
@dataclass(frozen=True)
class F3A(Pruner):
    """Keep a fixed set of tokens, the best of the windows that smell of the question and anchors of position, and one
    after the other what is good, unlike those taken and far from them (F3A).

    Frozen random matrices bring tokens and the question to 16 common heads; a token smells by how much of it is in the
    four heads that the question opens, by its cosine to the question in another such space, and by its place. The
    question enters as one mean embedding of the text after the image, so the order of its words counts for nothing.

    seed: int, of the matrices.

    Source: "How Many Visual Tokens Do Multimodal Language Models Need? Scaling Visual Token Pruning with F3A", the
    summary and the authors' code, in its mode `pooled_prompt`. The paper's text was not read.

    Differs from the paper: there is one cue. The authors' default also has sentences made around the question, by what
    it asks for, which need its words; and its mean is of all text of the prompt, here of what comes after the image.
    Without text the first four heads are open. Where a grid is not known (newlines, an image of several tiles) windows
    are pairs along the raster; frames of a video are rows. Windows at an odd edge count their own tokens alone (the
    code counts the image's first token in each missing place). Of equal tokens the first is better; one that is not
    finite counts as zeros.
    """

    query_aware: ClassVar[bool] = True

    seed: int = 42

    def select(self, tokens: VisualTokens) -> Selection:
        x, text_means = tokens.hidden, average_text(tokens)
        matrices = draw_matrices(x.shape[2], text_means.shape[1], self.seed, x.device)
        pools_per_image = []
        for image, (count, num_kept, grid_shape) in enumerate(
            zip(tokens.counts, tokens.keep, tokens.grids, strict=True)
        ):
            frames, height, width = (
                grid_shape if grid_shape is not None and math.prod(grid_shape) == count else (1, 1, count)
            )
            grid = Grid(frames * height, width, x.device)
            pools_per_image.append(build_pool(x[image, :count], text_means[image], num_kept, grid, matrices))
        pools = [
            torch.nn.utils.rnn.pad_sequence(list(pools_of_kind), batch_first=True)
            for pools_of_kind in zip(*pools_per_image, strict=True)
        ]
        pick = partial(pick_spread_out, max(tokens.keep))
        return Selection(by_rows(pick, tokens.mask.shape[1] ** 2, tokens.budget, *pools), counts=tokens.keep)


class FrozenMatrices(NamedTuple):
    """Frozen matrices, float32: from tokens and from the cue to the space of heads; the heads; and from both to a space
    in which they are compared."""

    tokens: torch.Tensor
    cue: torch.Tensor
    heads: torch.Tensor
    tokens_aligned: torch.Tensor
    cue_aligned: torch.Tensor


@lru_cache(maxsize=8)
def draw_matrices(width: int, text_width: int, seed: int, device: torch.device) -> FrozenMatrices:
    """Return the matrices for tokens and a cue of these widths."""
    shapes = ((128, width, 32), (128, text_width, 8), (16, 128, 16), (96, width, 24), (96, text_width, 24))
    with torch.inference_mode(False):  # training may find them later
        return FrozenMatrices(
            *(to_device(draw_sparse_matrix(*size, seed + index), device) for index, size in enumerate(shapes))
        )


def draw_sparse_matrix(rows: int, columns: int, num_nonzero: int, seed: int) -> torch.Tensor:
    """float32 `[rows, columns]` on the host: normal numbers at `filled` places of each row, drawn row by row, first the
    places, then the numbers."""
    generator = torch.Generator("cpu").manual_seed(seed % 2**63)
    matrix = torch.zeros(rows, columns, dtype=torch.float32, device="cpu")
    for row in matrix:
        indices = torch.randperm(columns, generator=generator, device="cpu")[:num_nonzero]
        row[indices] = normal(len(indices), generator=generator) * (1 / math.sqrt(rows))
    return matrix


def average_text(tokens: VisualTokens) -> torch.Tensor:
    """float32 `[S, D]`: mean embedding of the text after each image, 0 where there is none. A sum in float64 is the
    same in any order."""
    text = tokens.text.hidden
    valid = tokens.text.mask & finite(text.float())
    total = text.double().masked_fill(~valid.unsqueeze(2), 0).sum(1)
    return (total / valid.sum(1, keepdim=True).clamp(min=1)).float()


class Grid:
    """Places of an image's tokens, and its windows of 2 x 2 tokens, of which those at the edges may be smaller.

    place:  float32 `[N, 2]`, row and column from 0 to 1.
    window: long `[N]`, the window of each token; `slot`, which of its four places.
    """

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.height, self.width = height, width
        token = torch.arange(height * width, device=device)
        row, column = token // width, token % width
        self.position = torch.stack([row.float() / max(1, height - 1), column.float() / max(1, width - 1)], 1)
        self.num_windows = -(-height // 2), -(-width // 2)
        self.window, self.slot = row // 2 * self.num_windows[1] + column // 2, row % 2 * 2 + column % 2

    def group_by_window(self, score: torch.Tensor) -> torch.Tensor:
        """float32 `[W, 4]`: `score`, `[N]`, by window and slot; -inf where a window has no token."""
        table = score.new_full((math.prod(self.num_windows) * 4,), -torch.inf)
        return table.scatter(0, self.window * 4 + self.slot, score).view(-1, 4)

    def average_by_window(self, selected: torch.Tensor) -> torch.Tensor:
        """float32 `[W]`: share of each window's tokens that is `chosen`, bool `[N]`."""
        inside = self.group_by_window(selected.float())
        return inside.clamp(min=0).sum(1) / (inside >= 0).sum(1)

    def average_neighbors(self, score: torch.Tensor) -> torch.Tensor:
        """`[N]`: mean of 3 x 3 tokens, of which those outside count as 0."""
        return torch.nn.functional.avg_pool2d(score.view(1, self.height, self.width), 3, 1, 1).flatten()

    def max_neighbors(self, score: torch.Tensor) -> torch.Tensor:
        """`[N]`: the highest of 3 x 3 tokens."""
        return torch.nn.functional.max_pool2d(score.view(1, self.height, self.width), 3, 1, 1).flatten()

    def max_distance(self, selected: torch.Tensor) -> torch.Tensor:
        """float32 scalar: the greatest distance between two of the tokens `chosen`, bool `[N]`: from an end of a row to
        that of another."""
        row, column = self.position.view(self.height, self.width, 2).unbind(2)
        cells = selected.view(self.height, self.width)
        first = column.masked_fill(~cells, torch.inf).amin(1)
        last = column.masked_fill(~cells, -torch.inf).amax(1)
        across = last[:, None] - first
        across = torch.maximum(across, across.T)  # -inf for an empty row
        square = across.square() + (row[:, :1] - row[:, 0]).square()
        return square.masked_fill(across < 0, 0).amax().sqrt()


class Scores(NamedTuple):
    """Of each token, float32 `[N]`: how much it smells of the question, that with what is around it, that for a jump to
    what is uncertain; agreement with the question, detail, and nearness to an anchor."""

    smell: torch.Tensor
    lock: torch.Tensor
    jump: torch.Tensor
    task: torch.Tensor
    detail: torch.Tensor
    anchored: torch.Tensor


def build_pool(
    x: torch.Tensor, text_mean: torch.Tensor, num_kept: int, grid: Grid, matrices: FrozenMatrices
) -> tuple[torch.Tensor, ...]:
    """Return what `spread` chooses `number` of an image's tokens `[N, D]` from, without its first dimension. cue:
    float32 `[D]`."""
    x = x.float()
    x = standardize(x.masked_fill(~finite(x).unsqueeze(1), 0), 0)
    anchors = pick_anchors(len(x), num_kept, x.device)
    scores = compute_scores(x, standardize(text_mean, 0), anchors, grid, matrices)
    fixed, candidates = forage(scores, anchors, num_kept, grid)
    _, lock, jump, task, detail, anchored = scores
    worth = lock + 0.35 * jump + 0.20 * task + 0.10 * detail + 0.08 * anchored
    in_pool = candidates | top_tokens(worth, max(3 * num_kept, num_kept + 32), torch.ones_like(fixed))
    low = worth.masked_fill(~in_pool, torch.inf).amin()
    high = worth.masked_fill(~in_pool, -torch.inf).amax()
    worth = ((worth - low) / (high - low + _EPSILON)).masked_fill(~in_pool, 0)
    return unit(x), grid.position / grid.max_distance(in_pool).clamp(min=_EPSILON), worth, in_pool, fixed


def standardize(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x` with mean 0 and standard deviation 1 along `dim`."""
    x = (x - x.mean(dim, keepdim=True)) / (x.std(dim, correction=0, keepdim=True) + _EPSILON)
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def rescale(score: torch.Tensor) -> torch.Tensor:
    """`score` from 0 to 1 over the tokens; 0 where all are alike."""
    low = score.amin()
    return (score - low) / (score.amax() - low + _EPSILON)


def top_tokens(score: torch.Tensor, count: int | torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """bool `[N]`: the `number` highest scores `among` (bool `[N]`) those that there are; of equal ones the first."""
    count = torch.zeros(1, dtype=torch.long, device=score.device) + count
    return top_mask(score[None], candidates[None], count, len(score))[0]


def pick_anchors(count: int, num_kept: int, device: torch.device) -> torch.Tensor:
    """bool `[N]`: a tenth of the number to keep, those of the greatest sum of cosines, and of sines, of a rotary
    embedding of their index."""
    num_anchors = min(max(1, round(0.1 * num_kept)), max(1, num_kept // 4))
    num_per_part = min(-(-num_anchors // 2), count)
    token = torch.arange(count, dtype=torch.float32, device=device)
    angle = torch.arange(_NUM_ANGLES, dtype=torch.float32, device=device) * (-1 / _NUM_ANGLES)
    phase = token[:, None] * torch.pow(10000.0, angle)
    candidates = torch.ones(count, dtype=torch.bool, device=device)
    anchors = top_tokens(phase.cos().sum(1), num_per_part, candidates) | top_tokens(
        phase.sin().sum(1), num_per_part, candidates
    )
    return anchors & (anchors.cumsum(0) <= num_anchors)


def compute_scores(
    x: torch.Tensor, text_mean: torch.Tensor, anchors: torch.Tensor, grid: Grid, matrices: FrozenMatrices
) -> Scores:
    """Return the scores of tokens `[N, D]` for a cue `[D]`, both standardised."""
    task = score_in_open_heads(x, text_mean, matrices)
    aligned = torch.nn.functional.normalize(x @ matrices.tokens_aligned.T, dim=1) @ torch.nn.functional.normalize(
        matrices.cue_aligned @ text_mean, dim=0
    )
    found = 0.65 * rescale(task) + 0.35 * rescale((aligned.clamp(-1, 1) + 1) / 2)
    coarse, fine = (score_position_agreement(found, basis) for basis in build_position_features(grid.position))
    found = rescale(found + 0.18 * coarse)
    detail = compute_detail(x, grid)
    marked = detail * (0.4 + 0.6 * task)

    smell = found + 0.15 * grid.average_neighbors(found)
    local = smell + 0.45 * task + 0.20 * marked + 0.22 * fine * (0.35 + 0.65 * task)
    lock = local + 0.35 * (0.5 * grid.average_neighbors(smell) + 0.5 * grid.max_neighbors(local))
    anchored = score_anchor_proximity(anchors, grid)
    jump = lock + 0.25 * (1 - task) + 0.35 * marked + 0.35 * 0.16 * anchored
    return Scores(smell, lock, jump, task, detail, anchored)


def score_in_open_heads(x: torch.Tensor, text_mean: torch.Tensor, matrices: FrozenMatrices) -> torch.Tensor:
    """float32 `[N]`: how much of each token is in the heads that the cue opens."""
    heads = torch.nn.functional.normalize(matrices.heads, dim=1)
    share = ((torch.nn.functional.normalize(x @ matrices.tokens.T, dim=1) @ heads.T) / 0.7).softmax(1)
    energy = (heads @ torch.nn.functional.normalize(matrices.cue @ text_mean, dim=0) + 1) / 2
    opened = energy.argsort(descending=True, stable=True)[:_NUM_OPEN_HEADS]
    return share[:, opened] @ (energy[opened] / 0.5).softmax(0)


def build_position_features(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[N, 8]` and `[N, 10]`: what is alike at places that are near each other, coarsely and finely."""
    y, x = positions.unbind(1)

    def waves(turns: float) -> list[torch.Tensor]:
        return [wave(turns * 2 * math.pi * axis) for axis in (x, y) for wave in (torch.sin, torch.cos)]

    coarse = [x, y, 1 - (2 * x - 1).abs(), 1 - (2 * y - 1).abs(), *waves(0.5)]
    fine = [*waves(1), *waves(2), x * y, (x - y).abs()]
    return torch.stack(coarse, 1), torch.stack(fine, 1)


def score_position_agreement(score: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """float32 `[N]`, 0 to 1: how alike the place of each token is to the mean place, weighed by `score`."""
    basis = torch.nn.functional.normalize(basis, dim=1)
    weight = score + (score.sum() <= _EPSILON)
    prototype = torch.nn.functional.normalize(basis.T @ (weight / weight.sum()), dim=0)
    return ((basis @ prototype).clamp(-1, 1) + 1) / 2


def compute_detail(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """float32 `[N]`, 0 to 1: how much tokens differ from their four neighbours, around each."""
    cells = torch.nn.functional.normalize(x, dim=1).view(grid.height, grid.width, -1)
    difference = torch.zeros(grid.height, grid.width, dtype=torch.float32, device=x.device)
    across, down = cells.diff(dim=1).square().mean(2), cells.diff(dim=0).square().mean(2)
    difference[:, 1:] += across
    difference[:, :-1] += across
    difference[1:] += down
    difference[:-1] += down
    return rescale(grid.average_neighbors(difference))


def score_anchor_proximity(anchors: torch.Tensor, grid: Grid) -> torch.Tensor:
    """float32 `[N]`: 1 at an anchor, and less the farther the nearest one is. anchors: bool `[N]`, at least one."""
    indices = partition(anchors[None])[0, : len(anchors) // 10 + 1]  # they are a tenth of what stays at most
    squared_distance = (
        (grid.position[:, None] - grid.position[indices]).square().sum(2).masked_fill(~anchors[indices], torch.inf)
    )
    return torch.exp(-squared_distance.amin(1) / (2 * _ANCHOR_WIDTH**2 + _EPSILON))


def forage(scores: Scores, anchors: torch.Tensor, num_kept: int, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """bool `[N]` each: tokens that stay in any case, and with them those of a first choice."""
    smell, lock, jump, task, detail, anchored = scores
    windows = math.prod(grid.num_windows)
    top_two = grid.group_by_window(smell).topk(2, dim=1).values
    strength = torch.where(top_two[:, 1] > -torch.inf, top_two.mean(1), top_two[:, 0]) + 0.20 * grid.average_by_window(
        anchors
    )
    num_active = max(2, min(round(num_kept / max(1.15 * len(smell) / windows, 1)), windows, num_kept))
    active = top_tokens(strength, num_active, torch.ones_like(strength, dtype=torch.bool))
    near_active = torch.nn.functional.max_pool2d(active.float().view(1, *grid.num_windows), 3, 1, 1).flatten() > 0
    is_candidate = (near_active | (grid.average_by_window(anchors) > 0))[grid.window]

    scaffold = grid.group_by_window(0.55 * smell + 0.45 * lock).argmax(1)
    fixed = anchors | (active[grid.window] & (grid.slot == scaffold[grid.window]))

    rest = (num_kept - fixed.sum()).clamp(min=0)
    num_jumps = rest.clamp(max=round(0.15 * num_kept))
    exploit_score = lock + 0.15 * strength[grid.window] + 0.20 * task + 0.16 * anchored
    selected = fixed | top_tokens(exploit_score, rest - num_jumps, is_candidate & ~fixed)

    deficit = (1 - grid.average_by_window(selected))[grid.window]
    num_recovered = num_jumps.clamp(max=round(0.05 * num_kept))
    selected = selected | top_tokens(
        0.55 * jump + 0.30 * detail + 0.25 * task + 0.15 * deficit, num_recovered, ~selected
    )
    jump_score = (
        jump + 0.50 * deficit + 0.20 * (~is_candidate).float() + 0.35 * task + 0.16 * (1.25 * anchored + 0.10 * deficit)
    )
    selected = selected | top_tokens(jump_score, num_jumps - num_recovered, ~selected)
    fill_score = lock + 0.25 * deficit + 0.20 * task + 0.08 * anchored
    return fixed, selected | top_tokens(fill_score, (num_kept - selected.sum()).clamp(min=0), ~selected)


def pick_spread_out(
    max_tokens: int, num_kept: torch.Tensor, direction: torch.Tensor, position: torch.Tensor, worth: torch.Tensor,
    mask: torch.Tensor, fixed: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """bool `[S, N]`: of what is `there`, the `fixed` tokens in their order, then again and again the best by worth,
    least cosine distance to those taken, and least distance of places to them.

    most: the largest of `number`; number: long `[S]`, how many stay; direction: float32 `[S, N, D]`, tokens of length
    1; place: float32 `[S, N, 2]`; worth: float32 `[S, N]`, 0 to 1; there, fixed: bool `[S, N]`, at least one.
    """
    products = Products(direction)
    if products.fits:
        products.table  # noqa: B018  # made here: most of its rows are asked for
    picks, row_of = Picks(mask), PickedRows(products)
    feature_distance = grid_distance = torch.zeros_like(worth)
    for step in range(max_tokens):
        score = 0.60 * worth + 0.25 * feature_distance + 0.15 * grid_distance
        score = picks.among_left(score.masked_fill(fixed, _FIXED_SCORE))
        pick = picks.take_best(score)
        picked_position = position.gather(1, pick[:, None, None].expand(-1, 1, 2))
        new_grid_distance = (position - picked_position).square().sum(2).sqrt()
        new_feature_distance = 1 - row_of(pick, score)
        # The first pick is a fixed one, whatever these are.
        feature_distance = new_feature_distance if step == 0 else torch.minimum(feature_distance, new_feature_distance)
        grid_distance = new_grid_distance if step == 0 else torch.minimum(grid_distance, new_grid_distance)
    return picks.first(num_kept)
