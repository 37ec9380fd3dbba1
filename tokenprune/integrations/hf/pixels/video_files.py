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
    UnsupportedSetupError,
)
from tokenprune.integrations.hf.pixels.animations import count_gif_frames, read_gif
from tokenprune.integrations.hf.pixels.loading import reading_source
from tokenprune.integrations.shared.resizing import find_size
from tokenprune.selection.images import InputImage
from tokenprune.settings.max_visual_tokens import check_limit

Size = tuple[int, int]  # (height, width)
Count = Callable[[int, int, int], int]  # (frames, height, width) -> visual tokens
Choose = Callable[[int, Size], tuple[int, Size | None]]  # see `_choose`
Open = Callable[..., Any]
_GIF = b"GIF8"
_MAX_STREAMS = 16  # streams of a file whose decoders get options


def load_video(
    source: str | Path | bytes, *, num_frames: int = 8, processor: Any = None, max_visual_tokens: int | None = None
) -> list[Image.Image]:
    """Load evenly spaced frames of a video file, scaled by the decoder to a budget. Needs PyAV (`pip install av`).

    Number and size of the frames are chosen before decoding. If `num_frames` of the processor's smallest frames exceed
    the budget, fewer frames are used. The decoder starts at the last keyframe before a frame and skips the rest. GIF
    files do not need PyAV. Pass the frames with `videos=[frames], do_sample_frames=False` to the processor.

    Args:
        source: Path or content of a video file.
        num_frames: Maximum number of frames.
        processor: Processor or video processor that takes the frames. Its class must count tokens by
            `get_num_of_video_patches`, as in Qwen-VL and GLM-V.
        max_visual_tokens: Maximum number of tokens of the video. None: frames of the original size.

    Returns:
        The frames, upright, in mode RGB.

    Raises:
        OptionError: If the file is not a valid video, the arguments are invalid, or a frame has more pixels than Pillow
            allows for an image (`PIL.Image.MAX_IMAGE_PIXELS`).
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
    choose = partial(_choose, count, max_visual_tokens or 0)
    with reading_source(source, "a video", Image.DecompressionBombError):
        content = _read_gif(source)
        if content is not None:
            return _load_gif(content, num_frames, choose)
    try:
        import av
    except ImportError:
        raise MissingPackageError("load_video needs PyAV: pip install av") from None
    with reading_source(source, "a video", av.error.FFmpegError):
        return _load(partial(_open, av, source), num_frames, choose)


def _read_gif(source: str | Path | bytes) -> bytes | None:
    """Return the content of a GIF file, or None for another format."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        start = file.read(len(_GIF))
        return start + file.read() if start == _GIF else None


def _open(av: Any, source: str | Path | bytes, **options: str) -> Any:
    """Open a video. Neither the search for its streams nor its decoder accepts frames above the limit of pixels."""
    limit = {} if Image.MAX_IMAGE_PIXELS is None else {"max_pixels": str(2 * Image.MAX_IMAGE_PIXELS)}
    content = io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)
    file = av.open(content, options=options, stream_options=[limit] * _MAX_STREAMS)
    if not file.streams.video:
        file.close()
        raise ValueError("it lacks a video stream")
    file.streams.video[0].codec_context.options = limit
    return file


def _find_count(processor: Any, max_tokens: int) -> Count:
    if processor is None:
        raise OptionError(f"max_visual_tokens={max_tokens} needs the model's processor. Pass processor=.")
    video = getattr(processor, "video_processor", processor)
    count_patches = getattr(video, "get_num_of_video_patches", None)
    if count_patches is None or isinstance(video, type):
        raise UnsupportedSetupError(
            f"The tokens of videos of {type(video).__name__} cannot be counted. Pass a smaller num_frames instead."
        )
    return lambda frames, height, width: count_patches(frames, height, width, {}) // video.merge_size**2


@dataclass(frozen=True)
class _Index:
    """Packets of a video.

    Args:
        num_packets: Number of packets. Some may not be frames.
        times: Time of each packet in the order of display. Empty if a packet shares its time or lacks one.
        keys: Times of the keyframes, sorted.
    """

    num_packets: int
    times: list[int]
    keys: list[int]


def _load_gif(data: bytes, num_frames: int, choose: Choose) -> list[Image.Image]:
    with Image.open(io.BytesIO(data)) as file:
        sides = file.height, file.width
    total = count_gif_frames(data)
    num_frames, size = choose(min(num_frames, total), sides)
    return read_gif(data, _spread(total, num_frames), size)


def _load(open_file: Open, num_frames: int, choose: Choose) -> list[Image.Image]:
    index = _read_index(open_file)
    with open_file() as file:
        frame = next(file.decode(video=0), None)
    if frame is None:
        raise ValueError("its video stream is empty")
    sides = (frame.height, frame.width) if frame.rotation % 180 == 0 else (frame.width, frame.height)
    num_frames, size = choose(min(num_frames, index.num_packets), sides)
    times = [index.times[i] for i in _spread(len(index.times), num_frames)] if index.times else []
    with open_file() as file:
        frames = _read_at(file, times, index.keys, size)
    # Some packets are not frames, or the file cannot seek.
    return frames or _read_in_order(open_file, index.num_packets, num_frames, size)


def _read_index(open_file: Open) -> _Index:
    with open_file() as file:
        stream = file.streams.video[0]
        _check_pixels(stream.width, stream.height)
        packets = _list_packets(file)
        num_stored, is_avi = stream.frames, file.format.name == "avi"
    if len(packets) < num_stored:  # 0 if the container does not store the number
        _check_complete(open_file, packets, num_stored, is_avi)
    times = [packet.pts for packet in packets]
    keys = sorted(packet.pts for packet in packets if packet.is_keyframe and packet.pts is not None)
    is_distinct = None not in times and len(set(times)) == len(times)  # frames without durations share a time
    return _Index(len(packets), sorted(times) if is_distinct else [], keys)


def _list_packets(file: Any) -> list[Any]:
    return [packet for packet in file.demux(file.streams.video[0]) if packet.size]


def _check_pixels(width: int, height: int) -> None:
    """Raise ValueError for frames without a size. FFmpeg does not report a size above its limit, see `_open`."""
    if not width * height:
        limit = Image.MAX_IMAGE_PIXELS and 2 * Image.MAX_IMAGE_PIXELS
        raise ValueError(f"the size of its frames is unknown, or above {limit} pixels (PIL.Image.MAX_IMAGE_PIXELS)")


def _check_complete(open_file: Open, packets: list[Any], num_stored: int, is_avi: bool) -> None:
    """Raise ValueError if packets are missing at the end. A container may also count frames that it does not show."""
    if is_avi:  # a repeated frame lacks a packet, and time stamps are frame numbers
        num_found = packets[-1].dts + 1 if packets and packets[-1].dts is not None else len(packets)
    else:  # an edit list hides frames, as of a video that a phone has trimmed
        with open_file(ignore_editlist="1") as file:
            num_found = len(_list_packets(file))
    if num_found < num_stored:
        raise ValueError(f"it is truncated: it has {num_found} of {num_stored} frames")


def _choose(count: Count | None, max_tokens: int, num_frames: int, sides: Size) -> tuple[int, Size | None]:
    """Return the number of frames and their (height, width), with at most `max_tokens` tokens in all.

    Args:
        count: Counts the tokens of frames. None: no budget.
        max_tokens: Maximum number of tokens.
        num_frames: Maximum number of frames.
        sides: (height, width) of the frames in the file.

    Returns:
        The number of frames, and their size. None for the size: the original size.
    """
    if count is None:
        return num_frames, None
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
