# SPDX-License-Identifier: Apache-2.0
"""Naive loop of PruneSID (arXiv 2603.09480)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table
from method_rows import Picks


def naive_components(x: Tensor, num_components: int) -> Tensor:
    """Return the absolute right singular vectors of sigmoid(x)^T, centered per token, padded with zeros."""
    a = torch.sigmoid(x).T
    a = a - a.mean(0)
    vectors = torch.linalg.svd(a, full_matrices=False)[2].T.abs()[:, :num_components]
    return torch.nn.functional.pad(vectors, (0, num_components - vectors.shape[1]))


def naive_quotas(members: list[int], survivors: list[int], keep: int) -> list[int]:
    """Split `keep` over the groups in proportion to their survivors, within lower and upper bounds."""
    lower = [min(1, c) for c in members]
    upper = [min(5 * math.ceil(keep / 64), c, n) for c, n in zip(members, survivors, strict=True)]
    while sum(upper) < keep:
        upper = [min(u + 1, c) for u, c in zip(upper, members, strict=True)]
    rest, quota, previous = keep - sum(lower), list(lower), 0
    for g in range(len(members)):
        cumulative = round(sum(survivors[: g + 1]) / sum(survivors) * rest)
        quota[g] = min(lower[g] + cumulative - previous, upper[g])
        previous = cumulative
    for g in sorted(range(len(survivors)), key=lambda g: -survivors[g]):
        while sum(quota) < keep and quota[g] < upper[g]:
            quota[g] += 1
    return quota


def naive(x: Tensor, a: Tensor, keep: int, form: str = "qwen", **_: Any) -> list[int]:
    """Group tokens by principal component, suppress similar tokens in each group (NMS), and apply the quotas."""
    count = len(x)
    num_groups = min(max(int(keep / 4), 4) if form == "qwen" else max(1, int(keep / 4)), keep)
    loadings = naive_components(x, num_groups)
    group = [max(range(num_groups), key=lambda g: (float(loadings[i, g]), -g)) for i in range(count)]
    score = [float(loadings[i, group[i]]) if form == "qwen" else float(a[i]) for i in range(count)]
    similarity = cosine_table(x)
    if form == "qwen":
        mean = sum(float(similarity[i, j]) for i in range(count) for j in range(i, count)) / count**2
        threshold = max(keep / (count / 18), 1) * mean
    else:
        mean = sum(float(similarity[i, j]) for i in range(count) for j in range(count) if i != j) / (
            count * (count - 1)
        )
        threshold = keep / 32 * mean
    survivors: list[list[int]] = []
    suppressed: list[list[int]] = []
    for g in range(num_groups):
        order = sorted((i for i in range(count) if group[i] == g), key=lambda i: (-score[i], i))
        survivors.append([])
        for i in order:
            if all(similarity[i, j] <= threshold for j in survivors[g]):
                survivors[g].append(i)
        suppressed.append([i for i in order if i not in survivors[g]])
    quota = naive_quotas(
        [len(s) + len(r) for s, r in zip(survivors, suppressed, strict=True)], [len(s) for s in survivors], keep
    )
    assert sum(quota) == keep
    return [i for g in range(num_groups) for i in (survivors[g] + suppressed[g])[: quota[g]]]


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
