# SPDX-License-Identifier: Apache-2.0
"""Methods that compare the frames of videos, on made-up tokens: what goes for all of them, and each against a loop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import VIDEO_METHODS
from each import each
from naive_video import NAIVE, Places, spread
from tokenprune import VisualTokens
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import available_observables, find_observable
from tokenprune.selection.segments import Patches, Sizes
from tokenprune.testing import visual_tokens

PLACES, WIDTH = 6, 12
MERGING = [name for name in VIDEO_METHODS if tokenprune.method_info(name).merges]
DROPPING = [name for name in VIDEO_METHODS if name not in MERGING]


def moving(frames: int, places: int = PLACES, seed: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """A video `[F, P, D]` of a still ground before which something moves on, and where it is, bool `[F, P]`. Places of
    the ground are alike, as sky or grass is."""
    g = torch.Generator().manual_seed(seed)
    ground = torch.randn(WIDTH, generator=g) + 0.5 * torch.randn(places, WIDTH, generator=g)
    video = ground.repeat(frames, 1, 1)
    thing = torch.randn(size, WIDTH, generator=g)
    shown = torch.zeros(frames, places, dtype=torch.bool)
    for t in range(frames):
        where = [(2 * t + i) % places for i in range(size)]
        video[t, where] = thing + 0.1 * torch.randn(size, WIDTH, generator=g)
        shown[t, where] = True
    return video, shown


def tokens_of(
    name: str, videos: Sequence[Tensor], keep: Sequence[int], behind: int = 0, seed: int = 0, **given: Any
) -> VisualTokens:
    """The view that a method gets of videos `[F, P, D]`. behind: tokens that follow the last frame of each."""
    counts = [video.shape[0] * video.shape[1] + behind for video in videos]
    hidden = torch.full((len(videos), max(counts), WIDTH), 9.0)
    for row, video in enumerate(videos):
        hidden[row, : counts[row] - behind] = video.flatten(0, 1)
    needs = tokenprune.method(name).needs
    for need in available_observables():
        seen = find_observable(need)
        if not seen.is_declared(needs) or seen.where in (ObservedAt.CUT, ObservedAt.FRAMES) or need in given:
            continue
        if need == "patches":
            given[need] = patches_of(videos, counts)
            continue
        # Of a token the same, whatever stands behind it or beside its video.
        made = seen.example(Sizes((512,), width=WIDTH), torch.Generator().manual_seed(seed))
        made = made.narrow(seen.axes.index("N"), 0, max(counts))
        given[need] = made.expand(len(videos), *made.shape[1:])
    frames = [[video.shape[1]] * video.shape[0] for video in videos]
    return visual_tokens(hidden, counts, keep=list(keep), frames=frames, modality="video", **given)


def patches_of(videos: Sequence[Tensor], counts: Sequence[int]) -> Patches:
    """Each frame is a tile of one row."""
    cells = torch.zeros(6, len(videos), max(counts), dtype=torch.long)
    cells[0] = -1
    for row, video in enumerate(videos):
        frames, places, _ = video.shape
        for i in range(frames * places):
            cells[:, row, i] = torch.tensor([i // places, 0, i % places, 1, places, 1])
    return Patches(*cells, tiles=int(cells[0].max()) + 1)


def kept_of(name: str, tokens: VisualTokens, **options: Any) -> list[list[int]]:
    selection = tokenprune.method(name, **options).select(tokens)
    assert not (selection.keep & ~tokens.mask).any()
    assert selection.counts is None or selection.counts == selection.keep.sum(1).tolist()
    return [row.nonzero().flatten().tolist() for row in selection.keep]


def check_count(name: str, kept: list[int], keep: int) -> None:
    """As many as asked for stay, or at most as many where the video decides."""
    by_content = tokenprune.method(name).chooses_count
    assert 0 < len(kept) <= keep if by_content else len(kept) == keep


def places(kept: list[int], per_frame: int = PLACES) -> Places:
    return [divmod(i, per_frame) for i in kept]


# -- all of them -------------------------------------------------------------------------------------------------------


@each("name", VIDEO_METHODS)
@each("frames", [1, 2, 3, 5, 16])
def test_counts_are_exact(name: str, frames: int) -> None:
    count = frames * PLACES
    for keep in sorted({1, max(1, frames - 1), frames, count // 3, count - 1, count}):
        for video in (moving(frames)[0], moving(1)[0].repeat(frames, 1, 1), torch.zeros(frames, PLACES, WIDTH)):
            (kept,) = kept_of(name, tokens_of(name, [video], [keep]))
            check_count(name, kept, keep)


@each("name", VIDEO_METHODS)
def test_a_batch_gives_what_its_videos_give_alone(name: str) -> None:
    """Of other lengths, with frames of other sizes, and several in one prompt."""
    videos = [moving(5)[0], moving(3, 9, seed=1)[0], moving(1, 4, seed=2)[0], moving(16, 2, seed=3)[0]]
    for keep in ([9, 20, 3, 7], [30, 5, 2, 32], [4, 26, 4, 15]):
        alone = [kept_of(name, tokens_of(name, [video], [k]))[0] for video, k in zip(videos, keep, strict=True)]
        drawn = "seed" in tokenprune.method_info(name).options  # by the place in the prompt, as `random` does
        for rows in ([0, 1, 2, 3], [0, 0, 1, 1])[: 1 if drawn else 2]:
            assert kept_of(name, tokens_of(name, videos, keep, rows=rows)) == alone


@each("name", VIDEO_METHODS)
@each("frames", [1, 5])
def test_a_newline_behind_a_video_stays(name: str, frames: int) -> None:
    """And counts; what stays of the frames is what stays without it. One token at least is of a frame."""
    video = moving(frames)[0]
    for keep in (1, 4, frames * PLACES - 1):
        without = kept_of(name, tokens_of(name, [video], [keep]))[0]
        assert kept_of(name, tokens_of(name, [video], [keep + 1], behind=1))[0] == [*without, frames * PLACES]
    assert kept_of(name, tokens_of(name, [video], [1], behind=1)) == kept_of(name, tokens_of(name, [video], [1]))


@each("name", VIDEO_METHODS)
def test_what_has_to_keep_all_is_left_out(name: str) -> None:
    """As an image beside a video is, which a method sees as one frame of many tokens: its NaN are its own."""
    video, image = moving(5)[0], torch.full((1, 40, WIDTH), torch.nan)
    alone = kept_of(name, tokens_of(name, [video], [9]))[0]
    assert kept_of(name, tokens_of(name, [video, image], [9, 40])) == [alone, list(range(40))]
    assert kept_of(name, tokens_of(name, [image], [40])) == [list(range(40))]


@each("name", VIDEO_METHODS)
def test_tokens_without_a_number_break_nothing(name: str) -> None:
    video = moving(5)[0]
    video[2, 3, 1], video[4, 0] = torch.nan, torch.inf
    for keep in (1, 7, 29):
        check_count(name, kept_of(name, tokens_of(name, [video], [keep]))[0], keep)


@each("name", VIDEO_METHODS)
@each("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision(name: str, dtype: torch.dtype) -> None:
    tokens = tokens_of(name, [moving(5)[0].to(dtype).float()], [9])
    half = tokens_of(name, [moving(5)[0]], [9])
    half._source.visual["hidden"] = half.hidden.to(dtype)
    assert kept_of(name, half) == kept_of(name, tokens)


@each("name", DROPPING)
def test_identical_frames_give_one_frames_worth(name: str) -> None:
    """Of a still video nothing but its first frame stays, or the same places of each frame."""
    video = moving(1)[0].repeat(4, 1, 1)
    (kept,) = kept_of(name, tokens_of(name, [video], [PLACES]))
    frames: dict[int, list[int]] = {}
    for t, p in places(kept):
        frames.setdefault(t, []).append(p)
    if len(frames) == 1:
        assert frames == {next(iter(frames)): list(range(PLACES))}
        return
    assert sorted(frames) == [0, 1, 2, 3]
    longest = max(frames.values(), key=len)
    assert all(len(of_frame) >= len(longest) - 2 and set(of_frame) <= set(longest) for of_frame in frames.values())


@pytest.mark.parametrize("name", ["evs", "dycoke", "vidcom2", "vcast"])
def test_what_moves_stays_at_least_as_often_as_by_chance(name: str) -> None:
    """The share of what is kept that shows it, against `uniform`."""
    seen = {name: 0, "uniform": 0}
    for seed, keep in product(range(5), (16, 24, 40)):
        video, shown = moving(8, 12, seed=seed, size=2)
        for one in seen:
            (kept,) = kept_of(one, tokens_of(one, [video], [keep]))
            seen[one] += int(shown.flatten()[kept].sum())
    assert seen[name] >= seen["uniform"] > 0


# -- each against a loop -----------------------------------------------------------------------------------------------


@each("name", NAIVE)
@each("frames", [1, 2, 3, 5, 8])
def test_against_a_loop(name: str, frames: int) -> None:
    for kind in ("moving", "changing", "long"):
        video = moving(frames)[0]
        if kind == "changing":
            video = torch.randn(frames, PLACES, WIDTH, generator=torch.Generator().manual_seed(0))
        elif kind == "long":
            video = moving(frames, 11, size=4)[0] * (1 + torch.arange(frames * 11).view(frames, 11, 1) % 3)
        count = video.shape[0] * video.shape[1]
        for keep in sorted({1, frames, count // 3 + 1, count // 2, count - 2} & set(range(1, count))):
            (got,) = kept_of(name, tokens_of(name, [video], [keep]))
            assert places(got, video.shape[1]) == NAIVE[name](video.double(), keep), (keep, kind)


def test_every_dropping_method_has_a_loop() -> None:
    assert set(DROPPING) <= NAIVE.keys()


def test_evs_grows_and_knows_no_length() -> None:
    video = moving(6)[0]
    scale = 2.0 ** torch.randint(-3, 4, (6, PLACES, 1))
    before: set[int] = set()
    for keep in range(PLACES, 6 * PLACES):
        (kept,) = kept_of("evs", tokens_of("evs", [video], [keep]))
        assert kept_of("evs", tokens_of("evs", [video * scale], [keep])) == [kept]
        assert before < set(kept) and set(range(PLACES)) <= set(kept)
        before = set(kept)


def test_evs_of_a_still_video_goes_on_in_order() -> None:
    """Though rounding makes cosines of equal vectors differ. A token that changed comes before all that did not."""
    video = torch.randn(1, 40, WIDTH).repeat(4, 1, 1)
    (kept,) = kept_of("evs", tokens_of("evs", [video], [57]))
    assert kept == list(range(57))
    video[3:, 7] += 1
    (kept,) = kept_of("evs", tokens_of("evs", [video], [41]))
    assert kept == [*range(40), 3 * 40 + 7]


def test_dycoke_keeps_the_counts_of_its_paper() -> None:
    """P + 3 (1 - k) P of each whole window; and the lowest places where nothing moves."""
    still = torch.randn(1, 10, WIDTH).repeat(8, 1, 1)
    (kept,) = kept_of("dycoke", tokens_of("dycoke", [still], [2 * (10 + 3 * 3)]))  # k = 0.7
    assert places(kept, 10) == [(t, p) for t in range(8) for p in range(10 if t % 4 == 0 else 3)]


@pytest.mark.parametrize(("name", "keep"), [("evs", 5), ("dycoke", 11)])
def test_what_falls_back_to_uniform_says_so(name: str, keep: int) -> None:
    """Of one frame there is nothing to compare; nor where less than the frames that come first is to be kept."""
    one, more = moving(1)[0], moving(8)[0]
    for video, number, noted in ((one, 4, True), (more, keep, True), (more, 2 * PLACES, False)):
        tokens = tokens_of(name, [video], [number])
        (kept,) = kept_of(name, tokens)
        notes = tokens._source.notes
        assert bool(notes) is noted and all(f"{name}: " in one and "uniform" in one for one in notes)
        if len(video) == 1:
            assert kept == spread(PLACES, 4)


def test_one_frame_of_a_known_shape_is_spread_over_both_directions() -> None:
    video = torch.randn(3, 16, WIDTH)
    for name in ("evs", "frames"):
        (kept,) = kept_of(name, tokens_of(name, [video], [4], grids=[(3, 4, 4)]))
        assert [p for _, p in places(kept, 16)] == [5, 7, 13, 15]


ALL = dict.fromkeys(range(5), 4)


@pytest.mark.parametrize(
    ("keep", "want"), [(3, {2: 3}), (4, {2: 4}), (8, {1: 4, 3: 4}), (9, {0: 4, 2: 4, 4: 1}), (18, {**ALL, 4: 2})]
)
def test_frames_at_even_distances(keep: int, want: dict[int, int]) -> None:
    video = torch.randn(5, 4, WIDTH)
    (kept,) = kept_of("frames", tokens_of("frames", [video], [keep]))
    found: dict[int, int] = {}
    for t, _ in places(kept, 4):
        found[t] = found.get(t, 0) + 1
    assert found == want


def test_vcast_gives_more_to_both_sides_of_a_cut() -> None:
    first, second = torch.randn(2, 1, 20, WIDTH, generator=torch.Generator().manual_seed(0))
    video = torch.cat([first + 0.02 * t for t in range(4)] + [second + 0.02 * t for t in range(4)])
    (kept,) = kept_of("vcast", tokens_of("vcast", [video], [60]))
    numbers = [sum(t == one for t, _ in places(kept, 20)) for one in range(8)]
    assert min(numbers[3], numbers[4]) > max(numbers[1], numbers[2], numbers[5], numbers[6])
    (kept,) = kept_of("vcast", tokens_of("vcast", [video[:2]], [20]))
    assert sum(t == 0 for t, _ in places(kept, 20)) == 10
