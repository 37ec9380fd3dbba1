# SPDX-License-Identifier: Apache-2.0
"""Read a file that a setting names: a regular one, of bounded size, once. Check one to be written before the work."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from tokenprune.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 64 * 2**20  # bytes; what is read here are thresholds, classifiers and settings


class File(str):
    """The path of a file, together with the bytes that it held when it was read; everywhere else a plain path."""

    content: bytes

    @classmethod
    def read(cls, path: str | Path, limit: int = LIMIT) -> File:
        """Read a file; raises OSError for what is no regular file, holds more than `limit` bytes, or cannot be read.

        A pipe or a device is refused, not waited for.
        """
        file = cls(os.fspath(path))
        if "\0" in file:
            raise OSError(errno.EINVAL, "it is no path")
        flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
        if not stat.S_ISREG(os.stat(file).st_mode):  # devices are not even opened
            raise OSError(errno.EINVAL, "it is no regular file")
        with open(os.open(file, flags), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):  # it may have been replaced
                raise OSError(errno.EINVAL, "it is no regular file")
            file.content = opened.read(limit + 1)
        if len(file.content) > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit} bytes")
        return file

    @classmethod
    def from_path(cls, path: str | Path) -> File:
        """Return `path` if it was read already, else read it; raises OSError."""
        return path if isinstance(path, cls) else cls.read(path)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors of a safetensors file and its metadata; raises ValueError for any other file."""
        from safetensors.torch import load

        try:
            tensors = load(self.content)
            # Eight bytes for the header's length, then the header, which is JSON.
            header = json.loads(self.content[8 : 8 + int.from_bytes(self.content[:8], "little")])
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(str(error).partition("\n")[0] or "it is no safetensors file") from error
        return tensors, header.get("__metadata__") or {}


def check_output(*paths: Path | None) -> None:
    """Raise OptionError for a file that cannot be written: a folder, one in no folder, or one that may not be."""
    for path in filter(None, paths):
        try:
            if path.is_dir():
                raise OptionError(f"cannot write {path}: it is a folder, name a file in it")
            if not path.parent.is_dir():
                raise OptionError(f"cannot write {path}: there is no folder {path.parent}")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise OptionError(f"cannot write {path}: you may not write there, name another place")
        except OSError as error:  # such as a name that is too long
            raise OptionError(f"cannot write {path}: {describe_error(error)}") from error


def check_output_folder(path: Path | None) -> None:
    """Raise OptionError for a folder that is not there and cannot be made, or that nothing can be written into."""
    if path is None:
        return
    try:
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            why = "you may not write there" if there.is_dir() else f"{there} is a file"
            raise OptionError(f"cannot use the folder {path}: {why}, name another place")
    except OSError as error:
        raise OptionError(f"cannot use the folder {path}: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """Return in words why a file could not be read."""
    return getattr(error, "strerror", None) or str(error)


__all__ = ["LIMIT", "File", "check_output", "check_output_folder", "describe_error"]
