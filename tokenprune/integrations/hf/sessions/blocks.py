# SPDX-License-Identifier: Apache-2.0
"""The blocks in which a session shows frames to its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenprune.integrations.hf.sessions.prompts import Words
from tokenprune.integrations.hf.sessions.stream import Stream

if TYPE_CHECKING:
    from PIL import Image


def blocks_of(
    frames: list[Image.Image], words: Words, stream: Stream, block: int | None, fps: float | None, video: bool
) -> Iterator[dict[str, Any]]:
    """Yield the model's arguments for blocks of frames, as alike in size as can be.

    block: frames of one; None: as many as fill what a compression frees. fps: of a video, see `Words.clip`. video: the
    frames are one, for a model that takes videos.
    """
    video = video and "video" in stream.adapter.placeholders and bool(words.template.video)
    step = 2 if video else 1  # frames that a tower may join to one
    room, shown = stream.room, stream.progress.shown

    def made(start: int, end: int) -> dict[str, Any]:
        some = frames[start:end]
        return words.clip(some, shown + start, fps) if video else words.frames(some)

    if block is None:
        few = min(2, len(frames))
        probe = made(0, few)
        tokens = probe["input_ids"].shape[1]
        if few == len(frames) and tokens <= room:
            yield probe
            return
        block = max(1, stream.limits.freed(stream.text) * few // tokens)
    units = -(-len(frames) // step)
    count = -(-units // max(1, block // step))
    starts = [number * units // count * step for number in range(count)]
    for start, end in zip(starts, [*starts[1:], len(frames)], strict=True):
        yield made(start, end)
