# SPDX-License-Identifier: Apache-2.0
"""Blocks of frames and their attention, without any model: against loops written from the rule."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from dense_blocks import allowed_pairs, attend_by_mask, ids_from
from each import each
from tokenprune.kernels.block_attention import PADDING, SINK, TAIL, Parts, attend_in_blocks
from tokenprune.selection.frames import Visual


def video(first: int, frames: int, size: int = 4, gap: int = 0, modality: str = "video") -> Visual:
    """Frames of `size` tokens from `first` on, with `gap` tokens of text between them."""
    starts = [first + number * (size + gap) for number in range(frames)]
    return Visual(modality, tuple((start, start + size) for start in starts))


def ids_of(starts: list[int], end: int) -> list[int]:
    """The block of each position, counted out one by one."""
    ids = []
    for position in range(end):
        passed = sum(start <= position for start in starts)
        ids.append(TAIL if passed == len(starts) else passed)
    return ids


def naive_ids(visuals: list[Visual], end: int, sink: int, block: int) -> list[int]:
    """The rule, frame by frame: which block each frame is in, then each token of text by the frame that it precedes."""
    first = next(number for number, visual in enumerate(visuals) if visual.modality == "video")
    frames: list[tuple[int, int, int]] = []  # (start, end, block), after the sink
    number = 0
    for index, visual in enumerate(visuals[first:]):
        rest = list(visual.frames)
        if index == 0:
            frames += [(*frame, SINK) for frame in rest[:sink]]
            rest = rest[sink:]
        elif rest[0][0] - frames[-1][1] > 32:
            number += 1  # a long text between visuals is a block
            frames.append((rest[0][0], rest[0][0], number))
        sizes = [block] * (len(rest) // block)
        if left := len(rest) % block:
            if sizes and left < block / 2:
                sizes[-1] += left
            else:
                sizes.append(left)
        for size in sizes:
            number += 1
            frames += [(*frame, number) for frame in rest[:size]]
            del rest[:size]
    ids = []
    for position in range(end):
        ahead = [which for _, last, which in frames if position < last]
        ids.append(ahead[0] if ahead else TAIL)
    for position in range(frames[0][0]):
        ids[position] = SINK
    return ids


PROMPTS: dict[str, tuple[list[Visual], int]] = {
    "plain": ([video(5, 24)], 110),
    "time stamps": ([video(5, 24, gap=3)], 190),
    "frames do not divide": ([video(3, 23)], 100),
    "one block": ([video(3, 7)], 40),
    "two videos": ([video(5, 10), video(50, 9)], 100),
    "long text between": ([video(5, 10), video(90, 9)], 140),
    "text of 32 between": ([video(5, 10), video(77, 9)], 140),
    "images after": ([video(5, 10), video(48, 1, 9, modality="image"), video(60, 1, 9, modality="image")], 80),
    "image before": ([video(4, 1, 9, modality="image"), video(20, 11)], 90),
    "video within the sink": ([video(5, 2), video(20, 9)], 70),
}


@each("prompt", PROMPTS)
@each(("sink", "block"), [(4, 4), (2, 3), (4, 5), (1, 1), (3, 8), (6, 16)])
def test_block_starts_of_pevlm(prompt: str, sink: int, block: int) -> None:
    visuals, end = PROMPTS[prompt]
    method = tokenprune.method("pevlm", sink_frames=sink, block_frames=block, min_frames=1)
    starts = method.block_starts(visuals, end)
    assert starts == sorted(set(starts)) and starts[-1] == visuals[-1].frames[-1][1]
    ids = ids_of(starts, end)
    assert ids == naive_ids(visuals, end, sink, block)
    for visual in visuals:  # no block splits a frame, and none is left to the tail
        for first, last in visual.frames:
            assert len(set(ids[first:last])) == 1 and ids[first] != TAIL
    of_text = tokenprune.method("pevlm", sink_mode="text", block_frames=block, min_frames=1).block_starts(visuals, end)
    assert of_text[0] == next(visual for visual in visuals if visual.modality == "video").frames[0][0]


@pytest.mark.parametrize(("left", "blocks"), [(8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (11, [4, 4, 3]), (1, [1])])
def test_the_last_block_merges_below_half(left: int, blocks: list[int]) -> None:
    starts = tokenprune.method("pevlm", sink_frames=2, block_frames=4, min_frames=1).block_starts(
        [video(5, 2 + left)], 5 + 4 * (2 + left) + 3
    )
    assert [(b - a) / 4 for a, b in pairwise(starts)] == blocks


def test_prompts_that_keep_full_attention() -> None:
    def why(visuals: list[Visual], end: int, **options: Any) -> str:
        found = tokenprune.method("pevlm", **options).block_starts(visuals, end)
        assert isinstance(found, str)
        return found

    assert "no video" in why([video(2, 1, modality="image")], 20)
    assert "no video" in why([], 20)
    assert "35 frames are fewer than min_frames=36" in why([video(2, 35)], 500)
    assert not isinstance(tokenprune.method("pevlm").block_starts([video(2, 36)], 500), str)
    assert "24" in why([video(2, 23)], 500, sink_mode="text")
    assert "only_single_video" in why([video(2, 40), video(200, 40)], 500, only_single_video=True)
    assert "no token follows" in why([video(2, 40)], 162)
    assert "sink contains all" in why([video(2, 4)], 50, min_frames=1)


@pytest.mark.parametrize(("count", "frames"), [(20, 5), (21, 5), (48, 3), (4, 4)])
def test_frames_of_tokens(count: int, frames: int) -> None:
    places = [position for position in range(3, 300) if position % 7][:count]
    visual = Visual.from_positions("video", places, frames)
    size = count // frames
    assert len(visual.frames) == frames
    for number, (first, last) in enumerate(visual.frames):
        mine = places[number * size : (number + 1) * size] if number < frames - 1 else places[number * size :]
        assert (first, last) == (mine[0], mine[-1] + 1)


def test_positions_that_are_not_whole_frames() -> None:
    assert Visual.from_positions("video", range(10), 4) is None  # a rest as long as a frame
    assert Visual.from_positions("video", range(3), 4) is None
    assert Visual.from_positions("video", range(3), 0) is None


# -- attention ---------------------------------------------------------------------------------------------------------

PARTS = [
    Parts(0, 5, (4, 6, 3), 4, 0),
    Parts(3, 2, (5, 5), 1, 0),
    Parts(0, 3, (7,), 2, 4),
    Parts(2, 0, (3, 4), 6, 1),
    Parts(0, 9, (), 0, 0),
    Parts(0, 4, (2,), 0, 0),
]


def naive_attention(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, scale: float) -> Tensor:
    """[B, H, L, D]: each query alone, over the set of keys that it may see."""
    out = torch.zeros(*query.shape[:3], value.shape[-1])
    group = query.shape[1] // key.shape[1]
    for row, of_row in enumerate(ids.tolist()):
        for i, mine in enumerate(of_row):
            if mine == PADDING:
                continue
            seen = [j for j in range(i + 1) if of_row[j] != PADDING]
            if mine != TAIL:
                seen = [j for j in seen if of_row[j] in (SINK, mine)]
            for head in range(query.shape[1]):
                keys, values = key[row, head // group, seen], value[row, head // group, seen]
                out[row, head, i] = ((keys @ query[row, head, i]) * scale).softmax(0) @ values
    return out


def qkv(length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, heads, length, 8, generator=g).to(dtype) for heads in (4, 2, 2))


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_mask_and_blocks_equal_the_loop(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_from(parts)
    assert Parts.from_ids(ids) == parts
    query, key, value = qkv(len(ids), batch=2)
    want = naive_attention(query, key, value, ids.expand(2, -1), 0.4)
    torch.testing.assert_close(attend_by_mask(query, key, value, ids.expand(2, -1), 0.4), want, atol=1e-5, rtol=0)
    for queries in (1024, 3):  # a long part is computed in several calls
        monkeypatch.setattr("tokenprune.kernels.block_attention._QUERIES", queries)
        torch.testing.assert_close(attend_in_blocks(query, key, value, parts, 0.4), want, atol=1e-5, rtol=0)


@each("parts", PARTS)
def test_count_of_pairs(parts: Parts) -> None:
    ids = ids_from(parts)
    real = ids != PADDING
    assert parts.pairs == int(allowed_pairs(ids[None])[0][real].sum())
    whole = Parts(0, int(real.sum()), (), 0, 0)
    assert whole.pairs == math.comb(int(real.sum()) + 1, 2)


def test_half_precision() -> None:
    for parts in PARTS:
        query, key, value = qkv(len(ids_from(parts)), dtype=torch.bfloat16)
        got = attend_in_blocks(query, key, value, parts, 0.4)
        want = attend_by_mask(query, key, value, ids_from(parts)[None], 0.4)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, atol=2e-2, rtol=0)
