# SPDX-License-Identifier: Apache-2.0
"""Naive loop of LLaVA-Scissor (arXiv 2506.21862)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from method_rows import Video
from videos import best, cos, mean


def connected(x: list[list[float]], threshold: float) -> list[list[int]]:
    """Return the connected components of the graph cos > threshold, ordered by their lowest nodes."""
    components: list[list[int]] = []
    for i in range(len(x)):
        if any(i in component for component in components):
            continue
        component, frontier = [i], [i]
        while frontier:
            node = frontier.pop()
            new = [j for j in range(len(x)) if j not in component and cos(x[node], x[j]) > threshold]
            component, frontier = component + new, frontier + new
        components.append(sorted(component))
    return components


Groups = list[tuple[list[list[float]], list[int]]]  # the means of each representative, and its tokens


def representatives(x: list[list[list[float]]], threshold: float) -> Groups:
    """Find components of each frame, then components of their means."""
    num_cells = len(x[0])
    means, tokens = [], []
    for f, frame in enumerate(x):
        for component in connected(frame, threshold):
            means.append(mean([frame[p] for p in component]))
            tokens.append([f * num_cells + p for p in component])
    return [
        ([means[i] for i in component], [t for i in component for t in tokens[i]])
        for component in connected(means, threshold)
    ]


def naive(
    video: Tensor, attention: Any, keep: int, grid: Any = None, threshold: float | None = None
) -> dict[int, dict]:
    """Merge each token into the most similar representative.

    threshold: None searches for a threshold with about `keep` components, then merges or splits to reach `keep`.
    """
    x, num_cells = video.tolist(), video.shape[1]
    flat = [token for frame in x for token in frame]
    low, high, components, used_threshold = -1.01, 1.0, None, threshold
    for _ in range(12 if threshold is None else 0):
        middle = (low + high) / 2
        candidate = representatives(x, middle)
        if components is None or (abs(len(candidate) - keep), len(candidate)) < (
            abs(len(components) - keep),
            len(components),
        ):
            components, used_threshold = candidate, middle
        low, high = (middle, high) if len(candidate) < keep else (low, middle)
        if abs(len(candidate) - keep) <= keep / 50:
            break
    components = representatives(x, threshold) if components is None else components
    while threshold is None and len(components) > keep:
        reps = [mean(means) for means, _ in components]
        pairs = {(i, j): cos(reps[i], reps[j]) for j in range(len(components)) for i in range(j)}
        i, j = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))
        components[i] = (components[i][0] + components[j][0], components[i][1] + components[j][1])
        del components[j]
    reps = [mean(means) for means, _ in components]
    degree = {i: sum(cos(token, other) > used_threshold for other in x[i // num_cells]) for i, token in enumerate(flat)}
    token = [best(sorted(tokens), degree, 1)[0] for _, tokens in components]
    similarity = [[cos(vector, rep) for rep in reps] for vector in flat]
    nearest = [max(range(len(reps)), key=lambda r: (row[r], -r)) for row in similarity]
    dissimilarity = {i: -similarity[i][nearest[i]] for i in range(len(flat)) if i not in token}
    singles = best(dissimilarity, dissimilarity, keep - len(token)) if threshold is None else []
    groups: dict[int, list[int]] = {}
    for i in range(len(flat)):
        groups.setdefault(i if i in token or i in singles else token[nearest[i]], []).append(i)
    return {kept_token: {i: 1 / len(members) for i in members} for kept_token, members in groups.items()}


ROWS = {"llava_scissor": Video(naive=naive, slow=True)}
