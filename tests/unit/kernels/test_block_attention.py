# SPDX-License-Identifier: Apache-2.0
"""Frame blocks and their attention equal loops written from the rule."""

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


def make_video(first: int, frames: int, size: int = 4, gap: int = 0, modality: str = "video") -> Visual:
    """Return a video with `size` tokens per frame and `gap` text tokens between frames."""
    starts = [first + index * (size + gap) for index in range(frames)]
    return Visual(modality, tuple((start, start + size) for start in starts))


def list_ids(starts: list[int], end: int) -> list[int]:
    """Return the block id of each position, counted one by one."""
    ids = []
    for position in range(end):
        passed = sum(start <= position for start in starts)
        ids.append(TAIL if passed == len(starts) else passed)
    return ids


def naive_ids(visuals: list[Visual], end: int, sink: int, block: int) -> list[int]:
    """Assign each frame to a block, then each text token to the block of the next frame."""
    first = next(block_id for block_id, visual in enumerate(visuals) if visual.modality == "video")
    frames: list[tuple[int, int, int]] = []  # (start, end, block), after the sink
    block_id = 0
    for index, visual in enumerate(visuals[first:]):
        rest = list(visual.frames)
        if index == 0:
            frames += [(*frame, SINK) for frame in rest[:sink]]
            rest = rest[sink:]
        elif rest[0][0] - frames[-1][1] > 32:
            block_id += 1  # a long text between visuals is a block
            frames.append((rest[0][0], rest[0][0], block_id))
        sizes = [block] * (len(rest) // block)
        if remainder := len(rest) % block:
            if sizes and remainder < block / 2:
                sizes[-1] += remainder
            else:
                sizes.append(remainder)
        for size in sizes:
            block_id += 1
            frames += [(*frame, block_id) for frame in rest[:size]]
            del rest[:size]
    ids = []
    for position in range(end):
        next_blocks = [frame_block for _, last, frame_block in frames if position < last]
        ids.append(next_blocks[0] if next_blocks else TAIL)
    for position in range(frames[0][0]):
        ids[position] = SINK
    return ids


PROMPTS: dict[str, tuple[list[Visual], int]] = {
    "plain": ([make_video(5, 24)], 110),
    "time stamps": ([make_video(5, 24, gap=3)], 190),
    "frames do not divide": ([make_video(3, 23)], 100),
    "one block": ([make_video(3, 7)], 40),
    "two videos": ([make_video(5, 10), make_video(50, 9)], 100),
    "long text between": ([make_video(5, 10), make_video(90, 9)], 140),
    "text of 32 between": ([make_video(5, 10), make_video(77, 9)], 140),
    "images after": (
        [make_video(5, 10), make_video(48, 1, 9, modality="image"), make_video(60, 1, 9, modality="image")],
        80,
    ),
    "image before": ([make_video(4, 1, 9, modality="image"), make_video(20, 11)], 90),
    "video within the sink": ([make_video(5, 2), make_video(20, 9)], 70),
}


@each("prompt", PROMPTS)
@each(("sink", "block"), [(4, 4), (2, 3), (4, 5), (1, 1), (3, 8), (6, 16)])
def test_block_starts_of_pevlm(prompt: str, sink: int, block: int) -> None:
    visuals, end = PROMPTS[prompt]
    method = tokenprune.method("pevlm", sink_frames=sink, block_frames=block, min_frames=1)
    starts = method.block_starts(visuals, end)
    assert starts == sorted(set(starts)) and starts[-1] == visuals[-1].frames[-1][1]
    ids = list_ids(starts, end)
    assert ids == naive_ids(visuals, end, sink, block)
    for visual in visuals:  # no block splits a frame, and each frame precedes the tail
        for first, last in visual.frames:
            assert len(set(ids[first:last])) == 1 and ids[first] != TAIL
    text_starts = tokenprune.method("pevlm", sink_mode="text", block_frames=block, min_frames=1).block_starts(
        visuals, end
    )
    assert text_starts[0] == next(visual for visual in visuals if visual.modality == "video").frames[0][0]


@pytest.mark.parametrize(
    ("num_frames", "blocks"), [(8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (11, [4, 4, 3]), (1, [1])]
)
def test_the_last_block_merges_below_half(num_frames: int, blocks: list[int]) -> None:
    starts = tokenprune.method("pevlm", sink_frames=2, block_frames=4, min_frames=1).block_starts(
        [make_video(5, 2 + num_frames)], 5 + 4 * (2 + num_frames) + 3
    )
    assert [(b - a) / 4 for a, b in pairwise(starts)] == blocks


def test_prompts_that_keep_full_attention() -> None:
    def get_reason(visuals: list[Visual], end: int, **options: Any) -> str:
        result = tokenprune.method("pevlm", **options).block_starts(visuals, end)
        assert isinstance(result, str)
        return result

    assert "no video" in get_reason([make_video(2, 1, modality="image")], 20)
    assert "no video" in get_reason([], 20)
    assert "35 frames are fewer than min_frames=36" in get_reason([make_video(2, 35)], 500)
    assert not isinstance(tokenprune.method("pevlm").block_starts([make_video(2, 36)], 500), str)
    assert "24" in get_reason([make_video(2, 23)], 500, sink_mode="text")
    assert "only_single_video" in get_reason([make_video(2, 40), make_video(200, 40)], 500, only_single_video=True)
    assert "no token follows" in get_reason([make_video(2, 40)], 162)
    assert "sink contains all" in get_reason([make_video(2, 4)], 50, min_frames=1)


@pytest.mark.parametrize(("count", "frames"), [(20, 5), (21, 5), (48, 3), (4, 4)])
def test_frames_of_tokens(count: int, frames: int) -> None:
    positions = [position for position in range(3, 300) if position % 7][:count]
    visual = Visual.from_positions("video", positions, frames)
    size = count // frames
    assert len(visual.frames) == frames
    for index, (first, last) in enumerate(visual.frames):
        frame_positions = (
            positions[index * size : (index + 1) * size] if index < frames - 1 else positions[index * size :]
        )
        assert (first, last) == (frame_positions[0], frame_positions[-1] + 1)


def test_positions_that_are_not_whole_frames() -> None:
    assert Visual.from_positions("video", range(10), 4) is None  # the remainder is as long as a frame
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
    """Return the attention of each query over its visible keys, `[B, H, L, D]`, one query at a time."""
    out = torch.zeros(*query.shape[:3], value.shape[-1])
    group = query.shape[1] // key.shape[1]
    for row, row_ids in enumerate(ids.tolist()):
        for i, own_id in enumerate(row_ids):
            if own_id == PADDING:
                continue
            visible = [j for j in range(i + 1) if row_ids[j] != PADDING]
            if own_id != TAIL:
                visible = [j for j in visible if row_ids[j] in (SINK, own_id)]
            for head in range(query.shape[1]):
                keys, values = key[row, head // group, visible], value[row, head // group, visible]
                out[row, head, i] = ((keys @ query[row, head, i]) * scale).softmax(0) @ values
    return out


def draw_qkv(length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, heads, length, 8, generator=g).to(dtype) for heads in (4, 2, 2))


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_mask_and_blocks_equal_the_loop(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_from(parts)
    assert Parts.from_ids(ids) == parts
    query, key, value = draw_qkv(len(ids), batch=2)
    want = naive_attention(query, key, value, ids.expand(2, -1), 0.4)
    torch.testing.assert_close(attend_by_mask(query, key, value, ids.expand(2, -1), 0.4), want, atol=1e-5, rtol=0)
    for queries in (1024, 3):  # 3 splits long parts into several calls
        monkeypatch.setattr("tokenprune.kernels.block_attention._QUERIES", queries)
        torch.testing.assert_close(attend_in_blocks(query, key, value, parts, 0.4), want, atol=1e-5, rtol=0)


@each("parts", PARTS)
def test_count_of_pairs(parts: Parts) -> None:
    ids = ids_from(parts)
    is_valid = ids != PADDING
    assert parts.pairs == int(allowed_pairs(ids[None])[0][is_valid].sum())
    one_part = Parts(0, int(is_valid.sum()), (), 0, 0)
    assert one_part.pairs == math.comb(int(is_valid.sum()) + 1, 2)


def test_half_precision() -> None:
    for parts in PARTS:
        query, key, value = draw_qkv(len(ids_from(parts)), dtype=torch.bfloat16)
        got = attend_in_blocks(query, key, value, parts, 0.4)
        want = attend_by_mask(query, key, value, ids_from(parts)[None], 0.4)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, atol=2e-2, rtol=0)
