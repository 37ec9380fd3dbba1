# SPDX-License-Identifier: Apache-2.0
"""Read images and videos from files or bytes as RGB.

Pillow reads images, animations and folders of frames. PyAV reads other videos. As in
`transformers.image_utils.load_image`, the EXIF orientation is applied and alpha is dropped. Unlike there, 16-bit grey
images are scaled to 8 bits: Pillow's conversion would clip nearly all of their values to white.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

import tokenprune
from tokenprune.errors import MissingPackageError, OptionError, TokenPruneError
from tokenprune_bench.profiling.photo import FindLargest, Photo

_UNKNOWN = "Pillow does not know its format"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


class RowError(Exception):
    """Reason why a row of a data file cannot be used."""


@dataclass(frozen=True)
class Source:
    """Location of an image or video.

    Attributes:
        name: Name for messages.
        size: Size in bytes.
        read: Returns the path or the bytes.
    """

    name: str
    size: int
    read: Callable[[], Path | bytes]


def find_source(value: Any, folder: Path) -> Source:
    """Return the source of an image or video value of a row.

    Args:
        value: A path relative to `folder`, or a dict of the `datasets` library with bytes or a path.
        folder: Folder of the data file.

    Raises:
        RowError: If the value is of another type, or the file does not exist.
    """
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        data = value["bytes"]
        return Source(Path(value.get("path") or "image").name, len(data), lambda: data)
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        value = value["path"]
    if not isinstance(value, str) or not value:
        raise RowError(f"{shorten(value)} is not a file name")
    if _ADDRESS.match(value):
        raise RowError(f"{shorten(value)} is a URL; download the file first")
    path = folder / value
    try:
        return Source(path.name, path.stat().st_size, lambda: path)
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        hint = ' (use "/" instead of "\\")' if "\\" in value and path.as_posix() == str(path) else ""
        raise RowError(f"cannot read {shorten(str(path))}: {_describe_error(error)}{hint}") from error


def shorten(value: Any) -> str:
    """Format a value for a message: a printable string as is, other values by `repr`, cut to about 200 characters."""
    text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text)} letters)"


def read_image(source: Source, processor: Any = None) -> Image.Image:
    """Read an image as RGB, or the first frame of an animation.

    Args:
        source: The image.
        processor: Processor that takes the image. If it is patched with a number of tokens, a JPEG is decoded by
            `tokenprune.load_image`, at the scale that this number needs.

    Raises:
        RowError: If the file cannot be read.
        TokenPruneError: If the number of tokens does not fit the image.
    """
    data = source.read()
    with _reading(source.name, "image"), Image.open(_prepare_media(data)) as image:
        if not (isinstance(image, JpegImageFile) and _has_limit(processor)):
            return _convert_to_rgb(image)
    # Not inside of `_reading`: errors of the budget concern the setting and not the file.
    return tokenprune.load_image(data, processor=processor)


def read_jpeg(source: Source) -> bytes | None:
    """Return the content of a JPEG file, or None for an image of another format.

    Raises:
        RowError: If the file cannot be read.
    """
    data = source.read()
    with _reading(source.name, "image"), Image.open(_prepare_media(data)) as image:
        if not isinstance(image, JpegImageFile):
            return None
        return data if isinstance(data, bytes) else data.read_bytes()


def _has_limit(processor: Any) -> bool:
    """Return whether a processor is patched with a number of tokens."""
    if processor is None:
        return False
    from tokenprune.integrations.hf.pixels.marker import find_patch  # imports torch

    return getattr(getattr(find_patch(processor), "resizer", None), "max_tokens", None) is not None


def get_image_size(source: Source) -> tuple[int, int]:
    """Return (width, height) of an image without decoding it.

    Raises:
        RowError: If the file cannot be read.
    """
    data = source.read()
    with _reading(source.name, "image"), Image.open(_prepare_media(data)) as image:
        return image.size


def is_animated(source: Source) -> bool:
    """Return True if an image file has several frames.

    Raises:
        RowError: If the file cannot be read.
    """
    data = source.read()
    with _reading(source.name, "image"), Image.open(_prepare_media(data)) as image:
        # Further images of an MPO file (written by phones) are previews or a depth map.
        return bool(getattr(image, "is_animated", False)) and image.format != "MPO"


def read_video(source: Source, max_frames: int) -> list[Image.Image]:
    """Return at most `max_frames` evenly spaced frames of a video.

    Raises:
        RowError: If the video cannot be read, or its frames differ in size.
    """
    with _reading(source.name, "video"):
        frames = _read_frames(source.read(), max_frames)
        check_sizes(frames)
        return frames


def check_sizes(frames: Sequence[Image.Image]) -> None:
    """Check that all frames have one size, as processors require.

    Raises:
        RowError: If the frames differ in size.
    """
    sizes = list(dict.fromkeys(frame.size for frame in frames))
    if len(sizes) > 1:
        (a, b), (c, d) = sizes[:2]
        raise RowError(f"its frames have several sizes, such as {a} x {b} and {c} x {d}; resize them to one size")


def read_frames(
    paths: Sequence[Path], max_frames: int, find_largest: FindLargest | None = None
) -> Sequence[Image.Image | Photo]:
    """Return at most `max_frames` evenly spaced frames of one video or several images.

    The images of a folder are sorted by name, with numbers compared as numbers (frame 9 before frame 10).

    Args:
        paths: Images, folders of images, or a video.
        max_frames: Maximum number of frames.
        find_largest: Return JPEG files as `Photo`, see `Photo.open`. None: decode them completely.

    Raises:
        TokenPruneError: If a file cannot be read.
    """
    try:
        files = [file for path in paths for file in (_list_images(path) if path.is_dir() else [path])]
        if len(files) == 1:
            if (photo := _open_photo(files[0], find_largest)) is not None:
                return [photo]
            with _reading(str(files[0]), "image or video"):
                return _read_frames(files[0], max_frames)
        chosen = [files[index] for index in _compute_even_indices(len(files), max_frames)]
        return [_open_photo(file, find_largest) or _read_first_frame(file) for file in chosen]
    except RowError as error:
        raise TokenPruneError(str(error)) from error


def _read_frames(data: Path | bytes, max_frames: int) -> list[Image.Image]:
    if isinstance(data, Path) and data.is_dir():
        files = _list_images(data)
        return [_read_first_frame(files[index]) for index in _compute_even_indices(len(files), max_frames)]
    try:
        with Image.open(_prepare_media(data)) as image:
            # Pillow detects an MPEG stream but cannot decode it.
            if image.format != "MPEG":
                # Further images of an MPO file are previews or a depth map.
                num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
                return [_read_frame(image, index) for index in _compute_even_indices(num_frames, max_frames)]
    except UnidentifiedImageError:
        pass
    return _decode_video(data, max_frames)


def _decode_video(data: Path | bytes, max_frames: int) -> list[Image.Image]:
    try:
        return tokenprune.load_video(data, num_frames=max_frames)
    except MissingPackageError as error:
        raise RowError(f"{_UNKNOWN}; for a video, pip install av (PyAV), or use a GIF or a folder of frames") from error
    except OptionError as error:
        cause = error.__cause__  # the error of the decoder, without the name of the file
        raise RowError(_describe_error(cause if isinstance(cause, Exception) else error)) from error


def _list_images(folder: Path) -> list[Path]:
    Image.init()
    # Pillow writes some formats that it cannot read (PDF). Hidden files belong to the system.
    known = {suffix for suffix, name in Image.EXTENSION.items() if name in Image.OPEN}
    files = [
        file
        for file in folder.iterdir()
        if file.suffix.lower() in known and not file.name.startswith(".") and file.is_file()
    ]
    if not files:
        raise RowError(f"{folder} has no images")
    return sorted(files, key=_get_number_key)


def _get_number_key(file: Path) -> list[tuple[int, str]]:
    """Return a sort key that compares digits as numbers."""
    parts = re.split(r"([0-9]+)", file.name)  # every second part is a number
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]


def _read_first_frame(file: Path) -> Image.Image:
    return read_image(Source(file.name, 0, lambda: file))


def _open_photo(file: Path, find_largest: FindLargest | None) -> Photo | None:
    with _reading(str(file), "image"):
        return None if find_largest is None else Photo.open(file, find_largest)


def _read_frame(image: Image.Image, index: int) -> Image.Image:
    image.seek(index)
    return _convert_to_rgb(image)


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise RowError("its pixels have 32 bits; save it with 8 or 16 bits")
    return image.convert("RGB")


def _prepare_media(data: Path | bytes) -> Path | io.BytesIO:
    if isinstance(data, Path) and data.is_dir():
        raise RowError("it is a folder; use a file")
    if not (len(data) if isinstance(data, bytes) else data.stat().st_size):
        raise RowError("the file is empty")
    return io.BytesIO(data) if isinstance(data, bytes) else data


def _compute_even_indices(items: int, max_items: int) -> list[int]:
    count = min(max_items, items)
    return [(2 * index + 1) * items // (2 * count) for index in range(count)]


@contextmanager
def _reading(name: str, kind: str) -> Iterator[None]:
    """Turn every error into a RowError that names the file. Decoders raise many error types for damaged data."""
    try:
        yield
    except Exception as error:
        article = "an" if kind.startswith("image") else "a"
        raise RowError(f"cannot read {shorten(name)} as {article} {kind}: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    # Pillow's message for an unknown format contains the full path.
    if isinstance(error, UnidentifiedImageError):
        return _UNKNOWN
    if type(error).__module__.startswith("av."):
        return f"FFmpeg: {getattr(error, 'strerror', None) or error}"
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
