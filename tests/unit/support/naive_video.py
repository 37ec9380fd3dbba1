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
Thin = Callable[[int, int], list[int]]  # which of so many tokens of a frame stay, where so many are to


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine to six digits, so that unchanged tokens have exactly 1; 0 for a zero vector."""
    length = float(a.norm() * b.norm())
    return round(float(a @ b) / length * 2**20) / 2**20 if length else 0.0


def spread(size: int, number: int) -> list[int]:
    """The middles of equal stretches: `uniform` where the shape of a frame is not known."""
    return [math.floor((j + 0.5) * size / number) for j in range(number)]


def largest_remainders(weights: list[float], total: int, caps: list[int]) -> list[int]:
    """Split in proportion with caps. Excess goes to the others in proportion, remainders to the largest fractions."""
    full: list[int] = []
    while True:
        free = [i for i in range(len(weights)) if i not in full]
        left = total - sum(caps[i] for i in full)
        exact = {i: left * weights[i] / sum(weights[j] for j in free) for i in free}
        over = [i for i in free if exact[i] > caps[i] + 1e-9]
        if not over:
            break
        full += over
    shares = [caps[i] if i in full else math.floor(exact[i] + 1e-9) for i in range(len(weights))]
    order = sorted(free, key=lambda i: (-round(exact[i] - shares[i], 9), i))
    for i in [i for i in order if shares[i] < caps[i]][: total - sum(shares)]:
        shares[i] += 1
    return shares


def best(score: dict[tuple[int, int], float], number: int) -> Places:
    """The highest scores, of equal ones the earlier."""
    return sorted(sorted(score, key=lambda one: (-score[one], one))[:number])


def evs(video: Tensor, keep: int, thin: Thin = spread) -> Places:
    frames, places, _ = video.shape
    if keep <= places:
        return [(0, p) for p in thin(places, keep)]
    change = {(t, p): 1 - cosine(video[t, p], video[t - 1, p]) for t in range(1, frames) for p in range(places)}
    return [(0, p) for p in range(places)] + best(change, keep - places)


def dtd(video: Tensor, keep: int, thin: Thin = spread, threshold: float = 0.5, against: str = "before") -> Places:
    frames, places, _ = video.shape
    if keep <= places and frames * places > keep:
        return [(0, p) for p in thin(places, keep)]
    score = {(0, p): 4.0 for p in range(places)}
    last = list(video[0])
    for t in range(1, frames):
        for p in range(places):
            alike = cosine(video[t, p], last[p])
            if alike <= threshold:
                score[t, p] = 1 - alike
            if against == "before" or alike <= threshold:
                last[p] = video[t, p]
    return best(score, keep)


def dycoke(video: Tensor, keep: int, thin: Thin = spread) -> Places:
    frames, places, _ = video.shape
    firsts = [t for t in range(frames) if t % 4 == 0]
    others = [t for t in range(frames) if t % 4]
    if keep < len(firsts) * places:
        shares = [keep // len(firsts) + (i < keep % len(firsts)) for i in range(len(firsts))]
        return [(t, p) for t, n in zip(firsts, shares, strict=True) for p in (thin(places, n) if n else [])]
    kept = [(t, p) for t in firsts for p in range(places)]
    left = keep - len(kept)
    for i, t in enumerate(others):
        other = {1: t - 1, 2: t - 2, 3: t - 1}[t % 4]
        score = {(t, p): -cosine(video[t, p], video[other, p]) for p in range(places)}
        kept += best(score, left // len(others) + (i < left % len(others)))
    return sorted(kept)


def gaussians(a: Tensor, b: Tensor) -> float:
    squared = float((a - b) @ (a - b))
    return sum(math.exp(-squared / (2 * alpha)) for alpha in (1 / 8, 1 / 4, 1 / 2, 1, 2))


def calm_half(tokens: list[Tensor]) -> list[int]:
    """The half of the channels of lowest population variance."""
    width = len(tokens[0])
    variance = torch.stack(tokens).var(0, correction=0).tolist()
    return sorted(sorted(range(width), key=lambda c: (variance[c], c))[: width // 2])


def mean(vectors: list[Tensor]) -> Tensor:
    return sum(vectors) / len(vectors)


def vidcom2(video: Tensor, keep: int) -> Places:
    frames, places, _ = video.shape
    every = [(t, p) for t in range(frames) for p in range(places)]
    channels = calm_half([video[one] for one in every])
    x = {one: video[one][channels] / video[one][channels].norm() for one in every}
    centre = mean([x[one] for one in every])
    of_frame = [mean([x[t, p] for p in range(places)]) for t in range(frames)]
    v = {one: gaussians(x[one], centre) for one in every}
    score = {one: -(v[one] + gaussians(x[one], of_frame[one[0]])) for one in every}

    u = [-sum(v[t, p] for p in range(places)) / places for t in range(frames)]
    power = [math.exp((one - max(u)) / 0.01) for one in u]
    share = [one / sum(power) for one in power]
    kept: Places = []
    for t in range(frames):
        s = min(1, keep / len(every) * (1 + share[t] - sum(share) / frames))
        kept += best({(t, p): score[t, p] for p in range(places)}, max(1, round(s * places)))
    if len(kept) >= keep:
        return best({one: score[one] for one in kept}, keep)
    return sorted(kept + best({one: score[one] for one in every if one not in kept}, keep - len(kept)))


def vcast(video: Tensor, keep: int) -> Places:
    frames, places, _ = video.shape
    raw = [mean(list(video[t])) for t in range(frames)]
    m = [one / one.norm() for one in raw]
    turn = [1.0] * frames
    for t in range(1, frames - 1):
        before, after = m[t] - m[t - 1], m[t + 1] - m[t]
        turn[t] = 1 - float(before @ after) / (max(float(before.norm()), 1e-6) * max(float(after.norm()), 1e-6))
    weights = [math.exp(one / 0.7) for one in turn]
    if keep < frames:
        shares = largest_remainders(weights, keep, [places] * frames)
    else:
        shares = [1 + n for n in largest_remainders(weights, keep - frames, [places - 1] * frames)]
    kept: Places = []
    for t in range(frames):
        length = [float(x.norm()) for x in video[t]]
        low, high = min(length), max(length)
        score = {
            (t, p): 1 - cosine(video[t, p], raw[t]) + (length[p] - low) / (high - low + 1e-6) for p in range(places)
        }
        kept += best(score, shares[t])
    return kept


def stc(video: Tensor, keep: int, chunk: int = 1) -> Places:
    frames, places, _ = video.shape
    channels = calm_half([x for t in range(min(chunk, frames)) for x in video[t]])
    raw = [[token[channels] for token in video[t]] for t in range(frames)]
    x = [[token / token.norm() for token in frame] for frame in raw]
    memory: list[Tensor] = []
    kept: Places = []
    for t in range(frames):
        if t % chunk == 0:
            memory.append(mean([one for frame in raw[t : t + chunk] for one in frame]))
        of_frame, so_far = mean(x[t]), mean(memory)
        so_far = so_far / so_far.norm()
        score = {(t, p): -(gaussians(x[t][p], of_frame) + gaussians(x[t][p], so_far)) for p in range(places)}
        kept += best(score, keep // frames + (t < keep % frames))
    return kept


def frames(video: Tensor, keep: int, thin: Thin = spread) -> Places:
    number, places, _ = video.shape
    whole, rest = divmod(keep, places)
    chosen = spread(number, whole + (rest > 0))
    kept = [(t, p) for t in chosen[:whole] for p in range(places)]
    return kept + [(chosen[-1], p) for p in (thin(places, rest) if rest else [])]


NAIVE = {"evs": evs, "dtd": dtd, "dycoke": dycoke, "vidcom2": vidcom2, "vcast": vcast, "stc": stc, "frames": frames}
THINNING = {"evs", "dtd", "dycoke", "frames"}
