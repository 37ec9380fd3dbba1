# SPDX-License-Identifier: Apache-2.0
"""Methods that compare frames, on synthetic tokens: common properties, and each method against a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
import videos
from basics import VIDEO_METHODS
from each import each
from naive_video import NAIVE, Places, spread
from tokenprune import VisualTokens

FRAME_TOKENS, WIDTH = 6, 12
MERGING = [name for name in VIDEO_METHODS if tokenprune.method_info(name).merges]
DROPPING = [name for name in VIDEO_METHODS if name not in MERGING]


def draw_moving(frames: int, num_patches: int = FRAME_TOKENS, seed: int = 0, size: int = 1) -> Tensor:
    """Return a video (frames, patches, channels) with an object moving over a background of similar patches."""
    g = torch.Generator().manual_seed(seed)
    background = torch.randn(WIDTH, generator=g) + 0.5 * torch.randn(num_patches, WIDTH, generator=g)
    video = background.repeat(frames, 1, 1)
    object_patches = torch.randn(size, WIDTH, generator=g)
    for t in range(frames):
        video[t, [(2 * t + i) % num_patches for i in range(size)]] = object_patches + 0.1 * torch.randn(
            size, WIDTH, generator=g
        )
    return video


def make_tokens(batch: Sequence[Tensor], keep: Sequence[int], newline: bool = False, **options: Any) -> VisualTokens:
    """Return the tokens of videos (frames, tokens, channels), with attention that does not depend on the row."""
    attention = [videos.attention_of(video) for video in batch]
    grids = [(1, video.shape[1]) for video in batch]
    return videos.given(list(batch), list(keep), grids, newline, attention=attention, **options)


def list_kept(name: str, tokens: VisualTokens, **options: Any) -> list[list[int]]:
    selection = tokenprune.method(name, **options).select(tokens)
    assert not (selection.keep & ~tokens.mask).any()
    assert selection.counts is None or selection.counts == selection.keep.sum(1).tolist()
    return [row.nonzero().flatten().tolist() for row in selection.keep]


def check_count(name: str, kept: list[int], keep: int) -> None:
    """Check that the count is exact, or an upper bound if the content decides."""
    by_content = tokenprune.method(name).chooses_count
    assert 0 < len(kept) <= keep if by_content else len(kept) == keep


def to_frames(kept: list[int], per_frame: int = FRAME_TOKENS) -> Places:
    return [divmod(i, per_frame) for i in kept]


# -- all methods -------------------------------------------------------------------------------------------------------


@each("name", VIDEO_METHODS)
@each("frames", [1, 2, 3, 5, 16])
def test_counts_are_exact(name: str, frames: int) -> None:
    count = frames * FRAME_TOKENS
    for keep in sorted({1, max(1, frames - 1), frames, count // 3, count - 1, count}):
        for video in (
            draw_moving(frames),
            draw_moving(1).repeat(frames, 1, 1),
            torch.zeros(frames, FRAME_TOKENS, WIDTH),
        ):
            (kept,) = list_kept(name, make_tokens([video], [keep]))
            check_count(name, kept, keep)


@each("name", VIDEO_METHODS)
def test_batch_matches_single_videos(name: str) -> None:
    batch = [draw_moving(5), draw_moving(3, 9, seed=1), draw_moving(1, 4, seed=2), draw_moving(16, 2, seed=3)]
    for keep in ([9, 20, 3, 7], [30, 5, 2, 32], [4, 26, 4, 15]):
        single = [list_kept(name, make_tokens([video], [k]))[0] for video, k in zip(batch, keep, strict=True)]
        is_random = "seed" in tokenprune.method_info(name).options  # depends on the prompt position
        for rows in ([0, 1, 2, 3], [0, 0, 1, 1])[: 1 if is_random else 2]:
            assert list_kept(name, make_tokens(batch, keep, rows=rows)) == single


@each("name", VIDEO_METHODS)
@each("frames", [1, 5])
def test_newline_after_video_is_kept(name: str, frames: int) -> None:
    """The newline counts towards the budget. The frames keep the same tokens as without a newline, at least one."""
    video = draw_moving(frames)
    for keep in (1, 4, frames * FRAME_TOKENS - 1):
        expected = list_kept(name, make_tokens([video], [keep]))[0]
        assert list_kept(name, make_tokens([video], [keep + 1], newline=True))[0] == [*expected, frames * FRAME_TOKENS]
    assert list_kept(name, make_tokens([video], [1], newline=True)) == list_kept(name, make_tokens([video], [1]))


@each("name", VIDEO_METHODS)
def test_unpruned_segments_are_skipped(name: str) -> None:
    """An image beside a video is one frame of many tokens. Its NaN values do not affect the video."""
    video, image = draw_moving(5), torch.full((1, 40, WIDTH), torch.nan)
    expected = list_kept(name, make_tokens([video], [9]))[0]
    assert list_kept(name, make_tokens([video, image], [9, 40])) == [expected, list(range(40))]
    assert list_kept(name, make_tokens([image], [40])) == [list(range(40))]


@each("name", VIDEO_METHODS)
def test_nan_tokens_do_not_fail(name: str) -> None:
    video = draw_moving(5)
    video[2, 3, 1], video[4, 0] = torch.nan, torch.inf
    for keep in (1, 7, 29):
        check_count(name, list_kept(name, make_tokens([video], [keep]))[0], keep)


@each("name", VIDEO_METHODS)
@each("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_selects_equally(name: str, dtype: torch.dtype) -> None:
    video = draw_moving(5)
    tokens, half = make_tokens([video.to(dtype).float()], [9]), make_tokens([video], [9])
    half._source.visual["hidden"] = half.hidden.to(dtype)
    assert list_kept(name, half) == list_kept(name, tokens)


@each("name", DROPPING)
def test_identical_frames_keep_one_frame(name: str) -> None:
    """A static video keeps only its first frame, or the same patches of each frame."""
    video = draw_moving(1).repeat(4, 1, 1)
    (kept,) = list_kept(name, make_tokens([video], [FRAME_TOKENS]))
    frames: dict[int, list[int]] = {}
    for t, p in to_frames(kept):
        frames.setdefault(t, []).append(p)
    if len(frames) == 1:
        assert frames == {next(iter(frames)): list(range(FRAME_TOKENS))}
        return
    assert sorted(frames) == [0, 1, 2, 3]
    longest = max(frames.values(), key=len)
    assert all(len(of_frame) >= len(longest) - 2 and set(of_frame) <= set(longest) for of_frame in frames.values())


# -- each method against a naive loop ----------------------------------------------------------------------------------


@each("name", NAIVE)
@each("frames", [1, 2, 3, 5, 8])
def test_matches_loop(name: str, frames: int) -> None:
    for kind in ("moving", "changing", "long"):
        video = draw_moving(frames)
        if kind == "changing":
            video = torch.randn(frames, FRAME_TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
        elif kind == "long":
            video = draw_moving(frames, 11, size=4) * (1 + torch.arange(frames * 11).view(frames, 11, 1) % 3)
        count = video.shape[0] * video.shape[1]
        for keep in sorted({1, frames, count // 3 + 1, count // 2, count - 2} & set(range(1, count))):
            (got,) = list_kept(name, make_tokens([video], [keep]))
            assert to_frames(got, video.shape[1]) == NAIVE[name](video.double(), keep), (keep, kind)


def test_every_dropping_method_has_reference() -> None:
    assert set(DROPPING) <= NAIVE.keys()


def test_evs_static_video_keeps_index_order() -> None:
    """Also if rounding makes cosines of equal vectors differ. A changed token ranks before all static tokens."""
    video = torch.randn(1, 40, WIDTH).repeat(4, 1, 1)
    (kept,) = list_kept("evs", make_tokens([video], [57]))
    assert kept == list(range(57))
    video[3:, 7] += 1
    (kept,) = list_kept("evs", make_tokens([video], [41]))
    assert kept == [*range(40), 3 * 40 + 7]


def test_dycoke_counts_match_paper() -> None:
    """P + 3 (1 - k) P tokens per complete window, and the lowest indices in a static video."""
    video = torch.randn(1, 10, WIDTH).repeat(8, 1, 1)
    (kept,) = list_kept("dycoke", make_tokens([video], [2 * (10 + 3 * 3)]))  # k = 0.7
    assert to_frames(kept, 10) == [(t, p) for t in range(8) for p in range(10 if t % 4 == 0 else 3)]


@pytest.mark.parametrize(("name", "keep"), [("evs", 5), ("dycoke", 11)])
def test_uniform_fallback_is_noted(name: str, keep: int) -> None:
    single, long = draw_moving(1), draw_moving(8)
    for video, num_kept, is_noted in ((single, 4, True), (long, keep, True), (long, 2 * FRAME_TOKENS, False)):
        tokens = make_tokens([video], [num_kept])
        (kept,) = list_kept(name, tokens)
        notes = tokens._source.notes
        assert bool(notes) is is_noted and all(f"{name}: " in note and "uniform" in note for note in notes)
        if len(video) == 1:
            assert kept == spread(FRAME_TOKENS, 4)


def test_single_frame_is_spread_in_two_dimensions() -> None:
    video = torch.randn(3, 16, WIDTH)
    for name in ("evs", "frames"):
        (kept,) = list_kept(name, videos.given([video], [4], [(4, 4)]))
        assert [p for _, p in to_frames(kept, 16)] == [5, 7, 13, 15]


ALL = dict.fromkeys(range(5), 4)


@pytest.mark.parametrize(
    ("keep", "want"), [(3, {2: 3}), (4, {2: 4}), (8, {1: 4, 3: 4}), (9, {0: 4, 2: 4, 4: 1}), (18, {**ALL, 4: 2})]
)
def test_frames_are_evenly_spaced(keep: int, want: dict[int, int]) -> None:
    video = torch.randn(5, 4, WIDTH)
    (kept,) = list_kept("frames", make_tokens([video], [keep]))
    counts: dict[int, int] = {}
    for t, _ in to_frames(kept, 4):
        counts[t] = counts.get(t, 0) + 1
    assert counts == want
