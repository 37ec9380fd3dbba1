# SPDX-License-Identifier: Apache-2.0
"""holitom against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from tests.kernels.test_temporal import naive_shares
from tokenprune import Budget, OptionError
from tokenprune.testing import check_method, visual_tokens
from videos import (
    attention_of,
    best,
    check_counts,
    clusters,
    compare,
    cos,
    given,
    mean,
    moving,
    same,
    select,
    shares_of,
)  # fmt: skip


def still_places(steps: list[list[bool]], begin: int, end: int) -> list[int]:
    """Places that are still in the window of frames `begin` to `end`, both inside. steps: of each pair of frames."""
    places = range(len(steps[0])) if steps else []
    return [p for p in places if end > begin and all(steps[f][p] for f in range(begin, end))]


def windows(steps: list[list[bool]], frames: int) -> list[tuple[int, int]]:
    """The partition of greatest gain; of equal ones the last window is the shortest."""
    gains, found = [0] * (frames + 1), [[] for _ in range(frames + 1)]
    for end in range(frames):
        gains[end + 1] = -1
        for begin in range(end, -1, -1):
            gain = gains[begin] + len(still_places(steps, begin, end)) * (end - begin)
            if gain > gains[end + 1]:
                gains[end + 1], found[end + 1] = gain, [*found[begin], (begin, end)]
    return found[frames]


def naive(video: Tensor, attention: Tensor, keep: int, threshold: float, centre: float = 0.6) -> dict[int, dict]:
    frames, places = video.shape[:2]
    x, a = video.tolist(), attention.tolist()
    alike = [[cos(before[p], after[p]) for p in range(places)] for before, after in pairwise(x)]
    cut = windows([[one > threshold for one in step] for step in alike], frames)
    still = {window: still_places([[one > threshold for one in s] for s in alike], *window) for window in cut}
    copies = {(w, p): list(range(w[0], w[1] + 1)) for w in cut for p in still[w]}
    gain = sum(len(one) - 1 for one in copies.values())
    # Where merging leaves less than is kept, those least like the one before stay.
    later = {f * places + p: -alike[f - 1][p] for (w, p), one in copies.items() for f in one[1:]}
    alone = best(later, later, keep - (frames * places - gain))
    groups = {i: {i: 1.0} for i in alone}
    for (_, p), one in copies.items():
        one[:] = [f for f in one if f * places + p not in alone]

    kinds: list[tuple[Any, list[int]]] = []
    for w in cut:
        for f in range(w[0], w[1] + 1):
            kinds += [(w, still[w] if f == w[0] else []), (f, [p for p in range(places) if p not in still[w]])]
    sizes = [len(one) for _, one in kinds]
    numbers = naive_shares([float(n) for n in sizes], keep - len(alone), sizes, 1)
    for (what, members), number in zip(kinds, numbers, strict=True):
        if isinstance(what, int):
            groups |= {what * places + p: {what * places + p: 1.0} for p in best(members, a[what], number)}
            continue
        of = clusters({p: mean([x[f][p] for f in copies[what, p]]) for p in members}, number)
        for p, target in of.items():
            others = sum(one == target for one in of.values()) - 1
            part = (centre if others else 1.0) if p == target else (1 - centre) / others
            group = groups.setdefault(what[0] * places + target, {})
            group.update({f * places + p: part / len(copies[what, p]) for f in copies[what, p]})
    return groups


def by_share(video: Tensor, attention: Tensor, keep: int, grid: Any) -> dict[int, dict]:
    return naive(video, attention, keep, 0.65 if keep < video.shape[0] * video.shape[1] / 8 else 0.8)


@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("share", [0.04, 0.3, 0.6, 0.97])
def test_against_a_naive_loop(share: float, cut: int | None) -> None:
    compare("holitom", by_share, share, cut, newline=cut is None, inner=False)


@pytest.mark.parametrize("options", [{"threshold": 0.999}, {"threshold": -1.0}, {"centre": 1.0}, {"centre": 0.2}])
def test_options(options: dict) -> None:
    video = moving(5, 4, 4, seed=1)
    selection = select("holitom", given([video], [17], [(4, 4)]), inner=False, **options)
    want = naive(video, attention_of(video), 17, options.get("threshold", 0.8), options.get("centre", 0.6))
    want = {to: {i: part for i, part in group.items() if part} for to, group in want.items()}
    got = {to: {i: part for i, part in group.items() if part} for to, group in shares_of(selection, 0, 80).items()}
    same(got, want)


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 16])
def test_counts(frames: int) -> None:
    check_counts("holitom", frames, inner=False)


def test_a_static_video_is_its_frame() -> None:
    """Every copy of a place goes into one token of the first frame, which weighs the place as one."""
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


def test_nothing_is_like_a_vector_of_zeros() -> None:
    video = moving(4, 3, 3, noise=0.0)
    video[:, 4] = 0
    groups = shares_of(select("holitom", given([video], [33], [(3, 3)]), inner=False, threshold=0.5), 0, 36)
    assert all(group == {i: 1.0} for i, group in groups.items() if i % 9 == 4)


def test_the_second_cut() -> None:
    """The best attended stay, every other joins the one that it is most like; images count as whole."""
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


def test_its_cuts_keep_what_is_asked_for_on_average() -> None:
    for layers, where in ((28, 18), (32, 21), (4, 3)):
        (first, early), (second, late) = tokenprune.method("holitom").stages(Budget(keep=0.2), layers)
        assert first == tokenprune.method("holitom", inner=False) and (second.layer, early.cuts) == (where, late.cuts)
        assert [relative for _, relative in early.cuts] == [1.0, 0.5]
    (_, _), (second, _) = tokenprune.method("holitom", layer=5, inner_keep=0.25).stages(Budget(keep=0.2), 28)
    assert second.layer == 5 and second.query_aware
    with pytest.raises(OptionError, match="layer=5 is of the second cut"):
        tokenprune.method("holitom", inner=False, layer=5)
    assert tokenprune.method("holitom").query_aware and tokenprune.method("holitom", inner=False).prefix_cache_safe


def test_it_keeps_the_rules() -> None:
    check_method("holitom")
    check_method(tokenprune.method("holitom", inner=False, threshold=0.1))
