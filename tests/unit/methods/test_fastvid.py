# SPDX-License-Identifier: Apache-2.0
"""fastvid against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

import math

from videos import attention_of, best, given, moving, select, shares_of


def test_static_video_has_centres_in_anchor_frames() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    video, attention = frame.repeat(9, 1, 1), attention_of(frame).repeat(9, 1)
    tokens = given([video], [36], [(4, 4)], attention=[attention])
    groups = shares_of(select("fastvid", tokens, segments=1), 0, 144)
    top = set(best(range(16), attention[0].tolist(), 3))
    centres = [i for i in groups if i % 16 not in top]
    assert {i // 16 for i in centres} == {0, 4, 8} and len(groups) == 36
    assert sorted(i for group in groups.values() for i in group) == list(range(144))  # every token once


def test_centre_has_largest_weight() -> None:
    """However many tokens join it."""
    groups = shares_of(select("fastvid", given([moving(6, 4, 4)], [30], [(4, 4)]), segments=1), 0, 96)
    many = [group[target] for target, group in groups.items() if len(group) > 3]
    assert many and all(part > 0.6 or math.isclose(part, 0.6, abs_tol=1e-6) for part in many)
