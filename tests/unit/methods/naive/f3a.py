# SPDX-License-Identifier: Apache-2.0
"""Naive loop of F3A (arXiv 2605.16359), also compared on grids with odd sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import tokenprune
from greedy import alone, check_against, image_tokens, next_pick, picked, unit
from method_rows import Options, Picks
from tokenprune import VisualTokens

EPS = 1e-6


def naive_matrix(num_rows: int, width: int, filled: int, seed: int) -> Tensor:
    """Return a sparse random projection with `filled` values per row."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        row, filled = [0.0] * width, min(filled, width)
        columns = torch.randperm(width, generator=generator)[:filled].tolist()
        for column, value in zip(columns, torch.randn(filled, generator=generator).tolist(), strict=True):
            row[column] = value / math.sqrt(num_rows)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def spread_out(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0, correction=0) + EPS)


def ranged(score: Tensor) -> Tensor:
    return (score - score.min()) / (score.max() - score.min() + EPS)


def top(score: Tensor, count: int, candidates: Any = None) -> list[int]:
    order = sorted(range(len(score)) if candidates is None else candidates, key=lambda i: (-float(score[i]), i))
    return sorted(order[: max(0, count)])


class Cells:
    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        self.cells = list(product(range(height), range(width)))
        self.place = [(r / max(1, height - 1), c / max(1, width - 1)) for r, c in self.cells]
        self.windows = list(product(range((height + 1) // 2), range((width + 1) // 2)))
        self.window = [self.windows.index((r // 2, c // 2)) for r, c in self.cells]
        self.members = [[i for i, w in enumerate(self.window) if w == index] for index in range(len(self.windows))]

    def near(self, i: int) -> list[int]:
        (r, c), neighbors = self.cells[i], []
        for a, b in product((-1, 0, 1), (-1, 0, 1)):
            if 0 <= r + a < self.height and 0 <= c + b < self.width:
                neighbors.append((r + a) * self.width + c + b)
        return neighbors

    def mean(self, score: Tensor) -> Tensor:
        return torch.stack([sum(score[j] for j in self.near(i)) / 9 for i in range(len(score))])

    def most(self, score: Tensor) -> Tensor:
        return torch.stack([max(score[j] for j in self.near(i)) for i in range(len(score))])

    def apart(self, i: int, j: int) -> float:
        return math.dist(self.place[i], self.place[j])


def naive_prior(score: Tensor, basis: list[list[float]]) -> Tensor:
    """Return the cosine of each position basis to their score-weighted mean, scaled to 0..1."""
    rows = unit(torch.tensor(basis, dtype=torch.float64))
    weight = score if score.sum() > EPS else score + 1
    return (rows @ unit(sum(w * row for w, row in zip(weight / weight.sum(), rows, strict=True))) + 1) / 2


def naive_bases(positions: list[tuple[float, float]]) -> tuple[list[list[float]], list[list[float]]]:
    coarse, fine = [], []
    for y, x in positions:

        def waves(frequency: float, y: float = y, x: float = x) -> list[float]:
            return [f(2 * math.pi * frequency * axis) for axis in (x, y) for f in (math.sin, math.cos)]

        coarse.append([x, y, 1 - abs(2 * x - 1), 1 - abs(2 * y - 1), *waves(0.5)])
        fine.append([*waves(1), *waves(2), x * y, abs(x - y)])
    return coarse, fine


def naive_anchors(count: int, n: int) -> list[int]:
    """Return the coordinate anchors: the greatest sums of cosines and of sines of the rotary angles."""
    total = min(max(1, round(0.1 * n)), max(1, n // 4))
    theta = [10000 ** (-2 * j / 128) for j in range(64)]
    cos, sin = ([sum(f(i * t) for t in theta) for i in range(count)] for f in (math.cos, math.sin))
    half = math.ceil(total / 2)
    return sorted({*top(torch.tensor(cos), half), *top(torch.tensor(sin), half)})[:total]


def naive_scores(x: Tensor, t: Tensor, anchors: list[int], cells: Cells, seed: int) -> dict[str, Tensor]:
    """Return the scores of all tokens for standardized features `x`: smell, lock, jump, task, detail, anchor prior."""
    width = x.shape[1]
    cue = spread_out(t.mean(0) if len(t) else torch.zeros(width, dtype=torch.float64))
    heads = unit(naive_matrix(16, 128, 16, seed + 2))
    head_share = torch.softmax(unit(x @ naive_matrix(128, width, 32, seed).T) @ heads.T / 0.7, 1)
    energy = (unit(naive_matrix(128, width, 8, seed + 1) @ cue) @ heads.T + 1) / 2
    open_heads = top(energy, 4)
    gate = torch.zeros(16, dtype=torch.float64)
    gate[open_heads] = torch.softmax(energy[open_heads] / 0.5, 0)
    agreement = head_share @ gate
    aligned = unit(x @ naive_matrix(96, width, 24, seed + 3).T) @ unit(naive_matrix(96, width, 24, seed + 4) @ cue)
    q = 0.65 * ranged(agreement) + 0.35 * ranged((aligned + 1) / 2)
    coarse, fine = (naive_prior(q, basis) for basis in naive_bases(cells.place))
    q = ranged(q + 0.18 * coarse)
    difference = torch.zeros(len(x), dtype=torch.float64)
    for i, (r, c) in enumerate(cells.cells):
        for j in cells.near(i):
            if abs(cells.cells[j][0] - r) + abs(cells.cells[j][1] - c) == 1:
                difference[i] += (unit(x)[i] - unit(x)[j]).square().mean()
    detail = ranged(cells.mean(difference))
    weighted_detail = detail * (0.4 + 0.6 * agreement)
    smell = q + 0.15 * cells.mean(q)
    local = smell + 0.45 * agreement + 0.20 * weighted_detail + 0.22 * fine * (0.35 + 0.65 * agreement)
    lock = local + 0.35 * (0.5 * cells.mean(smell) + 0.5 * cells.most(local))
    distance = torch.tensor([min(cells.apart(i, a) for a in anchors) for i in range(len(x))], dtype=torch.float64)
    anchor_prior = torch.exp(-distance.square() / (2 * 0.24**2))
    jump = lock + 0.25 * (1 - agreement) + 0.35 * weighted_detail + 0.35 * 0.16 * anchor_prior
    return {"smell": smell, "lock": lock, "jump": jump, "task": agreement, "detail": detail, "anchored": anchor_prior}


def naive_first_choice(
    scores: dict[str, Tensor], anchors: list[int], keep: int, cells: Cells
) -> tuple[set[int], set[int]]:
    """Return the fixed tokens (anchors and the best token of each active window) and the candidate tokens."""
    smell, lock, jump, task, detail, anchor_prior = scores.values()
    strength = []
    for members in cells.members:
        best_two = sorted((float(smell[i]) for i in members), reverse=True)[:2]
        strength.append(sum(best_two) / len(best_two) + 0.20 * sum(i in anchors for i in members) / len(members))
    mean_capacity = len(smell) / len(cells.members)
    active = top(torch.tensor(strength), max(2, min(round(keep / (1.15 * mean_capacity)), len(cells.members), keep)))
    candidate_windows = {w for w, (r, c) in enumerate(cells.windows) for a in active
                         if max(abs(cells.windows[a][0] - r), abs(cells.windows[a][1] - c)) <= 1}  # fmt: skip
    candidate_windows |= {cells.window[i] for i in anchors}
    fixed = set(anchors) | {top(0.55 * smell + 0.45 * lock, 1, cells.members[w])[0] for w in active}
    selected, tokens = set(fixed), range(len(smell))
    bonus = torch.tensor([strength[cells.window[i]] for i in tokens], dtype=torch.float64)
    num_left = max(0, keep - len(fixed))
    num_jumps = min(num_left, round(0.15 * keep))
    candidates = [i for i in tokens if cells.window[i] in candidate_windows and i not in selected]
    selected |= set(top(lock + 0.15 * bonus + 0.20 * task + 0.16 * anchor_prior, num_left - num_jumps, candidates))
    coverage = [sum(i in selected for i in members) / len(members) for members in cells.members]
    deficit = torch.tensor([1 - coverage[cells.window[i]] for i in tokens], dtype=torch.float64)
    outside = torch.tensor([cells.window[i] not in candidate_windows for i in tokens], dtype=torch.float64)

    def list_unselected() -> list[int]:
        return [i for i in tokens if i not in selected]

    recovered = min(num_jumps, round(0.05 * keep))
    selected |= set(top(0.55 * jump + 0.30 * detail + 0.25 * task + 0.15 * deficit, recovered, list_unselected()))
    far_score = jump + 0.50 * deficit + 0.20 * outside + 0.35 * task + 0.16 * (1.25 * anchor_prior + 0.10 * deficit)
    selected |= set(top(far_score, num_jumps - recovered, list_unselected()))
    selected |= set(
        top(lock + 0.25 * deficit + 0.20 * task + 0.08 * anchor_prior, keep - len(selected), list_unselected())
    )
    return fixed, selected


def naive(x: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, seed: int = 42,
          grid: tuple[int, int] | None = None, **_: Any) -> list[int]:  # fmt: skip
    """Greedy selection from the candidates by worth, cosine distance and distance on the grid."""
    cells, x = Cells(*(grid or (1, len(x)))), spread_out(x)
    anchors = naive_anchors(len(x), keep)
    scores = naive_scores(x, t, anchors, cells, seed)
    fixed, selected = naive_first_choice(scores, anchors, keep, cells)
    worth = (
        scores["lock"]
        + 0.35 * scores["jump"]
        + 0.20 * scores["task"]
        + 0.10 * scores["detail"]
        + 0.08 * scores["anchored"]
    )
    pool = sorted(selected | set(top(worth, max(3 * keep, keep + 32))))
    worth = dict(zip(pool, ranged(worth[pool]).tolist(), strict=True))
    max_distance = max(cells.apart(i, j) for i in pool for j in pool) or 1.0
    picks, similarity = sorted(fixed)[:keep], unit(x) @ unit(x).T
    while len(picks) < keep:
        gain = torch.full((len(x),), -torch.inf, dtype=torch.float64)
        for i in set(pool) - set(picks):
            distance = min(cells.apart(i, j) for j in picks) / max_distance
            gain[i] = 0.60 * worth[i] + 0.25 * min(1 - float(similarity[i, j]) for j in picks) + 0.15 * distance
        picks.append(next_pick(gain, picks, kept, slack))
    return picks


# Grids, budgets and dtypes. On the largest grid, the candidates include tokens outside the top by worth.
GRIDS = (
    ([(7, 9), (5, 5)], [16, 3], torch.float32),
    ([(1, 9), (9, 1)], [4, 5], torch.float32),
    ([(1, 1), (2, 2)], [1, 2], torch.float32),
    ([(13, 15)], [20], torch.float32),
    ([(12, 17), (11, 3)], [40, 30], torch.bfloat16),
)


@dataclass(frozen=True, kw_only=True)
class OnGrids(Picks):
    """Picks that depend on the grid position of a token, so no test permutes the tokens."""

    def cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        for options in self.tried:
            yield str(dict(options)), partial(self._compare, options, ([64, 40], [12, 17], torch.float32))
            yield f"on grids, {dict(options)}", partial(self._on_grids, options)

    def view(self, keep: int | None = None, **observables: Any) -> VisualTokens:
        return image_tokens([35], [35 if keep is None else keep], grids=[(1, 5, 7)], **observables)

    def _compare(self, options: Options, sizes: Any, name: str, build: Any) -> None:
        check_against(partial(self.naive, **options), name, sizes=[sizes], slack=self.slack, **options)

    def _on_grids(self, options: Options, name: str, build: Any) -> None:
        for grids, keep, dtype in GRIDS:
            tokens = image_tokens([r * c for r, c in grids], keep, dtype, grids=[(1, *grid) for grid in grids])
            actual = picked(tokenprune.method(name, **options), tokens)
            for row, (grid, num_kept) in enumerate(zip(grids, keep, strict=True)):
                inputs = alone(tokens, row) | {"kept": set(actual[row]), "slack": self.slack, "grid": grid}
                assert sorted(self.naive(**inputs, keep=num_kept, **options)) == actual[row], (grid, num_kept, dtype)


ROWS = {
    "f3a": OnGrids(
        naive=naive,
        tried=({}, {"seed": 7}),
        refused=({"seed": 1.5}, {"seed": "42"}),
        unchanged=("order of text", "text twice"),
        large=False,  # the loop compares all pairs in Python
        slack=1e-5,
    )
}
