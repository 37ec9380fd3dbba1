# SPDX-License-Identifier: Apache-2.0
"""Naive loop of SparseVLM (arXiv 2410.04417)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from method_rows import Cuts
from several_cuts import Arrived, best, naive_centres
from tokenprune import VisualTokens


def naive_raters(visual: Tensor, text: Tensor) -> list[int]:
    """Return the text tokens whose mean softmax similarity to the visual tokens exceeds the average, or all of them."""
    similarity = (visual.double() @ text.double().T).softmax(1).mean(0).tolist()
    mean = sum(similarity) / len(similarity)
    return [i for i, value in enumerate(similarity) if value > mean] or list(range(len(similarity)))


def naive_clusters(count: int, keep: int, recycle: float = 0.3) -> int:
    """Return the number of merged tokens, so that picked and merged tokens add up to `keep`."""
    if keep in (1, count):
        return 0
    for num_merged in range(keep):
        removed = count - keep + num_merged
        if int(min(removed, int(recycle * removed) + 1) / 10) + 1 <= num_merged:
            return num_merged
    return keep - 1


def naive(arrived: Arrived, decoder: Any, version: str = "1", heads: int | None = None) -> list[int]:
    """Rank by the attention of the raters, and merge dropped tokens by density peaks. Version "+" only ranks."""
    raters = [arrived.text[i] for i in naive_raters(arrived.entered[arrived.all_places], arrived.entered[arrived.text])]
    if version == "+":
        return naive_plus(arrived, raters, heads, decoder.rotary_emb.inv_freq.double())
    score = [sum(float(head[r, i]) for head in arrived.before for r in raters) for i in arrived.places]
    count, clusters = len(arrived.places), naive_clusters(len(arrived.places), arrived.keep)
    order = sorted(range(count), key=lambda i: (-score[i], i))
    picks = order[: arrived.keep - clusters]
    recycled = sorted(order[arrived.keep - clusters :][: int(0.3 * (count - len(picks))) + 1]) if clusters else []
    centres = (
        naive_centres(arrived.hidden[[arrived.places[i] for i in recycled]], clusters, clusters) if recycled else []
    )
    return [arrived.places[i] for i in picks] + [arrived.places[recycled[i]] for i in centres]


def naive_plus(arrived: Arrived, raters: list[int], num_heads: int, inverse_frequencies: Tensor) -> list[int]:
    """Divide the attention by the RoPE decay at each distance, and sum the heads with the greatest totals."""

    def profile(distance: int) -> float:
        return float(2 * (distance * inverse_frequencies).cos().sum()) / (2 * len(inverse_frequencies)) ** 0.5

    heads = [
        {i: sum(float(head[r, i]) / profile(r - i) for r in raters) for i in arrived.places} for head in arrived.before
    ]
    top_heads = sorted(range(len(heads)), key=lambda h: (-sum(heads[h].values()), h))[:num_heads]
    score = {i: sum(heads[h][i] for h in top_heads) for i in arrived.places}
    return sorted(arrived.places, key=lambda i: (-score[i], i))[: arrived.keep]


def ties(tokens: VisualTokens, cut: int, recycle: float) -> list[list[int]]:
    expected = []
    for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
        text = int(tokens.text.mask[row].sum())
        raters = naive_raters(tokens.embeddings[row, :count], tokens.text.embeddings[row, :text])
        weights = torch.zeros(tokens.text.mask.shape)
        weights[row, raters] = 1 / len(raters)
        score = tokens.attention_from(weights)[row].mean(0).tolist()
        expected.append(best(score[:count], keep))
    return expected


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
