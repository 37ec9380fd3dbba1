# SPDX-License-Identifier: Apache-2.0
"""Naive loop of HoloV (arXiv 2510.02912)."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import torch

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best


def strips(patches: list[int], num_strips: int) -> list[list[int]]:
    size, longer = divmod(len(patches), num_strips)
    ends = [i * size + min(i, longer) for i in range(num_strips + 1)]
    return [patches[a:b] for a, b in pairwise(ends)]


def quotas(weights: list[Fraction], sizes: list[int], total: int) -> list[int]:
    """Split `total` in proportion to the weights, capped by the sizes. The remainder goes to the heaviest strips."""
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(sizes)) if i not in full]
        mass, remaining = sum(weights[i] for i in rest), total - sum(sizes[i] for i in full)
        exact = {i: weights[i] / mass * remaining if mass else Fraction(remaining, len(rest)) for i in rest}
        overfull = {i for i in rest if exact[i] > sizes[i]}
        if not overfull:
            break
        full |= overfull
    quota = [sizes[i] if i in full else int(exact[i]) for i in range(len(sizes))]
    for i in sorted((i for i in rest if quota[i] < sizes[i]), key=lambda i: (-weights[i], i))[: total - sum(quota)]:
        quota[i] += 1
    return quota


def holistic(features: torch.Tensor, scores: list[float]) -> list[float]:
    """Return h = 1e3 a + v mean|1e3 a| / mean|v| for a strip, with v the variance of each token's cosines."""
    unit = features.double() / features.double().norm(dim=-1, keepdim=True)
    count = len(scores)
    similarity = (unit @ unit.T).tolist()
    variance = []
    for i in range(count):
        row = [0.0 if i == j else similarity[i][j] for j in range(count)]
        mean = sum(row) / max(count - 1, 1)
        variance.append(sum((x - mean) ** 2 for x in row) / max(count - 1, 1))
    scale = sum(abs(1e3 * s) for s in scores) / count / (sum(variance) / count + 1e-6)
    return [1e3 * s + v * scale for s, v in zip(scores, variance, strict=True)]


def naive(tokens: VisualTokens, image: int, crops: int | None = None, rank: str = "attention") -> list[int]:
    """Split the patches into runs of raster order, and keep the top of each run by its quota."""
    count, keep = tokens.counts[image], tokens.keep[image]
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    tile = tokens.patches.tile[image, :count].tolist()
    patches, untiled = [i for i in range(count) if tile[i] >= 0], [i for i in range(count) if tile[i] < 0]
    crops_of_image = strips(patches, min(len(patches), count, crops or max(1, 16 * count // (9 * keep))))
    weights = [sum(Fraction(score[i]) for i in strip) / len(strip) for strip in crops_of_image]
    kept = []
    for strip, num_kept in zip(
        crops_of_image, quotas(weights, [len(s) for s in crops_of_image], min(keep, len(patches))), strict=True
    ):
        value = dict(zip(strip, (score[i] for i in strip), strict=True))
        if rank == "holistic":
            value = dict(zip(strip, holistic(tokens.hidden[image, strip], [score[i] for i in strip]), strict=True))
        kept += best(strip, value, num_kept)
    return sorted(kept + untiled[: keep - len(kept)])


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
