# SPDX-License-Identifier: Apache-2.0
"""Video files written by PyAV: any frames, turned as by a phone, and without a picture."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}  # such a file does not store its number of frames
CONTAINERS: list[tuple[str, dict[str, str] | None]] = [
    ("a.mp4", None), ("cut.mp4", FRAGMENTS), ("a.mkv", None), ("a.ts", None), ("a.avi", None), ("a.m1v", None),
]  # fmt: skip
RATE = 25
_CODECS = {".avi": "mpeg4", ".m1v": "mpeg1video"}


def import_av() -> Any:
    """PyAV, or skip the test."""
    return pytest.importorskip("av", reason="needs PyAV")


def write_video(
    path: Path,
    frames: Iterable[Image.Image],
    size: tuple[int, int],
    container: dict[str, str] | None = None,
    times: Sequence[int] = (),
    codec: str | None = None,
    **options: str,
) -> Path:
    """Write a video with a keyframe in every fifth frame.

    Args:
        path: The suffix chooses the container.
        frames: The frames.
        size: Width and height of the frames.
        container: Options of the container.
        times: Time of each frame in 1/25 seconds. Default: one frame after the other.
        codec: Name of the codec. None: the usual codec of the container.
        options: Options of the codec.
    """
    av = import_av()
    with av.open(str(path), "w", options=container or {}) as video:
        stream = video.add_stream(codec or _CODECS.get(path.suffix, "libx264"), rate=RATE)
        stream.width, stream.height = size
        stream.pix_fmt, stream.options = "yuv420p", {"g": "5", "crf": "10"} | options
        video.start_encoding()
        is_empty = True
        for index, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            if times:
                frame.pts, frame.time_base = times[index], Fraction(1, RATE)
            video.mux(stream.encode(frame))
            is_empty = False
        if not is_empty:
            video.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """Write a file without a picture."""
    av = import_av()
    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        file.mux(stream.encode(sound))
        file.mux(stream.encode())
    return path


def turn_clockwise(mp4: bytes) -> bytes:
    """The file with the matrix of a phone that was held upright: its track is turned by a quarter."""
    data, (scale, unit) = bytearray(mp4), (1 << 16, 1 << 30)
    start = data.index(struct.pack(">9i", scale, 0, 0, 0, scale, 0, 0, 0, unit), data.index(b"tkhd"))
    data[start : start + 36] = struct.pack(">9i", 0, scale, 0, -scale, 0, 0, 0, 0, unit)
    return bytes(data)


def trim(mp4: bytes, first: int, count: int) -> bytes:
    """The file with an edit list that shows `count` frames from `first` on, as after a trim on a phone."""
    data, start = bytearray(mp4), mp4.index(b"mdhd") + 16
    (scale,) = struct.unpack(">I", data[start : start + 4])
    edits = mp4.index(b"elst") + 12
    duration = 1000 * count // RATE  # in units of the movie, milliseconds
    data[edits : edits + 8] = struct.pack(">Ii", duration, first * scale // RATE)
    return bytes(data)
