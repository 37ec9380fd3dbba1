# SPDX-License-Identifier: Apache-2.0
"""flashvid against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from tests.unit.methods.naive.flashvid import naive
from tests.unit.methods.test_methods import naive_divprune
from tokenprune import Budget
from videos import attention_of, cos, given, mean, moving, same, select
from videos import shares_of as groups_of


def test_threshold_of_one_builds_no_trees() -> None:
    """Only picks and clusters within frames remain."""
    tokens = given([moving(5, 4, 4, seed=1)], [31], [(4, 4)])
    got = groups_of(select("flashvid", tokens, inner=False, threshold=1.0), 0, 80)
    assert all(len({i // 16 for i in group}) == 1 for group in got.values())


def test_equal_attention_matches_divprune() -> None:
    video = moving(4, 4, 4, seed=2)
    tokens = given([video], [20], [(4, 4)], attention=[torch.full((4, 16), 0.25)])
    selection = select("flashvid", tokens, inner=False, picks=1.0)
    for frame in range(4):
        want = sorted(naive_divprune(video[frame], 5))
        assert selection.keep[0, 16 * frame : 16 * frame + 16].nonzero().flatten().tolist() == want


def test_trees_join_previous_frame_only() -> None:
    """A tree has a token in each frame of a stretch that begins at its root, and none in another segment."""
    video = moving(8, 4, 4, seed=3, cut=5)
    groups = groups_of(select("flashvid", given([video], [40], [(4, 4)]), inner=False), 0, 128)
    assert any(len(group) > 3 for group in groups.values())
    for target, group in groups.items():
        seen = sorted({i // 16 for i in group})
        assert seen == list(range(target // 16, target // 16 + len(seen)))
        assert not {4, 5} <= set(seen)


def test_static_video_becomes_first_frame() -> None:
    """The copies of a patch form one tree, and the weights of each mean sum to one."""
    frame = moving(1, 4, 4, noise=0.0)
    attention = attention_of(frame).repeat(4, 1)
    tokens = given([frame.repeat(4, 1, 1)], [24], [(4, 4)], attention=[attention])
    groups = groups_of(select("flashvid", tokens, inner=False), 0, 64)
    assert sorted(i for group in groups.values() for i in group) == list(range(64))
    for group in groups.values():
        for i, part in group.items():
            if len(group) > 1:
                assert all(group[f * 16 + i % 16] == pytest.approx(part) for f in range(4))


def test_two_cuts_meet_average_budget() -> None:
    """The paper's shares: 1.25 times the budget up to layer 20 of 28, then 0.3 of it."""
    (first, early), (second, late) = tokenprune.method("flashvid").stages(Budget(keep=0.1), 28)
    assert first == tokenprune.method("flashvid", inner=False) and second.layer == 20
    (kept,) = early.resolve([10_000], layer=0, shape=_shape(28), text_tokens=0)
    (left,) = late.resolve([kept], layer=20, shape=_shape(28), text_tokens=0, original=[10_000])
    assert kept == pytest.approx(1250, abs=2) and left == pytest.approx(375, abs=1)


def _shape(layers: int) -> Any:
    from tokenprune.models.decoder_shape import DecoderShape

    return DecoderShape(layers, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16)


def test_dissimilar_frames_start_segments() -> None:
    """Of four frames one segment would do."""
    video = moving(4, 4, 4, seed=1)
    video[2:] += 0.4 * torch.randn(12, generator=torch.Generator().manual_seed(5))
    assert 0.5 < cos(mean(video[1].tolist()), mean(video[2].tolist())) < 0.9
    got = groups_of(select("flashvid", given([video], [27], [(4, 4)]), inner=False), 0, 64)
    same(got, naive(video, attention_of(video), 27))
