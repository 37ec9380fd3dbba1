# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that survive a killed run: each write is flushed, and a truncated last line is ignored."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenprune_bench.errors import RunError


class JsonLinesWriter:
    """Write records to a file. Each call of `write` is one write to the file.

    Args:
        path: The file.
        start: Number of bytes of the existing file to keep.

    Raises:
        RunError: If the file cannot be written.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        try:
            self._file = path.open("r+b" if path.exists() and start else "wb")
            if start:
                self._file.seek(start)
                self._file.truncate()
        except OSError as error:
            raise self._build_error(error) from error

    def write(self, *records: dict[str, Any]) -> None:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            raise self._build_error(error) from error

    def _build_error(self, error: OSError) -> RunError:
        return RunError(f"Cannot write {self.path}: {error.strerror or error}. Earlier records are kept.")

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as error:  # closing retries a failed write
            if error_type is None:
                raise self._build_error(error) from error


def read_lines(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Return each complete record with its end offset in bytes. Empty if there is no file.

    A truncated last line is ignored.

    Raises:
        RunError: If another line is not a JSON object.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror or error}.") from error
    records, end = [], 0
    for line_number, line in enumerate(data.splitlines(keepends=True), 1):
        end += len(line)
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise RunError(f"Line {line_number} of {path} is damaged. Remove it and all later lines, and run again.")
        records.append((record, end))
    return records


def write_records(path: Path, records: Iterable[dict[str, Any]], indent: int | None = None) -> None:
    """Write a file of records atomically."""
    text = "".join(json.dumps(record, ensure_ascii=False, indent=indent) + "\n" for record in records)
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        RunError: If the file cannot be written.
    """
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()  # a partial file if the disk is full
        raise RunError(f"Cannot write {path}: {error.strerror or error}. The old file is kept.") from error
