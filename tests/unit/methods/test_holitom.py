# SPDX-License-Identifier: Apache-2.0
"""holitom against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

import pytest
import torch

import tokenprune
from tokenprune import Budget
from tokenprune.testing import visual_tokens
from videos import (
    attention_of,
    best,
    cos,
    given,
    moving,
    select,
    shares_of,
)  # fmt: skip


def test_static_video_becomes_one_frame() -> None:
    """All copies of a patch merge into one token of the first frame, with a total weight of one patch."""
    frame = moving(1, 4, 4, noise=0.0)
    for keep in (4, 9, 16):
        groups = shares_of(select("holitom", given([frame.repeat(5, 1, 1)], [keep], [(4, 4)]), inner=False), 0, 80)
        assert max(groups) < 16 and sorted(i for group in groups.values() for i in group) == list(range(80))
        one = shares_of(select("holitom", given([frame.repeat(2, 1, 1)], [keep], [(4, 4)]), inner=False), 0, 32)
        for target, group in groups.items():
            for place in range(16):
                mass = sum(part for i, part in group.items() if i % 16 == place)
                assert mass == pytest.approx(sum(part for i, part in one[target].items() if i % 16 == place))
    # Of one frame nothing is still: the best attended stay, and nothing is merged.
    alone = select("holitom", given([frame], [5], [(4, 4)]), inner=False)
    assert set(shares_of(alone, 0, 16)) == set(best(range(16), attention_of(frame)[0].tolist(), 5))


def test_zero_vectors_are_similar_to_nothing() -> None:
    video = moving(4, 3, 3, noise=0.0)
    video[:, 4] = 0
    groups = shares_of(select("holitom", given([video], [33], [(3, 3)]), inner=False, threshold=0.5), 0, 36)
    assert all(group == {i: 1.0} for i, group in groups.items() if i % 9 == 4)


def test_second_cut_merges_dropped_tokens() -> None:
    """Tokens with the most attention are kept, and each other token joins the most similar kept token."""
    g = torch.Generator().manual_seed(0)
    hidden, attention = torch.randn(2, 9, 6, generator=g), torch.rand(2, 3, 9, generator=g)
    (_, _), (inner, _) = tokenprune.method("holitom").stages(Budget(keep=0.4), 28)
    tokens = visual_tokens(hidden, [9, 5], keep=[4, 5], last_row_attention=attention)
    selection = inner.select(tokens)
    for row, count, keep in ((0, 9, 4), (1, 5, 5)):
        kept = best(range(count), attention[row].mean(0).tolist(), keep)
        x = hidden[row].tolist()
        want = [i if i in kept else max(kept, key=lambda j: (cos(x[i], x[j]), -j)) for i in range(count)]
        assert selection.assign[row].tolist() == want + [-1] * (9 - count)


def test_two_cuts_meet_average_budget() -> None:
    for layers, where in ((28, 18), (32, 21), (4, 3)):
        (first, early), (second, late) = tokenprune.method("holitom").stages(Budget(keep=0.2), layers)
        assert first == tokenprune.method("holitom", inner=False) and (second.layer, early.cuts) == (where, late.cuts)
        assert [relative for _, relative in early.cuts] == [1.0, 0.5]
    (_, _), (second, _) = tokenprune.method("holitom", layer=5, inner_keep=0.25).stages(Budget(keep=0.2), 28)
    assert second.layer == 5 and second.query_aware
    assert tokenprune.method("holitom").query_aware and tokenprune.method("holitom", inner=False).prefix_cache_safe
