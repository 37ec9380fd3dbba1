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


def naive_different(x: Tensor, among: list[int], taken: list[int], number: int, at_once: int) -> list[int]:
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    chosen = list(taken)
    while len(chosen) < number:
        nearest = {i: max((float(unit[i] @ unit[j]) for j in chosen), default=-math.inf) for i in among
                   if i not in chosen}  # fmt: skip
        chosen += sorted(nearest, key=lambda i: (nearest[i], i))[: min(at_once, number - len(chosen))]
    return sorted(chosen)


def naive_stage(features: Tensor, attention: list[float], keep: int, sinks: float) -> tuple[list[int], list[int], int]:
    """Return the kept tokens, the sinks, and the token that absorbs the sinks, or -1 without sinks."""
    count = len(features)
    high = 0 if keep >= count or not sinks else min(math.ceil(sinks * count), count - keep + 1)
    norms = [float(one.norm()) for one in features]
    sink = best(norms, high)
    carrier = best(norms, 1)[0] if high else -1
    rest = [i for i in range(count) if i not in sink]
    room = keep - bool(high)
    salient = best(attention, (room + 1) // 2, rest)
    kept = naive_different(features, rest, salient, room, 16)
    return sorted(kept + [carrier] * bool(high)), sink, carrier


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
                kept, sink, carrier = naive_stage(
                    tokens.encoder_features[row, :n], attention[-1][row, :, :n].mean(0).tolist(), k, sinks
                )
                assert rows(selection.keep)[row] == kept and len(kept) == k
                into = [carrier if i in sink else i if i in kept else -1 for i in range(n)]
                assert selection.assign[row, :n].tolist() == into


def test_dissimilar_tokens_one_by_one_and_in_rounds() -> None:
    x = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(30) < torch.tensor([[30], [21]])
    taken = torch.zeros(2, 30, dtype=torch.bool)
    taken[:, [2, 5]] = True
    for at_once in (1, 4, 16):
        got = rows(pick_dissimilar(x, mask, taken, torch.tensor([17, 9]), 17, at_once))
        assert got == [
            naive_different(x[0], list(range(30)), [2, 5], 17, at_once),
            naive_different(x[1], list(range(21)), [2, 5], 9, at_once),
        ]
