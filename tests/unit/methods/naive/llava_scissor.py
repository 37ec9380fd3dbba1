# SPDX-License-Identifier: Apache-2.0
"""llava_scissor: a loop written from its description."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from method_rows import Video
from videos import best, cos, mean


def connected(x: list[list[float]], threshold: float) -> list[list[int]]:
    """Components, each in order, by their lowest nodes."""
    found: list[list[int]] = []
    for i in range(len(x)):
        if any(i in one for one in found):
            continue
        one, edge = [i], [i]
        while edge:
            node = edge.pop()
            new = [j for j in range(len(x)) if j not in one and cos(x[node], x[j]) > threshold]
            one, edge = one + new, edge + new
        found.append(sorted(one))
    return found


Groups = list[tuple[list[list[float]], list[int]]]  # the means of each representative, and its tokens


def representatives(x: list[list[list[float]]], threshold: float) -> Groups:
    places = len(x[0])
    means, tokens = [], []
    for f, frame in enumerate(x):
        for one in connected(frame, threshold):
            means.append(mean([frame[p] for p in one]))
            tokens.append([f * places + p for p in one])
    return [([means[i] for i in one], [t for i in one for t in tokens[i]]) for one in connected(means, threshold)]


def naive(
    video: Tensor, attention: Any, keep: int, grid: Any = None, threshold: float | None = None
) -> dict[int, dict]:
    """threshold: None searches for the one that is nearest to `keep`, and settles the rest."""
    x, places = video.tolist(), video.shape[1]
    flat = [token for frame in x for token in frame]
    low, high, found, used = -1.01, 1.0, None, threshold
    for _ in range(12 if threshold is None else 0):
        middle = (low + high) / 2
        made = representatives(x, middle)
        if found is None or (abs(len(made) - keep), len(made)) < (abs(len(found) - keep), len(found)):
            found, used = made, middle
        low, high = (middle, high) if len(made) < keep else (low, middle)
        if abs(len(made) - keep) <= keep / 50:
            break
    found = representatives(x, threshold) if found is None else found
    while threshold is None and len(found) > keep:
        reps = [mean(means) for means, _ in found]
        pairs = {(i, j): cos(reps[i], reps[j]) for j in range(len(found)) for i in range(j)}
        i, j = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))
        found[i] = (found[i][0] + found[j][0], found[i][1] + found[j][1])
        del found[j]
    reps = [mean(means) for means, _ in found]
    degree = {i: sum(cos(token, other) > used for other in x[i // places]) for i, token in enumerate(flat)}
    token = [best(sorted(tokens), degree, 1)[0] for _, tokens in found]
    alike = [[cos(one, rep) for rep in reps] for one in flat]
    nearest = [max(range(len(reps)), key=lambda r: (row[r], -r)) for row in alike]
    far = {i: -alike[i][nearest[i]] for i in range(len(flat)) if i not in token}
    split = best(far, far, keep - len(token)) if threshold is None else []
    groups: dict[int, list[int]] = {}
    for i in range(len(flat)):
        groups.setdefault(i if i in token or i in split else token[nearest[i]], []).append(i)
    return {to: {i: 1 / len(of) for i in of} for to, of in groups.items()}


ROWS = {"llava_scissor": Video(naive=naive, slow=True)}
