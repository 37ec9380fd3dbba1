# SPDX-License-Identifier: Apache-2.0
"""prunesid: a loop written from its description."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table
from method_rows import Picks


def naive_components(x: Tensor, number: int) -> Tensor:
    """By a singular value decomposition of the features by tokens."""
    a = torch.sigmoid(x).T
    a = a - a.mean(0)
    vectors = torch.linalg.svd(a, full_matrices=False)[2].T.abs()[:, :number]
    return torch.nn.functional.pad(vectors, (0, number - vectors.shape[1]))


def naive_quotas(members: list[int], left: list[int], keep: int) -> list[int]:
    low = [min(1, c) for c in members]
    up = [min(5 * math.ceil(keep / 64), c, n) for c, n in zip(members, left, strict=True)]
    while sum(up) < keep:
        up = [min(u + 1, c) for u, c in zip(up, members, strict=True)]
    rest, quota, before = keep - sum(low), list(low), 0
    for g in range(len(members)):
        now = round(sum(left[: g + 1]) / sum(left) * rest)
        quota[g] = min(low[g] + now - before, up[g])
        before = now
    for g in sorted(range(len(left)), key=lambda g: -left[g]):
        while sum(quota) < keep and quota[g] < up[g]:
            quota[g] += 1
    return quota


def naive(x: Tensor, a: Tensor, keep: int, form: str = "qwen", **_: Any) -> list[int]:
    count = len(x)
    number = min(max(int(keep / 4), 4) if form == "qwen" else max(1, int(keep / 4)), keep)
    sizes = naive_components(x, number)
    group = [max(range(number), key=lambda g: (float(sizes[i, g]), -g)) for i in range(count)]
    score = [float(sizes[i, group[i]]) if form == "qwen" else float(a[i]) for i in range(count)]
    alike = cosine_table(x)
    if form == "qwen":
        mean = sum(float(alike[i, j]) for i in range(count) for j in range(i, count)) / count**2
        threshold = max(keep / (count / 18), 1) * mean
    else:
        mean = sum(float(alike[i, j]) for i in range(count) for j in range(count) if i != j) / (count * (count - 1))
        threshold = keep / 32 * mean
    stay: list[list[int]] = []
    gone: list[list[int]] = []
    for g in range(number):
        order = sorted((i for i in range(count) if group[i] == g), key=lambda i: (-score[i], i))
        stay.append([])
        for i in order:
            if all(alike[i, j] <= threshold for j in stay[g]):
                stay[g].append(i)
        gone.append([i for i in order if i not in stay[g]])
    share = naive_quotas([len(s) + len(r) for s, r in zip(stay, gone, strict=True)], [len(s) for s in stay], keep)
    assert sum(share) == keep
    return [i for g in range(number) for i in (stay[g] + gone[g])[: share[g]]]


ROWS = {
    "prunesid": Picks(
        naive=naive,
        tried=({}, {"form": "llava"}),
        refused=({"form": "clip"},),
        unchanged=("text", "unit of attention"),
        sizes=[([300, 17], [48, 3], torch.float32), ([20, 9], [20, 1], torch.float32)],
        large=False,  # the loop compares all pairs in Python
        nested=False,
    )
}
