# SPDX-License-Identifier: Apache-2.0
"""feather against naive loops written from its description."""

from __future__ import annotations

import pytest

import tokenprune
from several_cuts import rows, view
from tests.unit.methods.naive.feather import naive_even


@pytest.mark.parametrize("keep", [1, 20, 162, 300, 729])
def test_uniform_grid_matches_paper(keep: int) -> None:
    """81 of 27 x 27, if that is not more than half."""
    tokens = view([729], [keep], ["unrotated_last_row"], grids=[(1, 27, 27)])
    method = tokenprune.method("feather")
    even = set(naive_even((27, 27), 729, keep))
    assert (len(even), 0 in even) == (81, True) or keep < 162
    (got,) = rows(method.choose(tokens, 0).keep)
    assert even <= set(got) and len(got) == keep


def test_video_frames_have_separate_grids() -> None:
    tokens = view([36], [20], ["unrotated_last_row"], grids=[(4, 3, 3)])
    (got,) = rows(tokenprune.method("feather", stride=2).choose(tokens, 0).keep)
    assert {9 * f for f in range(4)} <= set(got)  # a stride of 2 takes 16, of 3 four
