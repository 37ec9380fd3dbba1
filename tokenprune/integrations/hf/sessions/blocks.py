# SPDX-License-Identifier: Apache-2.0
"""Split the frames of a session into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenprune.integrations.hf.sessions.prompts import PromptWriter
from tokenprune.integrations.hf.sessions.stream import Stream

if TYPE_CHECKING:
    from PIL import Image


def iter_blocks(
    frames: list[Image.Image], writer: PromptWriter, stream: Stream, block: int | None, fps: float | None, video: bool
) -> Iterator[dict[str, Any]]:
    """Yield the model inputs of each block of frames. Blocks have almost equal sizes.

    Args:
        frames: The frames.
        writer: Prepares the model inputs.
        stream: Stream of the session.
        block: Number of frames of a block. None: as many as a compression makes room for.
        fps: Frames per second of a video.
        video: Whether the frames are a video. Models without video support get images.
    """
    video = video and "video" in stream.adapter.placeholders and bool(writer.template.video)
    step = 2 if video else 1  # a tower may merge two frames
    room, shown = stream.room, stream.progress.shown

    def prepare(start: int, end: int) -> dict[str, Any]:
        part = frames[start:end]
        return writer.prepare_clip(part, shown + start, fps) if video else writer.prepare_images(part)

    if block is None:
        num_probed = min(2, len(frames))
        probe = prepare(0, num_probed)
        num_tokens = probe["input_ids"].shape[1]
        if num_probed == len(frames) and num_tokens <= room:
            yield probe
            return
        block = max(1, stream.limits.count_freed(stream.text) * num_probed // num_tokens)
    units = -(-len(frames) // step)
    num_blocks = -(-units // max(1, block // step))
    starts = [index * units // num_blocks * step for index in range(num_blocks)]
    for start, end in zip(starts, [*starts[1:], len(frames)], strict=True):
        yield prepare(start, end)
