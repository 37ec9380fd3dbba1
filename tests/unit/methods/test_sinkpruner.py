# SPDX-License-Identifier: Apache-2.0
"""sinkpruner against naive loops written from its description."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tokenprune
from several_cuts import COUNTS, SHARES, best, rows, view, wanted
from tokenprune.methods.pre_llm.sinkpruner import pick_dissimilar


def naive_dissimilar(x: Tensor, candidates: list[int], picked: list[int], num_kept: int, batch_size: int) -> list[int]:
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    chosen = list(picked)
    while len(chosen) < num_kept:
        nearest = {i: max((float(unit[i] @ unit[j]) for j in chosen), default=-math.inf) for i in candidates
                   if i not in chosen}  # fmt: skip
        chosen += sorted(nearest, key=lambda i: (nearest[i], i))[: min(batch_size, num_kept - len(chosen))]
    return sorted(chosen)


def naive_stage(features: Tensor, attention: list[float], keep: int, sinks: float) -> tuple[list[int], list[int], int]:
    """Return the kept tokens, the sinks, and the token that absorbs the sinks, or -1 without sinks."""
    count = len(features)
    num_sinks = 0 if keep >= count or not sinks else min(math.ceil(sinks * count), count - keep + 1)
    norms = [float(feature.norm()) for feature in features]
    sink_tokens = best(norms, num_sinks)
    carrier = best(norms, 1)[0] if num_sinks else -1
    rest = [i for i in range(count) if i not in sink_tokens]
    num_rest = keep - bool(num_sinks)
    salient = best(attention, (num_rest + 1) // 2, rest)
    kept = naive_dissimilar(features, rest, salient, num_rest, 16)
    return sorted(kept + [carrier] * bool(num_sinks)), sink_tokens, carrier


@pytest.mark.parametrize("sinks", [0.0, 0.01, 0.2])
def test_first_stage_equals_naive_loop(sinks: float) -> None:
    method = tokenprune.method("sinkpruner", sinks=sinks, stage2=False)
    for seed, counts in enumerate([*COUNTS, [100]]):
        for share in SHARES:
            keep = wanted(counts, share)
            attention = {-1: torch.rand(len(counts), 3, max(counts), generator=torch.Generator().manual_seed(seed))}
            tokens = view(counts, keep, {"encoder_features"}, seed=seed, encoder_attention=attention)
            selection = method.select(tokens)
            for row, (n, k) in enumerate(zip(counts, keep, strict=True)):
                kept, sink_tokens, carrier = naive_stage(
                    tokens.encoder_features[row, :n], attention[-1][row, :, :n].mean(0).tolist(), k, sinks
                )
                assert rows(selection.keep)[row] == kept and len(kept) == k
                assign = [carrier if i in sink_tokens else i if i in kept else -1 for i in range(n)]
                assert selection.assign[row, :n].tolist() == assign


def test_dissimilar_tokens_one_by_one_and_in_rounds() -> None:
    x = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(30) < torch.tensor([[30], [21]])
    picked = torch.zeros(2, 30, dtype=torch.bool)
    picked[:, [2, 5]] = True
    for batch_size in (1, 4, 16):
        got = rows(pick_dissimilar(x, mask, picked, torch.tensor([17, 9]), 17, batch_size))
        assert got == [
            naive_dissimilar(x[0], list(range(30)), [2, 5], 17, batch_size),
            naive_dissimilar(x[1], list(range(21)), [2, 5], 9, batch_size),
        ]
