# SPDX-License-Identifier: Apache-2.0
"""Images and videos from files or bytes, as RGB: Pillow reads images, animations and folders of frames; PyAV other
videos.

As in `transformers.image_utils.load_image`, an image is turned upright as its EXIF says, and its alpha is dropped.
Differs from it: 16-bit greys are scaled to 8 bits, where Pillow's own conversion would make nearly all of them white.
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

from tokenprune.errors import TokenPruneError

_UNKNOWN = "no format that Pillow knows"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


class RowError(Exception):
    """Why one row cannot be asked."""


@dataclass(frozen=True)
class Source:
    """The location of an image or video. name: for messages. size: in bytes. read: returns its path or its bytes."""

    name: str
    size: int
    read: Callable[[], Path | bytes]


def find_source(value: Any, folder: Path) -> Source:
    """Return where an image or video of a row is: a path, seen from `folder`, or a dict of the `datasets` library with
    bytes or a path. Raises BadRow for anything else, and for a file that is not there."""
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        data = value["bytes"]
        return Source(Path(value.get("path") or "image").name, len(data), lambda: data)
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        value = value["path"]
    if not isinstance(value, str) or not value:
        raise RowError(f"{shorten(value)} names no file")
    if _ADDRESS.match(value):
        raise RowError(f"{shorten(value)} is an address: download it first, and name the file")
    path = folder / value
    try:
        return Source(path.name, path.stat().st_size, lambda: path)
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        hint = ' (write "/" in the place of "\\")' if "\\" in value and path.as_posix() == str(path) else ""
        raise RowError(f"cannot read {shorten(str(path))}: {_reason(error)}{hint}") from error


def shorten(value: Any) -> str:
    """Return a text that can be printed, or else what Python writes for a value, cut to what fits into a message."""
    text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text)} letters)"


def read_image(source: Source) -> Image.Image:
    """Return an image as RGB, of an animation the first frame; raises BadRow."""
    found = source.read()
    with _reading(source.name, "image"), Image.open(_opened(found)) as image:
        return _rgb(image)


def get_image_size(source: Source) -> tuple[int, int]:
    """Return width and height of an image, without decoding it; raises BadRow."""
    found = source.read()
    with _reading(source.name, "image"), Image.open(_opened(found)) as image:
        return image.size


def is_animated(source: Source) -> bool:
    """Return True if an image file holds several frames, of which `read_image` reads the first; raises BadRow."""
    found = source.read()
    with _reading(source.name, "image"), Image.open(_opened(found)) as image:
        # The further images of an MPO, as phones write it, are previews of the first or its depth map.
        return bool(getattr(image, "is_animated", False)) and image.format != "MPO"


def read_video(source: Source, most: int) -> list[Image.Image]:
    """Return frames of a video, evenly chosen where there are more than `most`; raises BadRow, also for frames of
    several sizes."""
    with _reading(source.name, "video"):
        frames = _frames(source.read(), most)
        check_sizes(frames)
        return frames


def check_sizes(frames: Sequence[Image.Image]) -> None:
    """Raise BadRow for frames of several sizes, which no processor takes."""
    sizes = list(dict.fromkeys(frame.size for frame in frames))
    if len(sizes) > 1:
        (a, b), (c, d) = sizes[:2]
        raise RowError(f"its frames have several sizes, such as {a} x {b} and {c} x {d}: make them one size")


def read_frames(paths: Sequence[Path], most: int) -> list[Image.Image]:
    """Return the frames of a video (see `read_video`), or several images, also those of a folder in the order of their
    names (frame 9 before frame 10); evenly chosen where there are more than `most`.

    Raises TokenPruneError for what cannot be read.
    """
    try:
        files = [file for path in paths for file in (_inside(path) if path.is_dir() else [path])]
        if len(files) == 1:
            with _reading(str(files[0]), "image or video"):
                return _frames(files[0], most)
        return [_first(files[index]) for index in _evenly(len(files), most)]
    except RowError as error:
        raise TokenPruneError(str(error)) from error


def _frames(found: Path | bytes, most: int) -> list[Image.Image]:
    if isinstance(found, Path) and found.is_dir():
        files = _inside(found)
        return [_first(files[index]) for index in _evenly(len(files), most)]
    try:
        with Image.open(_opened(found)) as image:
            # Pillow tells an MPEG stream from other files, but cannot decode it.
            if image.format != "MPEG":
                return [_read_frame(image, index) for index in _evenly(getattr(image, "n_frames", 1), most)]
    except UnidentifiedImageError:
        pass
    return _decoded(found, most)


def _decoded(found: Path | bytes, most: int) -> list[Image.Image]:
    try:
        import av
    except ImportError as error:
        raise RowError(f"{_UNKNOWN}; if it is a video, pip install av (PyAV), or give a GIF or its frames") from error
    with _video(av, found) as video:
        stream = video.streams.video[0]
        # Not all containers say how many frames they hold.
        count = sum(packet.size > 0 for packet in video.demux(stream))
        if count < stream.frames:
            raise RowError(f"it is cut off, {count} of {stream.frames} frames are there")
    while count:
        wanted, seen = _evenly(count, most), 0
        frames: list[Image.Image] = []
        with _video(av, found) as video:
            for seen, frame in enumerate(video.decode(video=0), 1):
                if seen - 1 == wanted[len(frames)]:
                    # Phones store videos as the sensor lies, with a note of how to turn them.
                    frames.append(frame.to_image().rotate(frame.rotation, expand=True))
                if len(frames) == len(wanted):
                    return frames
        count = seen  # not every packet is a frame: choose again
    raise RowError("it has no frames")


def _video(av: Any, found: Path | bytes) -> Any:
    video = av.open(str(found) if isinstance(found, Path) else io.BytesIO(found))
    if video.streams.video:
        return video
    video.close()
    raise RowError("it has no images, or is cut off")


def _inside(folder: Path) -> list[Path]:
    Image.init()
    # Pillow writes some formats that it cannot read (PDF). Hidden files are of the system, whatever they are called.
    known = {suffix for suffix, name in Image.EXTENSION.items() if name in Image.OPEN}
    files = [
        file
        for file in folder.iterdir()
        if file.suffix.lower() in known and not file.name.startswith(".") and file.is_file()
    ]
    if not files:
        raise RowError(f"there are no images in {folder}")
    return sorted(files, key=_numbered)


def _numbered(file: Path) -> list[tuple[int, str]]:
    """Return a key by which numbers in names count as numbers: frame 9 comes before frame 10."""
    parts = re.split(r"([0-9]+)", file.name)  # every second one is a number
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]


def _first(file: Path) -> Image.Image:
    return read_image(Source(file.name, 0, lambda: file))


def _read_frame(image: Image.Image, index: int) -> Image.Image:
    image.seek(index)
    return _rgb(image)


def _rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise RowError("its pixels have 32 bits: save it with 8 or 16")
    return image.convert("RGB")


def _opened(found: Path | bytes) -> Path | io.BytesIO:
    if isinstance(found, Path) and found.is_dir():
        raise RowError("it is a folder: name a file in it")
    if not (len(found) if isinstance(found, bytes) else found.stat().st_size):
        raise RowError("the file is empty")
    return io.BytesIO(found) if isinstance(found, bytes) else found


def _evenly(items: int, most: int) -> list[int]:
    number = min(most, items)
    return [(2 * place + 1) * items // (2 * number) for place in range(number)]


@contextmanager
def _reading(name: str, kind: str) -> Iterator[None]:
    """Say of every error that `name` cannot be read: decoders raise whatever damaged data makes them stumble over."""
    try:
        yield
    except Exception as error:
        article = "an" if kind.startswith("image") else "a"
        raise RowError(f"cannot read {shorten(name)} as {article} {kind}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    # Pillow's own words for a file without a format end with its whole path.
    if isinstance(error, UnidentifiedImageError):
        return _UNKNOWN
    if type(error).__module__.startswith("av."):
        return f"FFmpeg says {getattr(error, 'strerror', None) or error}"
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
