# SPDX-License-Identifier: Apache-2.0
"""Read files that a setting names, and check that output files can be written before a long command starts."""

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

LIMIT = 64 * 2**20  # bytes; files hold thresholds, classifiers and settings


class File(str):
    """Path of a file with the bytes that were read from it. It behaves like a plain string elsewhere.

    Attributes:
        content: Bytes of the file.
    """

    content: bytes

    @classmethod
    def read(cls, path: str | Path, limit: int = LIMIT) -> File:
        """Read a file without blocking on pipes or devices.

        Raises:
            OSError: If the path is not a regular file, has more than `limit` bytes, or cannot be read.
        """
        file = cls(os.fspath(path))
        if "\0" in file:
            raise OSError(errno.EINVAL, "the path contains a null character")
        flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
        if not stat.S_ISREG(os.stat(file).st_mode):  # opening a device may have side effects
            raise OSError(errno.EINVAL, "not a regular file")
        with open(os.open(file, flags), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):  # the file may have been replaced since `stat`
                raise OSError(errno.EINVAL, "not a regular file")
            file.content = opened.read(limit + 1)
        if len(file.content) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes")
        return file

    @classmethod
    def from_path(cls, path: str | Path) -> File:
        """Return `path` if it is a `File`, else read it. Raises OSError like `read`."""
        return path if isinstance(path, cls) else cls.read(path)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 digest of the content."""
        return hashlib.sha256(self.content).hexdigest()

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors and the metadata of a safetensors file.

        Raises:
            ValueError: If the file is not a safetensors file.
        """
        from safetensors.torch import load

        try:
            tensors = load(self.content)
            # The file starts with the length of the header (8 bytes) and the header (JSON).
            header = json.loads(self.content[8 : 8 + int.from_bytes(self.content[:8], "little")])
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(str(error).partition("\n")[0] or "not a safetensors file") from error
        return tensors, header.get("__metadata__") or {}


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in one step, so that an interrupted run keeps the old file.

    Raises:
        OptionError: If the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {describe_error(error)}") from error


def check_output(*paths: Path | None) -> None:
    """Raise OptionError if a file cannot be written: a folder, a missing parent folder, or no permission."""
    for path in filter(None, paths):
        try:
            if path.is_dir():
                raise OptionError(f"cannot write {path}: it is a folder. Pass a file in it.")
            if not path.parent.is_dir():
                raise OptionError(f"cannot write {path}: the folder {path.parent} does not exist.")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise OptionError(f"cannot write {path}: permission denied.")
        except OSError as error:  # for example a file name that is too long
            raise OptionError(f"cannot write {path}: {describe_error(error)}") from error


def check_output_folder(path: Path | None) -> None:
    """Raise OptionError if a folder cannot be created or written to."""
    if path is None:
        return
    try:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            why = "permission denied" if existing.is_dir() else f"{existing} is a file"
            raise OptionError(f"cannot use the folder {path}: {why}.")
    except OSError as error:
        raise OptionError(f"cannot use the folder {path}: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """Return a short description of a file error."""
    return getattr(error, "strerror", None) or str(error)


__all__ = ["LIMIT", "File", "check_output", "check_output_folder", "describe_error", "write_atomically"]
