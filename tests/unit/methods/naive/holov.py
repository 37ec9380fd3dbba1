# SPDX-License-Identifier: Apache-2.0
"""holov: a loop written from its description."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import torch

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best


def strips(places: list[int], number: int) -> list[list[int]]:
    size, longer = divmod(len(places), number)
    ends = [i * size + min(i, longer) for i in range(number + 1)]
    return [places[a:b] for a, b in pairwise(ends)]


def quotas(weights: list[Fraction], sizes: list[int], total: int) -> list[int]:
    """In proportion; what a strip has no room for goes to the others, what does not divide to the heaviest ones."""
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(sizes)) if i not in full]
        mass, left = sum(weights[i] for i in rest), total - sum(sizes[i] for i in full)
        exact = {i: weights[i] / mass * left if mass else Fraction(left, len(rest)) for i in rest}
        above = {i for i in rest if exact[i] > sizes[i]}
        if not above:
            break
        full |= above
    got = [sizes[i] if i in full else int(exact[i]) for i in range(len(sizes))]
    for i in sorted((i for i in rest if got[i] < sizes[i]), key=lambda i: (-weights[i], i))[: total - sum(got)]:
        got[i] += 1
    return got


def holistic(features: torch.Tensor, scores: list[float]) -> list[float]:
    """Step 2 and 3 of the description, of one strip, with a weight of 1."""
    unit = features.double() / features.double().norm(dim=-1, keepdim=True)
    number = len(scores)
    alike = (unit @ unit.T).tolist()
    spread = []
    for i in range(number):
        row = [0.0 if i == j else alike[i][j] for j in range(number)]
        mean = sum(row) / max(number - 1, 1)
        spread.append(sum((x - mean) ** 2 for x in row) / max(number - 1, 1))
    level = sum(abs(1e3 * s) for s in scores) / number / (sum(spread) / number + 1e-6)
    return [1e3 * s + v * level for s, v in zip(scores, spread, strict=True)]


def naive(tokens: VisualTokens, image: int, crops: int | None = None, rank: str = "attention") -> list[int]:
    count, keep = tokens.counts[image], tokens.keep[image]
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    tile = tokens.patches.tile[image, :count].tolist()
    patches, others = [i for i in range(count) if tile[i] >= 0], [i for i in range(count) if tile[i] < 0]
    cut = strips(patches, min(len(patches), count, crops or max(1, 16 * count // (9 * keep))))
    weights = [sum(Fraction(score[i]) for i in strip) / len(strip) for strip in cut]
    kept = []
    for strip, number in zip(cut, quotas(weights, [len(s) for s in cut], min(keep, len(patches))), strict=True):
        value = dict(zip(strip, (score[i] for i in strip), strict=True))
        if rank == "holistic":
            value = dict(zip(strip, holistic(tokens.hidden[image, strip], [score[i] for i in strip]), strict=True))
        kept += best(strip, value, number)
    return sorted(kept + others[: keep - len(kept)])


CROPS = [{"crops": crops} for crops in (None, 1, 3, 999)]
ROWS = {
    "holov": Tower(
        naive=naive,
        tried=[*CROPS, {"crops": 3, "rank": "holistic"}],
        tied=CROPS,
        papers=(((24, 24), 64), ((24, 24), 192), ((48, 60), 320)),
        refused=({"crops": 0}, {"rank": "variance"}),
        unchanged=("tokens", "order of heads", "unit of attention"),
    )
}
