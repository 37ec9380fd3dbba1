# SPDX-License-Identifier: Apache-2.0
"""sparsevlm: a loop written from its description."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from method_rows import Cuts
from several_cuts import Arrived, best, naive_centres
from tokenprune import VisualTokens


def naive_raters(visual: Tensor, text: Tensor) -> list[int]:
    """Words that visual tokens are more alike to than on average, by what enters the decoder; all if there is none."""
    alike = (visual.double() @ text.double().T).softmax(1).mean(0).tolist()
    mean = sum(alike) / len(alike)
    return [i for i, one in enumerate(alike) if one > mean] or list(range(len(alike)))


def naive_clusters(count: int, keep: int, recycle: float = 0.3) -> int:
    """How many of `keep` are merged tokens, so that picks and what is then merged add up."""
    if keep in (1, count):
        return 0
    for number in range(keep):
        removed = count - keep + number
        if int(min(removed, int(recycle * removed) + 1) / 10) + 1 <= number:
            return number
    return keep - 1


def naive(seen: Arrived, decoder: Any, version: str = "1", heads: int | None = None) -> list[int]:
    """Words that the image brings up rate; the rest is merged, or, of version "+", attention divided by distance."""
    lines = [seen.text[i] for i in naive_raters(seen.entered[seen.all_places], seen.entered[seen.text])]
    if version == "+":
        return naive_plus(seen, lines, heads, decoder.rotary_emb.inv_freq.double())
    score = [sum(float(head[r, i]) for head in seen.before for r in lines) for i in seen.places]
    count, clusters = len(seen.places), naive_clusters(len(seen.places), seen.keep)
    order = sorted(range(count), key=lambda i: (-score[i], i))
    picks = order[: seen.keep - clusters]
    again = sorted(order[seen.keep - clusters :][: int(0.3 * (count - len(picks))) + 1]) if clusters else []
    centres = naive_centres(seen.hidden[[seen.places[i] for i in again]], clusters, clusters) if again else []
    return [seen.places[i] for i in picks] + [seen.places[again[i]] for i in centres]


def naive_plus(seen: Arrived, lines: list[int], loud: int, base: Tensor) -> list[int]:
    """One-dimensional positions turn pairs of numbers by angles that depend on the distance alone."""

    def profile(distance: int) -> float:
        return float(2 * (distance * base).cos().sum()) / (2 * len(base)) ** 0.5

    heads = [{i: sum(float(one[r, i]) / profile(r - i) for r in lines) for i in seen.places} for one in seen.before]
    loudest = sorted(range(len(heads)), key=lambda h: (-sum(heads[h].values()), h))[:loud]
    score = {i: sum(heads[h][i] for h in loudest) for i in seen.places}
    return sorted(seen.places, key=lambda i: (-score[i], i))[: seen.keep]


def ties(tokens: VisualTokens, cut: int, recycle: float) -> list[list[int]]:
    found = []
    for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
        text = int(tokens.text.mask[row].sum())
        raters = naive_raters(tokens.embeddings[row, :count], tokens.text.embeddings[row, :text])
        weights = torch.zeros(tokens.text.mask.shape)
        weights[row, raters] = 1 / len(raters)
        score = tokens.attention_from(weights)[row].mean(0).tolist()
        found.append(best(score[:count], keep))
    return found


ROWS = {
    "sparsevlm": Cuts(
        naive=naive,
        tried=({}, {"version": "+", "heads": 2}),
        refused=({"version": 1}, {"recycle": 1.5}, {"recycle": -0.1}, {"heads": 0}, {"layers": (1, 2)}),
        layers=(1, 2, 3),
        merges=True,
        ties=ties,
        tied=({"recycle": 0.0},),
    )
}
