# SPDX-License-Identifier: Apache-2.0
"""EarlyTom as plain loops, written from its description: one video, frame by frame, in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from naive_video import Places, cosine

# The sources of a remaining frame, as (frame before the block, weight).
Parts = list[tuple[int, float]]


def compute_similarity(a: Tensor, b: Tensor) -> float:
    """Return the mean cosine over the patches of two frames (N, D)."""
    return sum(cosine(a[p], b[p]) for p in range(len(a))) / len(a)


def segments(x: Tensor, threshold: float, m: int) -> list[list[int]]:
    """Return the frames of each segment of a video `[F, N, D]`. Segments have fewer than `m` frames, the paper's M."""
    result: list[list[int]] = [[0]]
    running = 1.0
    for i in range(1, len(x)):
        start = result[-1][0]
        running = 0.9 * compute_similarity(x[start], x[i]) + 0.1 * running
        if running < threshold or i - start + 1 >= m:
            result.append([i])
            running = 1.0
        else:
            result[-1].append(i)
    return result


def mix(x: Tensor, threshold: float, m: int, lose_last: bool) -> list[Parts]:
    mixtures: list[Parts] = []
    for segment in segments(x, threshold, m):
        if len(segment) <= 2:
            mixtures += [[(f, 1.0)] for f in segment]
            continue
        bar = compute_similarity(x[segment[0]], x[segment[-1]])
        mixtures.append([(segment[0], 1.0)])
        mixtures += mix_inner(x, segment[1:-1], bar, lose_last)
        mixtures.append([(segment[-1], 1.0)])
    return mixtures


def mix_inner(x: Tensor, frames: list[int], bar: float, lose_last: bool) -> list[Parts]:
    if len(frames) == 1:
        return [[(frames[0], 1.0)]]
    s = [compute_similarity(x[a], x[b]) for a, b in pairwise(frames)]
    mixtures: list[Parts] = []
    i = 0
    while i < len(frames) - 1:
        last_pair = i == len(frames) - 2
        if s[i] > bar and (last_pair or s[i] > s[i + 1]):
            if last_pair and lose_last:
                mixtures.append([(frames[i], 1.0)])
            else:
                a, b = max(s[i], 0.0), max(s[i if last_pair else i + 1], 0.0)
                w = a / (a + b) if a + b else 0.5
                mixtures.append([(frames[i], w), (frames[i + 1], 1 - w)])
            i += 2
        else:
            mixtures.append([(frames[i], 1.0)])
            i += 1
    if i == len(frames) - 1 and not lose_last:
        mixtures.append([(frames[i], 1.0)])
    return mixtures


def mixed(x: Tensor, parts: list[Parts]) -> Tensor:
    return torch.stack([sum(w * x[f] for f, w in part) for part in parts])  # type: ignore[misc]


def chosen(received: Tensor, groups: list[list[int]], keep: int) -> Places:
    """Select `keep` tokens of frames `[F, P]`, with the budget spread evenly over the frames."""
    frames, patches = received.shape
    keep = min(keep, frames * patches)
    kept: Places = []
    for group in groups:
        for f in group:
            count = keep * (f + 1) // frames - keep * f // frames
            row = received[f].tolist()
            if len(group) <= 2 or f in (group[0], group[-1]):
                kept += [(f, p) for p in sorted(range(patches), key=lambda p: (-row[p], p))[:count]]
                continue
            start = 0
            for n in range(count):
                size = patches // count + (n < patches % count)
                kept.append((f, max(range(start, start + size), key=lambda p: (row[p], -p))))
                start += size
    return sorted(kept)
