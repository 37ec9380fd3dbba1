# SPDX-License-Identifier: Apache-2.0
"""load_video: decode only the frames and the pixels of a video file that a budget of visual tokens needs."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tokenprune.errors import (
    BudgetError,
    MissingPackageError,
    OptionError,
    TokenPruneError,
    UnsupportedSetupError,
    shorten,
)
from tokenprune.integrations.hf.pixels.loading import DAMAGED
from tokenprune.integrations.shared.resizing import find_size
from tokenprune.selection.images import InputImage
from tokenprune.settings.max_visual_tokens import check_limit

Size = tuple[int, int]  # (height, width)
Count = Callable[[int, int, int], int]  # (frames, height, width) -> visual tokens
Open = Callable[[], Any]


def load_video(
    source: str | Path | bytes, *, num_frames: int = 8, processor: Any = None, max_visual_tokens: int | None = None
) -> list[Image.Image]:
    """Load evenly spaced frames of a video file, scaled by the decoder to a budget. Needs PyAV (`pip install av`).

    Number and size of the frames are chosen before decoding. If `num_frames` of the processor's smallest frames exceed
    the budget, fewer frames are used. The decoder starts at the last keyframe before a frame and skips the rest. Pass
    the frames with `videos=[frames], do_sample_frames=False` to the processor.

    Args:
        source: Path or content of a video file.
        num_frames: Maximum number of frames.
        processor: Processor or video processor that takes the frames. Its class must count tokens by
            `get_num_of_video_patches`, as in Qwen-VL and GLM-V.
        max_visual_tokens: Maximum number of tokens of the video. None: frames of the original size.

    Returns:
        The frames, upright, in mode RGB.

    Raises:
        OptionError: If the file is not a valid video or the arguments are invalid.
        BudgetError: If `max_visual_tokens` is too small for a frame.
        UnsupportedSetupError: If the tokens of the processor's videos cannot be counted.
        MissingPackageError: If PyAV is not installed.

    Examples:
        >>> import io, transformers
        >>> file = io.BytesIO()
        >>> image.save(file, "GIF", save_all=True, append_images=[image.rotate(90)], duration=100)
        >>> qwen = transformers.Qwen2VLVideoProcessor()
        >>> frames = tokenprune.load_video(file.getvalue(), processor=qwen, max_visual_tokens=256)
        >>> [frame.size for frame in frames]
        [(462, 462), (462, 462)]
    """
    if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
        raise OptionError(f"num_frames={num_frames!r} must be an int >= 1.")
    count = None
    if max_visual_tokens is not None:
        check_limit(max_visual_tokens, [])
        count = _find_count(processor, max_visual_tokens)
    try:
        import av
    except ImportError:
        raise MissingPackageError("load_video needs PyAV: pip install av") from None

    def open_file() -> Any:
        file = av.open(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source))
        if file.streams.video:
            return file
        file.close()
        raise ValueError("it lacks a video stream")

    try:
        return _load(open_file, num_frames, count, max_visual_tokens or 0)
    except TokenPruneError:
        raise
    except (av.error.FFmpegError, *DAMAGED) as error:
        name = "these bytes" if isinstance(source, bytes) else shorten(str(source))
        raise OptionError(f"cannot read {name} as a video: {error}") from error


def _find_count(processor: Any, max_tokens: int) -> Count:
    if processor is None:
        raise OptionError(f"max_visual_tokens={max_tokens} needs the model's processor. Pass processor=.")
    video = getattr(processor, "video_processor", processor)
    count_patches = getattr(video, "get_num_of_video_patches", None)
    if count_patches is None:
        raise UnsupportedSetupError(
            f"The tokens of videos of {type(video).__name__} cannot be counted. Pass a smaller num_frames instead."
        )
    return lambda frames, height, width: count_patches(frames, height, width, {}) // video.merge_size**2


@dataclass(frozen=True)
class _Index:
    """Packets of a video.

    Args:
        num_packets: Number of packets. Some may not be frames.
        times: Time of each packet in the order of display. Empty if a packet has no time.
        keys: Times of the keyframes, sorted.
    """

    num_packets: int
    times: list[int]
    keys: list[int]


def _load(open_file: Open, num_frames: int, count: Count | None, max_tokens: int) -> list[Image.Image]:
    with open_file() as file:
        index = _read_index(file)
    with open_file() as file:
        frame = next(file.decode(video=0), None)
    if frame is None:
        raise ValueError("its video stream is empty")
    num_frames, size = min(num_frames, index.num_packets), None
    if count is not None:
        sides = (frame.height, frame.width) if frame.rotation % 180 == 0 else (frame.width, frame.height)
        num_frames, size = _choose(count, num_frames, sides, max_tokens)
    times = [index.times[i] for i in _spread(len(index.times), num_frames)] if index.times else []
    with open_file() as file:
        frames = _read_at(file, times, index.keys, size)
    # Some packets are not frames, or the file cannot seek.
    return frames or _read_in_order(open_file, index.num_packets, num_frames, size)


def _read_index(file: Any) -> _Index:
    stream = file.streams.video[0]
    packets = [packet for packet in file.demux(stream) if packet.size]
    if len(packets) < stream.frames:  # 0 if the container does not store the number
        raise ValueError(f"it is truncated: it has {len(packets)} of {stream.frames} frames")
    times = [packet.pts for packet in packets]
    keys = sorted(packet.pts for packet in packets if packet.is_keyframe and packet.pts is not None)
    return _Index(len(packets), [] if None in times else sorted(times), keys)


def _choose(count: Count, num_frames: int, sides: Size, max_tokens: int) -> tuple[int, Size]:
    """Return the number of frames and their (height, width), with at most `max_tokens` tokens in all."""
    error = None
    for frames in range(num_frames, 0, -1):
        image = InputImage(None, count=partial(count, frames), full_size=sides)
        try:
            return frames, find_size(image, min(1.0, max_tokens / image.tokens), max_tokens)
        except BudgetError as too_small:
            error = too_small
        except ValueError as invalid:
            raise OptionError(f"the processor rejects frames of {sides[0]} x {sides[1]} pixels: {invalid}") from invalid
    raise BudgetError(f"max_visual_tokens={max_tokens} is too small for a frame of this video.") from error


def _spread(count: int, num_frames: int) -> list[int]:
    return [(2 * index + 1) * count // (2 * num_frames) for index in range(num_frames)]


def _read_at(file: Any, times: list[int], keys: list[int], size: Size | None) -> list[Image.Image] | None:
    """Return the frames with these times, or None if one is missing. Seeks past groups of frames that are not used."""
    stream, frames = file.streams.video[0], []
    decoded = file.decode(stream)
    reached = keys[0] if keys else None
    for time in times:
        later = bisect_right(keys, time)
        if later and reached is not None and keys[later - 1] > reached:
            file.seek(keys[later - 1], stream=stream)
            decoded = file.decode(stream)
        frame = next((frame for frame in decoded if frame.pts is None or frame.pts >= time), None)
        if frame is None or frame.pts != time:
            return None
        reached = time
        frames.append(_convert(frame, size))
    return frames


def _read_in_order(open_file: Open, num_packets: int, num_frames: int, size: Size | None) -> list[Image.Image]:
    """Return evenly spaced frames by decoding all. Not every packet is a frame, so a pass may find fewer frames."""
    total = num_packets
    while total:
        indices, num_decoded = _spread(total, min(num_frames, total)), 0
        frames: list[Image.Image] = []
        with open_file() as file:
            for num_decoded, frame in enumerate(file.decode(video=0), 1):
                if num_decoded - 1 == indices[len(frames)]:
                    frames.append(_convert(frame, size))
                if len(frames) == len(indices):
                    return frames
        total = num_decoded
    raise ValueError("its video stream is empty")


def _convert(frame: Any, size: Size | None) -> Image.Image:
    """Return a frame as an upright RGB image. Phones store videos with a rotation to apply."""
    if size is not None:
        height, width = size if frame.rotation % 180 == 0 else size[::-1]
        frame = frame.reformat(width=width, height=height, format="rgb24", interpolation="AREA")
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
