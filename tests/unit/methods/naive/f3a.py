# SPDX-License-Identifier: Apache-2.0
"""f3a: a loop written from its description, on grids with odd sides too."""

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


def naive_matrix(out: int, width: int, filled: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(out):
        row, filled = [0.0] * width, min(filled, width)
        places = torch.randperm(width, generator=g)[:filled].tolist()
        for place, value in zip(places, torch.randn(filled, generator=g).tolist(), strict=True):
            row[place] = value / math.sqrt(out)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def spread_out(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0, correction=0) + EPS)


def ranged(score: Tensor) -> Tensor:
    return (score - score.min()) / (score.max() - score.min() + EPS)


def top(score: Tensor, number: int, among: Any = None) -> list[int]:
    order = sorted(range(len(score)) if among is None else among, key=lambda i: (-float(score[i]), i))
    return sorted(order[: max(0, number)])


class Cells:
    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        self.cells = list(product(range(height), range(width)))
        self.place = [(r / max(1, height - 1), c / max(1, width - 1)) for r, c in self.cells]
        self.windows = list(product(range((height + 1) // 2), range((width + 1) // 2)))
        self.window = [self.windows.index((r // 2, c // 2)) for r, c in self.cells]
        self.members = [[i for i, w in enumerate(self.window) if w == one] for one in range(len(self.windows))]

    def near(self, i: int) -> list[int]:
        (r, c), found = self.cells[i], []
        for a, b in product((-1, 0, 1), (-1, 0, 1)):
            if 0 <= r + a < self.height and 0 <= c + b < self.width:
                found.append((r + a) * self.width + c + b)
        return found

    def mean(self, score: Tensor) -> Tensor:
        return torch.stack([sum(score[j] for j in self.near(i)) / 9 for i in range(len(score))])

    def most(self, score: Tensor) -> Tensor:
        return torch.stack([max(score[j] for j in self.near(i)) for i in range(len(score))])

    def apart(self, i: int, j: int) -> float:
        return math.dist(self.place[i], self.place[j])


def naive_prior(score: Tensor, basis: list[list[float]]) -> Tensor:
    rows = unit(torch.tensor(basis, dtype=torch.float64))
    weight = score if score.sum() > EPS else score + 1
    return (rows @ unit(sum(w * row for w, row in zip(weight / weight.sum(), rows, strict=True))) + 1) / 2


def naive_bases(place: list[tuple[float, float]]) -> tuple[list[list[float]], list[list[float]]]:
    coarse, fine = [], []
    for y, x in place:

        def waves(turns: float, y: float = y, x: float = x) -> list[float]:
            return [f(2 * math.pi * turns * axis) for axis in (x, y) for f in (math.sin, math.cos)]

        coarse.append([x, y, 1 - abs(2 * x - 1), 1 - abs(2 * y - 1), *waves(0.5)])
        fine.append([*waves(1), *waves(2), x * y, abs(x - y)])
    return coarse, fine


def naive_anchors(count: int, n: int) -> list[int]:
    total = min(max(1, round(0.1 * n)), max(1, n // 4))
    theta = [10000 ** (-2 * j / 128) for j in range(64)]
    cos, sin = ([sum(f(i * t) for t in theta) for i in range(count)] for f in (math.cos, math.sin))
    each = math.ceil(total / 2)
    return sorted({*top(torch.tensor(cos), each), *top(torch.tensor(sin), each)})[:total]


def naive_scores(x: Tensor, t: Tensor, anchors: list[int], at: Cells, seed: int) -> dict[str, Tensor]:
    """x: standardised."""
    width = x.shape[1]
    cue = spread_out(t.mean(0) if len(t) else torch.zeros(width, dtype=torch.float64))
    heads = unit(naive_matrix(16, 128, 16, seed + 2))
    p = torch.softmax(unit(x @ naive_matrix(128, width, 32, seed).T) @ heads.T / 0.7, 1)
    energy = (unit(naive_matrix(128, width, 8, seed + 1) @ cue) @ heads.T + 1) / 2
    open_heads = top(energy, 4)
    gate = torch.zeros(16, dtype=torch.float64)
    gate[open_heads] = torch.softmax(energy[open_heads] / 0.5, 0)
    g = p @ gate
    aligned = unit(x @ naive_matrix(96, width, 24, seed + 3).T) @ unit(naive_matrix(96, width, 24, seed + 4) @ cue)
    q = 0.65 * ranged(g) + 0.35 * ranged((aligned + 1) / 2)
    coarse, fine = (naive_prior(q, basis) for basis in naive_bases(at.place))
    q = ranged(q + 0.18 * coarse)
    differs = torch.zeros(len(x), dtype=torch.float64)
    for i, (r, c) in enumerate(at.cells):
        for j in at.near(i):
            if abs(at.cells[j][0] - r) + abs(at.cells[j][1] - c) == 1:
                differs[i] += (unit(x)[i] - unit(x)[j]).square().mean()
    detail = ranged(at.mean(differs))
    td = detail * (0.4 + 0.6 * g)
    smell = q + 0.15 * at.mean(q)
    local = smell + 0.45 * g + 0.20 * td + 0.22 * fine * (0.35 + 0.65 * g)
    lock = local + 0.35 * (0.5 * at.mean(smell) + 0.5 * at.most(local))
    near = torch.tensor([min(at.apart(i, a) for a in anchors) for i in range(len(x))], dtype=torch.float64)
    anchored = torch.exp(-near.square() / (2 * 0.24**2))
    jump = lock + 0.25 * (1 - g) + 0.35 * td + 0.35 * 0.16 * anchored
    return {"smell": smell, "lock": lock, "jump": jump, "task": g, "detail": detail, "anchored": anchored}


def naive_first_choice(s: dict[str, Tensor], anchors: list[int], n: int, at: Cells) -> tuple[set[int], set[int]]:
    smell, lock, jump, task, detail, anchored = s.values()
    strength = []
    for members in at.members:
        two = sorted((float(smell[i]) for i in members), reverse=True)[:2]
        strength.append(sum(two) / len(two) + 0.20 * sum(i in anchors for i in members) / len(members))
    mean_capacity = len(smell) / len(at.members)
    active = top(torch.tensor(strength), max(2, min(round(n / (1.15 * mean_capacity)), len(at.members), n)))
    wide = {w for w, (r, c) in enumerate(at.windows) for a in active
            if max(abs(at.windows[a][0] - r), abs(at.windows[a][1] - c)) <= 1}  # fmt: skip
    wide |= {at.window[i] for i in anchors}
    fixed = set(anchors) | {top(0.55 * smell + 0.45 * lock, 1, at.members[w])[0] for w in active}
    taken, tokens = set(fixed), range(len(smell))
    bonus = torch.tensor([strength[at.window[i]] for i in tokens], dtype=torch.float64)
    rest = max(0, n - len(fixed))
    jumps = min(rest, round(0.15 * n))
    inside = [i for i in tokens if at.window[i] in wide and i not in taken]
    taken |= set(top(lock + 0.15 * bonus + 0.20 * task + 0.16 * anchored, rest - jumps, inside))
    full = [sum(i in taken for i in members) / len(members) for members in at.members]
    deficit = torch.tensor([1 - full[at.window[i]] for i in tokens], dtype=torch.float64)
    outside = torch.tensor([at.window[i] not in wide for i in tokens], dtype=torch.float64)

    def left() -> list[int]:
        return [i for i in tokens if i not in taken]

    recovered = min(jumps, round(0.05 * n))
    taken |= set(top(0.55 * jump + 0.30 * detail + 0.25 * task + 0.15 * deficit, recovered, left()))
    far = jump + 0.50 * deficit + 0.20 * outside + 0.35 * task + 0.16 * (1.25 * anchored + 0.10 * deficit)
    taken |= set(top(far, jumps - recovered, left()))
    taken |= set(top(lock + 0.25 * deficit + 0.20 * task + 0.08 * anchored, n - len(taken), left()))
    return fixed, taken


def naive(x: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, seed: int = 42,
          grid: tuple[int, int] | None = None, **_: Any) -> list[int]:  # fmt: skip
    at, x = Cells(*(grid or (1, len(x)))), spread_out(x)
    anchors = naive_anchors(len(x), keep)
    s = naive_scores(x, t, anchors, at, seed)
    fixed, taken = naive_first_choice(s, anchors, keep, at)
    worth = s["lock"] + 0.35 * s["jump"] + 0.20 * s["task"] + 0.10 * s["detail"] + 0.08 * s["anchored"]
    pool = sorted(taken | set(top(worth, max(3 * keep, keep + 32))))
    worth = dict(zip(pool, ranged(worth[pool]).tolist(), strict=True))
    longest = max(at.apart(i, j) for i in pool for j in pool) or 1.0
    picks, alike = sorted(fixed)[:keep], unit(x) @ unit(x).T
    while len(picks) < keep:
        gain = torch.full((len(x),), -torch.inf, dtype=torch.float64)
        for i in set(pool) - set(picks):
            apart = min(at.apart(i, j) for j in picks) / longest
            gain[i] = 0.60 * worth[i] + 0.25 * min(1 - float(alike[i, j]) for j in picks) + 0.15 * apart
        picks.append(next_pick(gain, picks, kept, slack))
    return picks


# Grids, budgets and dtypes; with the largest, the first choice reaches beyond the best by worth.
GRIDS = (
    ([(7, 9), (5, 5)], [16, 3], torch.float32),
    ([(1, 9), (9, 1)], [4, 5], torch.float32),
    ([(1, 1), (2, 2)], [1, 2], torch.float32),
    ([(13, 15)], [20], torch.float32),
    ([(12, 17), (11, 3)], [40, 30], torch.bfloat16),
)


@dataclass(frozen=True, kw_only=True)
class OnGrids(Picks):
    """Picks that depend on where a token is, so that another order of tokens is another image."""

    def cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        for options in self.tried:
            yield str(dict(options)), partial(self._compare, options, ([64, 40], [12, 17], torch.float32))
            yield f"on grids, {dict(options)}", partial(self._on_grids, options)

    def view(self, keep: int | None = None, **given: Any) -> VisualTokens:
        return image_tokens([35], [35 if keep is None else keep], grids=[(1, 5, 7)], **given)

    def _compare(self, options: Options, sizes: Any, name: str, build: Any) -> None:
        check_against(partial(self.naive, **options), name, sizes=[sizes], slack=self.slack, **options)

    def _on_grids(self, options: Options, name: str, build: Any) -> None:
        for grids, keep, dtype in GRIDS:
            tokens = image_tokens([r * c for r, c in grids], keep, dtype, grids=[(1, *grid) for grid in grids])
            got = picked(tokenprune.method(name, **options), tokens)
            for row, (grid, number) in enumerate(zip(grids, keep, strict=True)):
                seen = alone(tokens, row) | {"kept": set(got[row]), "slack": self.slack, "grid": grid}
                assert sorted(self.naive(**seen, keep=number, **options)) == got[row], (grid, number, dtype)


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
