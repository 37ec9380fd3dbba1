# SPDX-License-Identifier: Apache-2.0
"""v2drop against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import torch

import tokenprune
from several_cuts import Arrived, best, check_in_model, check_ties
from tokenprune import Budget, VisualTokens
from tokenprune.shapes.decoder import DecoderShape
from zoo import FAMILIES


def naive(seen: Arrived) -> list[int]:
    change = {i: float((seen.hidden[i].double() - seen.previous[i].double()).square().sum()) for i in seen.places}
    return sorted(seen.places, key=lambda i: (-change[i], i))[: seen.keep]


def test_what_changes_most_stays(build: Any) -> None:
    """Also where cuts are at neighbouring layers, and one of them at layer 1: what enters are the embeddings."""
    for name in ("llava", "qwen2_5_vl"):
        cuts = check_in_model("v2drop", naive, build, keep=0.5, name=name)
        assert [cut.layer for cut in cuts] == [1, 2, 3]


def test_ties_go_to_the_first() -> None:
    def of_tokens(tokens: VisualTokens, cut: int) -> list[list[int]]:
        change = (tokens.hidden.float() - tokens.previous_hidden.float()).norm(dim=-1).tolist()
        return [best(row[:n], k) for row, n, k in zip(change, tokens.counts, tokens.keep, strict=True)]

    check_ties(tokenprune.method("v2drop"), of_tokens)


def test_the_schedule_is_the_authors() -> None:
    """576, 288, 144 and 1; of other averages the second cut keeps half as many as the first, the third one token."""
    shape = DecoderShape(32, hidden=8, intermediate=16, heads=1, kv_heads=1, head_dim=8)
    about = dict(shape=shape, text_tokens=0, original=[576])
    for keep, first, tolerance in ((0.352, 288, 1), (192 / 576, 267, 1), (128 / 576, 143, 1)):
        for last, least in (("one", 1), ("withdraw", 0)):
            method = tokenprune.method("v2drop", last=last)
            got = []
            for stage, part in method.stages(Budget(keep=keep), 32):
                (number,) = part.resolve([576], layer=stage.cut_layer, **about)
                got.append((stage.cut_layer, max(stage.least, stage.budget(576, number))))
            assert [layer for layer, _ in got] == [3, 17, 22]
            assert abs(got[0][1] - first) <= tolerance and abs(got[1][1] - got[0][1] / 2) <= 1
            assert got[2][1] == least


@torch.no_grad()
def test_the_last_cut_may_withdraw(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, "v2drop", keep=0.5, last="withdraw"):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_per_layer[-1] == 0
    with tokenprune.patched(model, "v2drop", keep=0.5):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_per_layer[-1] == 3  # one of each image
