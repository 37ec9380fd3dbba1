# SPDX-License-Identifier: Apache-2.0
"""Methods that merge tokens of videos: behavior that their loops in naive/ do not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from each import each
from tests.unit.methods.naive.flashvid import naive as naive_flashvid
from tokenprune import Budget
from tokenprune.testing import visual_tokens
from videos import attention_of, best, cos, given, mean, moving, same, select, shares_of

# Method, options, decoder layers, layer of the second cut, and its share of the tokens kept by the first cut.
TWO_CUTS = [
    *((name, {}, *sizes, 0.5) for name in ("holitom", "unipool") for sizes in ((28, 18), (32, 21), (4, 3))),
    ("holitom", {"layer": 5, "inner_keep": 0.25}, 28, 5, 0.25), ("unipool", {"inner": 0.25}, 28, 7, 0.5),
    ("prunevid", {"inner_keep": 0.2}, 32, 11, 0.2), ("flashvid", {}, 28, 20, 0.3),
]  # fmt: skip


@each(("name", "options", "layers", "layer", "share"), TWO_CUTS)
def test_two_cuts_share_a_budget(name: str, options: dict[str, Any], layers: int, layer: int, share: float) -> None:
    method, single = tokenprune.method(name, **options), tokenprune.method(name, inner=False)
    (first, early), (second, late) = method.stages(Budget(keep=0.2), layers)
    assert first == single or options
    assert (second.layer, late.cuts) == (layer, early.cuts) and [part for _, part in early.cuts] == [1.0, share]
    assert second.query_aware and method.query_aware and single.prefix_cache_safe


# -- fastvid -----------------------------------------------------------------------------------------------------------


def test_fastvid_static_video_has_centres_in_anchor_frames() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    video, attention = frame.repeat(9, 1, 1), attention_of(frame).repeat(9, 1)
    tokens = given([video], [36], [(4, 4)], attention=[attention])
    groups = shares_of(select("fastvid", tokens, segments=1), 0, 144)
    top = set(best(range(16), attention[0].tolist(), 3))
    centres = [i for i in groups if i % 16 not in top]
    assert {i // 16 for i in centres} == {0, 4, 8} and len(groups) == 36
    assert sorted(i for group in groups.values() for i in group) == list(range(144))  # every token once


# -- framefusion -------------------------------------------------------------------------------------------------------


def test_framefusion_runs_merge_into_first_token() -> None:
    """Candidates 0 1 1 1 0 0 1 1 give groups of four and three tokens, and one unmerged token."""
    x = torch.eye(12)[[0, 0, 0, 0, 1, 2, 2, 2]].unsqueeze(1)
    groups = shares_of(select("framefusion", given([x], [3], [(1, 1)])), 0, 8)
    assert groups == {
        0: dict.fromkeys(range(4), 0.25),
        4: {4: 1.0},
        5: dict.fromkeys((5, 6, 7), pytest.approx(1 / 3)),
    }


def test_framefusion_static_video_becomes_first_frame() -> None:
    frame = moving(1, 3, 4, noise=0.0)
    groups = shares_of(select("framefusion", given([frame.repeat(5, 1, 1)], [12], [(3, 4)])), 0, 60)
    assert groups == {p: {f * 12 + p: pytest.approx(0.2) for f in range(5)} for p in range(12)}


def test_framefusion_zero_vectors_are_similar_to_nothing() -> None:
    video = moving(4, 3, 3, noise=0.0)
    video[:, 4] = 0
    keep: Any = 36 - 9
    groups = shares_of(select("framefusion", given([video], [keep], [(3, 3)])), 0, 36)
    assert all(groups[i] == {i: 1.0} for i in range(4, 36, 9))


def test_framefusion_budget_below_frame_is_noted() -> None:
    video = moving(3, 4, 4)
    for keep, is_noted in ((16, False), (5, True)):
        tokens = given([video], [keep], [(4, 4)])
        select("framefusion", tokens)
        assert any("thinned uniformly" in note for note in tokens._source.notes) == is_noted


# -- flashvid ----------------------------------------------------------------------------------------------------------


def test_flashvid_static_video_becomes_first_frame() -> None:
    """All copies of a patch are merged with equal weights."""
    frame = moving(1, 4, 4, noise=0.0)
    attention = attention_of(frame).repeat(4, 1)
    tokens = given([frame.repeat(4, 1, 1)], [24], [(4, 4)], attention=[attention])
    groups = shares_of(select("flashvid", tokens, inner=False), 0, 64)
    assert sorted(i for group in groups.values() for i in group) == list(range(64))
    for group in groups.values():
        for i, part in group.items():
            if len(group) > 1:
                assert all(group[f * 16 + i % 16] == pytest.approx(part) for f in range(4))


def test_flashvid_dissimilar_frames_start_segments() -> None:
    video = moving(4, 4, 4, seed=1)
    video[2:] += 0.4 * torch.randn(12, generator=torch.Generator().manual_seed(5))
    assert 0.5 < cos(mean(video[1].tolist()), mean(video[2].tolist())) < 0.9
    got = shares_of(select("flashvid", given([video], [27], [(4, 4)]), inner=False), 0, 64)
    same(got, naive_flashvid(video, attention_of(video), 27))


# -- holitom -----------------------------------------------------------------------------------------------------------


def test_holitom_static_video_becomes_one_frame() -> None:
    """All copies of a patch merge into one token of the first frame, with the total weight of one patch."""
    frame = moving(1, 4, 4, noise=0.0)
    for keep in (4, 9, 16):
        groups = shares_of(select("holitom", given([frame.repeat(5, 1, 1)], [keep], [(4, 4)]), inner=False), 0, 80)
        assert max(groups) < 16 and sorted(i for group in groups.values() for i in group) == list(range(80))
        reference = shares_of(select("holitom", given([frame.repeat(2, 1, 1)], [keep], [(4, 4)]), inner=False), 0, 32)
        for target, group in groups.items():
            for patch in range(16):
                mass = sum(part for i, part in group.items() if i % 16 == patch)
                assert mass == pytest.approx(sum(part for i, part in reference[target].items() if i % 16 == patch))
    # A single frame has no static tokens: the tokens with the highest attention are kept, without merging.
    selection = select("holitom", given([frame], [5], [(4, 4)]), inner=False)
    assert set(shares_of(selection, 0, 16)) == set(best(range(16), attention_of(frame)[0].tolist(), 5))


def test_holitom_zero_vectors_are_similar_to_nothing() -> None:
    video = moving(4, 3, 3, noise=0.0)
    video[:, 4] = 0
    groups = shares_of(select("holitom", given([video], [33], [(3, 3)]), inner=False, threshold=0.5), 0, 36)
    assert all(group == {i: 1.0} for i, group in groups.items() if i % 9 == 4)


def test_holitom_second_cut_merges_dropped_tokens() -> None:
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
