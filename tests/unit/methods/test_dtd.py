# SPDX-License-Identifier: Apache-2.0
"""dtd against a naive loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from naive_video import Places, dtd
from tests.unit.methods.test_video_methods import FRAME_TOKENS, draw_moving, list_kept, make_tokens, to_frames
from tokenprune.testing import visual_tokens
from zoo import FAMILIES

ALL = 10**6


def select_tokens(video: Tensor, keep: int = ALL, **options: Any) -> Places:
    count = video.shape[0] * video.shape[1]
    (tokens,) = list_kept("dtd", make_tokens([video], [min(keep, count)]), **options)
    return to_frames(tokens, video.shape[1])


@each("against", ["before", "kept"])
@each("threshold", [-1.0, -0.2, 0.0, 0.5, 0.9, 1.0])
def test_matches_loop(threshold: float, against: str) -> None:
    g = torch.Generator().manual_seed(0)
    drifting = (
        torch.randn(1, FRAME_TOKENS, 12, generator=g) + torch.randn(9, FRAME_TOKENS, 12, generator=g).cumsum(0) / 2
    )
    holes, still = draw_moving(9), draw_moving(1).repeat(5, 1, 1)
    holes[3, 2] = 0  # similar to no token
    for video in (draw_moving(9), drifting, holes, still, draw_moving(1), draw_moving(2)):
        count = video.shape[0] * FRAME_TOKENS
        for keep in (3, FRAME_TOKENS, FRAME_TOKENS + 5, count // 2, count):
            want = dtd(video.double(), min(keep, count), threshold=threshold, against=against)
            assert select_tokens(video, keep, threshold=threshold, against=against) == want, (count, keep)


def test_slow_drift_accumulates_against_kept() -> None:
    """Steps of 22.5 degrees are similar to the previous frame, but two steps are not."""
    angle = torch.arange(9) * torch.pi / 8
    video = torch.stack([angle.cos(), angle.sin(), *torch.zeros(10, 9)], 1)[:, None]
    assert select_tokens(video, threshold=0.8) == [(0, 0)]
    assert select_tokens(video, threshold=0.8, against="kept") == [(0, 0), (2, 0), (4, 0), (6, 0), (8, 0)]


@pytest.mark.parametrize("against", ["before", "kept"])
def test_token_without_reference_is_kept(against: str) -> None:
    """The extra tokens of a larger frame have no reference in the previous frame. In the next frame they do."""
    token = torch.eye(12)[[0]]
    tokens = visual_tokens(token.expand(4 + 6 + 6, -1), keep=16, frames=[[4, 6, 6]], modality="video")
    assert list_kept("dtd", tokens, threshold=-0.5, against=against) == [[0, 1, 2, 3, 8, 9]]


def test_content_decides_without_bound(build: Any) -> None:
    """In a model, videos are independent, an image keeps all tokens, and `keep=1.0` drops none."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1, 0), video=([5, 3], 4))
    before = model(**inputs).logits
    num_kept = {}
    for keep in (None, 0.25, 1.0):
        with torch.no_grad(), tokenprune.patched(model, "dtd", keep=keep, threshold=0.1, record=True):
            logits = model(**inputs).logits
            num_kept[keep] = tokenprune.stats(model).visual_tokens_out
            assert torch.equal(logits, before) == (keep == 1.0)
    assert num_kept[0.25] < num_kept[None] < num_kept[1.0] == sum(map(sum, inputs.counts))
