# SPDX-License-Identifier: Apache-2.0
"""Read the frames of a GIF file with Pillow. FFmpeg merges frames without durations."""

from __future__ import annotations

import io
from collections.abc import Iterable

from PIL import Image

_EXTENSION, _IMAGE, _END = 0x21, 0x2C, 0x3B  # first byte of a block
_HEADER, _DESCRIPTOR = 13, 10  # bytes of the header of a file and of an image


def count_gif_frames(data: bytes) -> int:
    """Return the number of frames of a GIF file. Raise ValueError if the file ends inside a block."""
    offset, count = _HEADER + _count_color_bytes(data, _HEADER - 3), 0
    # Some writers leave out the last byte.
    while offset < len(data) and data[offset] != _END:
        if data[offset] == _IMAGE:
            count += 1
            offset += _DESCRIPTOR + _count_color_bytes(data, offset + _DESCRIPTOR - 1) + 1
        elif data[offset] == _EXTENSION:
            offset += 2
        else:
            raise ValueError(f"it is damaged at byte {offset}")
        while offset < len(data) and data[offset]:  # sub-blocks, each after its length
            offset += 1 + data[offset]
        offset += 1
    if offset > len(data):
        raise ValueError(f"it is truncated after {len(data)} bytes, in frame {count}")
    return count


def _count_color_bytes(data: bytes, offset: int) -> int:
    """Return the size of a color table from the byte with its flags. 0 if the file ends before this byte."""
    flags = data[offset] if offset < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def read_gif(data: bytes, indices: Iterable[int], size: tuple[int, int] | None) -> list[Image.Image]:
    """Return frames of a GIF file in mode RGB.

    Args:
        data: Content of the file.
        indices: Indices of the frames, ascending.
        size: (height, width) of the frames. None: the original size.
    """
    frames = []
    with Image.open(io.BytesIO(data)) as file:
        for index in indices:
            file.seek(index)
            frame = file.convert("RGB")
            frames.append(frame if size is None else frame.resize(size[::-1], Image.Resampling.BOX))
    return frames
