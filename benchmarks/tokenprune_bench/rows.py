# SPDX-License-Identifier: Apache-2.0
"""Rows of users' files as plain dicts: JSON lines, one list in JSON, CSV, Parquet, and folders of `datasets`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenprune_bench.errors import DataError
from tokenprune_bench.profiling.media import RowError

# Files that say how the `datasets` library shall read a folder.
_SAVED, _FOLDERS = ("dataset_info.json", "dataset_dict.json"), ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_TABLES = {".csv": ",", ".tsv": "\t"}
_LISTS = ("images", "answers")  # columns whose cells are lists


def read_rows(path: Path, split: str | None) -> tuple[Path, Iterator[tuple[str, Any]]]:
    """Return the folder that names of images are seen from, and each row with the words that name it; a row that is
    no JSON comes as a BadRow.

    path: a file (.csv, .tsv, .parquet, .json; any other name: JSON lines), a folder with one *.jsonl, or a folder that
    the `datasets` library reads: saved by it, of images with a metadata file, or of Parquet files. split: which one,
    where a folder has several. Raises DataError for anything else.
    """
    if not path.exists():
        raise DataError(f"there is no {path}")
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        files = sorted(path.glob("*.jsonl"))
        if names & {*_SAVED, *_FOLDERS} or (not files and _parquets(path)):
            return path, _stored(path, split)
        if len(files) != 1:
            found = f"{len(files)} of them: name one" if files else "none"
            raise DataError(f"{path} is no `datasets` folder, and of files with JSON lines (*.jsonl) it has {found}")
        (path,) = files
    kind = path.suffix.lower()
    if kind == ".parquet":
        return path.parent, _stored(path, split)
    return path.parent, _table(path, _TABLES[kind]) if kind in _TABLES else _json(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: it is no text in UTF-8 ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    text = _text(path)
    if path.suffix.lower() == ".json" and text.lstrip()[:1] == "[":
        rows = _parsed(text)
        if isinstance(rows, RowError):
            raise DataError(f"cannot read {path}: {rows}")
        for number, row in enumerate(rows):
            yield f"row {number}", row
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parsed(line)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError(f"no JSON: {error}")


def _table(path: Path, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Rows of a table as texts, whatever they look like: the answer "007" is no 7. An empty cell counts as none."""
    lines = _text(path).split("\n")
    table = csv.reader((line + "\n" for line in lines), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    start = 1  # a row may have several lines
    try:
        for cells in table:
            where, start = f"line {start}", table.line_num + 1
            if not any(cells):
                continue
            if names is None:
                names = [cell.strip() for cell in cells]
            elif len(cells) != len(names):
                yield where, RowError(f"has {len(cells)} cells, and the first line has {len(names)}")
            else:
                row: dict[str, Any] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
                for name in _LISTS:
                    if name in row:
                        row[name] = _parsed(row[name])
                yield where, row
    except csv.Error as error:
        raise DataError(f"cannot read line {start} of {path}: {error}") from error


def _parquets(folder: Path) -> list[Path]:
    """Tables where data sets from the hub have them."""
    return [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]


def _stored(path: Path, split: str | None) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path} needs the datasets library: pip install tokenprune-bench") from error
    try:
        if path.is_file():
            found = datasets.Dataset.from_parquet(str(path))
        elif any((path / name).exists() for name in _SAVED):
            found = datasets.load_from_disk(str(path))
        else:
            kind = "imagefolder" if any((path / name).exists() for name in _FOLDERS) else "parquet"
            found = datasets.load_dataset(kind, data_dir=str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot read {path} as a dataset: {str(error).splitlines()[0]}") from error
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            (split,) = found
        if split not in found:
            raise DataError(f"{path} has the splits {', '.join(found)}: name one of them with --split")
        found = found[split]
    # As bytes or paths: an image that cannot be decoded is the fault of one row.
    for name, feature in found.features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, (datasets.Image, datasets.Video)):
            plain = type(inner)(decode=False)
            found = found.cast_column(name, plain if inner is feature else datasets.List(plain))
    for number in range(len(found)):
        yield f"row {number}", found[number]
