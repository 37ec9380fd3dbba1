# SPDX-License-Identifier: Apache-2.0
"""framefusion against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from videos import given, moving, select, shares_of


def test_runs_of_similar_tokens() -> None:
    """Candidates 0 1 1 1 0 0 1 1 make groups of four and three tokens, and one that stays alone."""
    x = torch.eye(12)[[0, 0, 0, 0, 1, 2, 2, 2]].unsqueeze(1)
    groups = shares_of(select("framefusion", given([x], [3], [(1, 1)])), 0, 8)
    assert groups == {
        0: dict.fromkeys(range(4), 0.25),
        4: {4: 1.0},
        5: dict.fromkeys((5, 6, 7), pytest.approx(1 / 3)),
    }


def test_a_static_video_is_its_first_frame() -> None:
    frame = moving(1, 3, 4, noise=0.0)
    groups = shares_of(select("framefusion", given([frame.repeat(5, 1, 1)], [12], [(3, 4)])), 0, 60)
    assert groups == {p: {f * 12 + p: pytest.approx(0.2) for f in range(5)} for p in range(12)}


def test_nothing_is_like_a_vector_of_zeros() -> None:
    video = moving(4, 3, 3, noise=0.0)
    video[:, 4] = 0
    keep: Any = 36 - 9
    groups = shares_of(select("framefusion", given([video], [keep], [(3, 3)])), 0, 36)
    assert all(groups[i] == {i: 1.0} for i in range(4, 36, 9))


def test_less_than_a_frame_is_told() -> None:
    video = moving(3, 4, 4)
    for keep, said in ((16, False), (5, True)):
        tokens = given([video], [keep], [(4, 4)])
        select("framefusion", tokens)
        assert any("thinned uniformly" in note for note in tokens._source.notes) == said
