# SPDX-License-Identifier: Apache-2.0
"""Video methods as plain loops in float64, written from their descriptions.

A video is a tensor (F, P, D). Each function keeps exactly `keep` tokens and returns sorted (frame, patch) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Places = list[tuple[int, int]]
Thin = Callable[[int, int], list[int]]  # (token count, budget) -> indices of the tokens to keep


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine rounded to six digits, so that unchanged tokens have exactly 1; 0 for a zero vector."""
    length = float(a.norm() * b.norm())
    return round(float(a @ b) / length * 2**20) / 2**20 if length else 0.0


def spread(size: int, count: int) -> list[int]:
    """Return the centers of equal intervals, as `uniform` does for frames of unknown shape."""
    return [math.floor((j + 0.5) * size / count) for j in range(count)]


def largest_remainders(weights: list[float], total: int, caps: list[int]) -> list[int]:
    """Split in proportion with caps. Excess goes to the others in proportion, remainders to the largest fractions."""
    capped: list[int] = []
    while True:
        free = [i for i in range(len(weights)) if i not in capped]
        remaining = total - sum(caps[i] for i in capped)
        exact = {i: remaining * weights[i] / sum(weights[j] for j in free) for i in free}
        over = [i for i in free if exact[i] > caps[i] + 1e-9]
        if not over:
            break
        capped += over
    shares = [caps[i] if i in capped else math.floor(exact[i] + 1e-9) for i in range(len(weights))]
    order = sorted(free, key=lambda i: (-round(exact[i] - shares[i], 9), i))
    for i in [i for i in order if shares[i] < caps[i]][: total - sum(shares)]:
        shares[i] += 1
    return shares


def select_highest(score: dict[tuple[int, int], float], count: int) -> Places:
    """The highest scores, of equal ones the earlier."""
    return sorted(sorted(score, key=lambda cell: (-score[cell], cell))[:count])


def evs(video: Tensor, keep: int, thin: Thin = spread) -> Places:
    frames, num_patches, _ = video.shape
    if keep <= num_patches:
        return [(0, p) for p in thin(num_patches, keep)]
    change = {(t, p): 1 - cosine(video[t, p], video[t - 1, p]) for t in range(1, frames) for p in range(num_patches)}
    return [(0, p) for p in range(num_patches)] + select_highest(change, keep - num_patches)


def dtd(video: Tensor, keep: int, thin: Thin = spread, threshold: float = 0.5, against: str = "before") -> Places:
    frames, num_patches, _ = video.shape
    if keep <= num_patches and frames * num_patches > keep:
        return [(0, p) for p in thin(num_patches, keep)]
    score = {(0, p): 4.0 for p in range(num_patches)}
    last = list(video[0])
    for t in range(1, frames):
        for p in range(num_patches):
            similarity = cosine(video[t, p], last[p])
            if similarity <= threshold:
                score[t, p] = 1 - similarity
            if against == "before" or similarity <= threshold:
                last[p] = video[t, p]
    return select_highest(score, keep)


def dycoke(video: Tensor, keep: int, thin: Thin = spread) -> Places:
    frames, num_patches, _ = video.shape
    firsts = [t for t in range(frames) if t % 4 == 0]
    others = [t for t in range(frames) if t % 4]
    if keep < len(firsts) * num_patches:
        shares = [keep // len(firsts) + (i < keep % len(firsts)) for i in range(len(firsts))]
        return [(t, p) for t, n in zip(firsts, shares, strict=True) for p in (thin(num_patches, n) if n else [])]
    kept = [(t, p) for t in firsts for p in range(num_patches)]
    remaining = keep - len(kept)
    for i, t in enumerate(others):
        other = {1: t - 1, 2: t - 2, 3: t - 1}[t % 4]
        score = {(t, p): -cosine(video[t, p], video[other, p]) for p in range(num_patches)}
        kept += select_highest(score, remaining // len(others) + (i < remaining % len(others)))
    return sorted(kept)


def sum_gaussians(a: Tensor, b: Tensor) -> float:
    squared = float((a - b) @ (a - b))
    return sum(math.exp(-squared / (2 * alpha)) for alpha in (1 / 8, 1 / 4, 1 / 2, 1, 2))


def select_calm_half(tokens: list[Tensor]) -> list[int]:
    """Return the half of the channels with the lowest population variance."""
    width = len(tokens[0])
    variance = torch.stack(tokens).var(0, correction=0).tolist()
    return sorted(sorted(range(width), key=lambda c: (variance[c], c))[: width // 2])


def mean(vectors: list[Tensor]) -> Tensor:
    return sum(vectors) / len(vectors)


def vidcom2(video: Tensor, keep: int) -> Places:
    frames, num_patches, _ = video.shape
    cells = [(t, p) for t in range(frames) for p in range(num_patches)]
    channels = select_calm_half([video[cell] for cell in cells])
    x = {cell: video[cell][channels] / video[cell][channels].norm() for cell in cells}
    centre = mean([x[cell] for cell in cells])
    frame_means = [mean([x[t, p] for p in range(num_patches)]) for t in range(frames)]
    v = {cell: sum_gaussians(x[cell], centre) for cell in cells}
    score = {cell: -(v[cell] + sum_gaussians(x[cell], frame_means[cell[0]])) for cell in cells}

    u = [-sum(v[t, p] for p in range(num_patches)) / num_patches for t in range(frames)]
    power = [math.exp((cell - max(u)) / 0.01) for cell in u]
    share = [cell / sum(power) for cell in power]
    kept: Places = []
    for t in range(frames):
        s = min(1, keep / len(cells) * (1 + share[t] - sum(share) / frames))
        kept += select_highest({(t, p): score[t, p] for p in range(num_patches)}, max(1, round(s * num_patches)))
    if len(kept) >= keep:
        return select_highest({cell: score[cell] for cell in kept}, keep)
    return sorted(kept + select_highest({cell: score[cell] for cell in cells if cell not in kept}, keep - len(kept)))


def vcast(video: Tensor, keep: int) -> Places:
    frames, num_patches, _ = video.shape
    raw = [mean(list(video[t])) for t in range(frames)]
    m = [vector / vector.norm() for vector in raw]
    turn = [1.0] * frames
    for t in range(1, frames - 1):
        before, after = m[t] - m[t - 1], m[t + 1] - m[t]
        turn[t] = 1 - float(before @ after) / (max(float(before.norm()), 1e-6) * max(float(after.norm()), 1e-6))
    weights = [math.exp(value / 0.7) for value in turn]
    if keep < frames:
        shares = largest_remainders(weights, keep, [num_patches] * frames)
    else:
        shares = [1 + n for n in largest_remainders(weights, keep - frames, [num_patches - 1] * frames)]
    kept: Places = []
    for t in range(frames):
        length = [float(x.norm()) for x in video[t]]
        low, high = min(length), max(length)
        score = {
            (t, p): 1 - cosine(video[t, p], raw[t]) + (length[p] - low) / (high - low + 1e-6)
            for p in range(num_patches)
        }
        kept += select_highest(score, shares[t])
    return kept


def stc(video: Tensor, keep: int, chunk: int = 1) -> Places:
    frames, num_patches, _ = video.shape
    channels = select_calm_half([x for t in range(min(chunk, frames)) for x in video[t]])
    raw = [[token[channels] for token in video[t]] for t in range(frames)]
    x = [[token / token.norm() for token in frame] for frame in raw]
    memory: list[Tensor] = []
    kept: Places = []
    for t in range(frames):
        if t % chunk == 0:
            memory.append(mean([token for frame in raw[t : t + chunk] for token in frame]))
        frame_mean, memory_mean = mean(x[t]), mean(memory)
        memory_mean = memory_mean / memory_mean.norm()
        score = {
            (t, p): -(sum_gaussians(x[t][p], frame_mean) + sum_gaussians(x[t][p], memory_mean))
            for p in range(num_patches)
        }
        kept += select_highest(score, keep // frames + (t < keep % frames))
    return kept


def frames(video: Tensor, keep: int, thin: Thin = spread) -> Places:
    num_frames, num_patches, _ = video.shape
    num_full, remainder = divmod(keep, num_patches)
    chosen = spread(num_frames, num_full + (remainder > 0))
    kept = [(t, p) for t in chosen[:num_full] for p in range(num_patches)]
    return kept + [(chosen[-1], p) for p in (thin(num_patches, remainder) if remainder else [])]


NAIVE = {"evs": evs, "dtd": dtd, "dycoke": dycoke, "vidcom2": vidcom2, "vcast": vcast, "stc": stc, "frames": frames}
THINNING = {"evs", "dtd", "dycoke", "frames"}
