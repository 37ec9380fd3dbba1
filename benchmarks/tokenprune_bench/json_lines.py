# SPDX-License-Identifier: Apache-2.0
"""JSON lines that survive a killed run: each is flushed, and a torn last one is left out when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenprune_bench.errors import RunError


class JsonLinesWriter:
    """A file of JSON lines, open for writing; each call of `write` goes to the file at once, as a whole.

    start: the bytes that are kept of what the file held; the rest is cut off. Raises RunError where it cannot write.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        try:
            self._file = path.open("r+b" if path.exists() and start else "wb")
            if start:
                self._file.seek(start)
                self._file.truncate()
        except OSError as error:
            raise self._error(error) from error

    def write(self, *records: dict[str, Any]) -> None:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> RunError:
        return RunError(f"cannot write {self.path}: {error.strerror or error}; what was written before is kept")

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._file.close()
        except OSError as error:  # what could not be written is tried again here
            if kind is None:
                raise self._error(error) from error


def read_lines(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Return each whole record with the place in bytes where it ends; [] for no file. A torn last line is left out.

    Raises RunError where another line is no JSON object.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    records, end = [], 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        end += len(line)
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise RunError(f"line {number} of {path} is damaged: remove it and what follows, and run again")
        records.append((record, end))
    return records


def write_records(path: Path, records: Iterable[dict[str, Any]], indent: int | None = None) -> None:
    """Write a file of records such that it is there either as it was or as it shall be."""
    text = "".join(json.dumps(record, ensure_ascii=False, indent=indent) + "\n" for record in records)
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a file such that it is there either as it was or as it shall be. Raises RunError where it cannot."""
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()  # of a full disk, it holds a part
        raise RunError(f"cannot write {path}: {error.strerror or error}; what was written before is kept") from error
