# SPDX-License-Identifier: Apache-2.0
"""v2drop against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import torch

import tokenprune
from tokenprune import Budget
from tokenprune.models.decoder_shape import DecoderShape
from zoo import FAMILIES


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
                got.append((stage.cut_layer, max(stage.min_tokens, stage.resolve_count(576, number))))
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
