# SPDX-License-Identifier: Apache-2.0
"""Read rows of users' files as plain dicts: JSON lines, a JSON list, CSV, Parquet, and folders of `datasets`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenprune_bench.errors import DataError
from tokenprune_bench.profiling.media import RowError

# Files that identify folders of the `datasets` library.
_SAVED, _FOLDERS = ("dataset_info.json", "dataset_dict.json"), ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_TABLES = {".csv": ",", ".tsv": "\t"}
_LISTS = ("images", "answers")  # columns whose cells are lists


def read_rows(path: Path, split: str | None) -> tuple[Path, Iterator[tuple[str, Any]]]:
    """Return the folder that image paths are relative to, and an iterator over (name, row) pairs.

    A row that is not valid JSON is returned as a RowError.

    Args:
        path: A file (.csv, .tsv, .parquet, .json, or JSON lines with any other name), a folder with one *.jsonl, or a
            folder that `datasets` reads: saved by it, images with a metadata file, or Parquet files.
        split: Split to use if a folder has several.

    Raises:
        DataError: If the path cannot be read.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist.")
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        files = sorted(path.glob("*.jsonl"))
        if names & {*_SAVED, *_FOLDERS} or (not files and _find_parquets(path)):
            return path, _iter_dataset(path, split)
        if len(files) != 1:
            count = f"{len(files)} files with JSON lines (*.jsonl); name one" if files else "no file with JSON lines"
            raise DataError(f"{path} is not a `datasets` folder and has {count}.")
        (path,) = files
    kind = path.suffix.lower()
    if kind == ".parquet":
        return path.parent, _iter_dataset(path, split)
    return path.parent, _iter_table(path, _TABLES[kind]) if kind in _TABLES else _iter_json(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"Cannot read {path}: it is not UTF-8 text ({error}).") from error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


def _iter_json(path: Path) -> Iterator[tuple[str, Any]]:
    text = _read_text(path)
    if path.suffix.lower() == ".json" and text.lstrip()[:1] == "[":
        rows = _parse_json(text)
        if isinstance(rows, RowError):
            raise DataError(f"Cannot read {path}: {rows}.")
        for index, row in enumerate(rows):
            yield f"row {index}", row
        return
    for index, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {index}", _parse_json(line)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError(f"not valid JSON: {error}")


def _iter_table(path: Path, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Yield rows of a table as texts: the answer "007" is not converted to 7. Empty cells are left out."""
    lines = _read_text(path).split("\n")
    table = csv.reader((line + "\n" for line in lines), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    start = 1  # a row can span several lines
    try:
        for cells in table:
            where, start = f"line {start}", table.line_num + 1
            if not any(cells):
                continue
            if names is None:
                names = [cell.strip() for cell in cells]
            elif len(cells) != len(names):
                yield where, RowError(f"has {len(cells)} cells, but the first line has {len(names)}")
            else:
                row: dict[str, Any] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
                for name in _LISTS:
                    if name in row:
                        row[name] = _parse_json(row[name])
                yield where, row
    except csv.Error as error:
        raise DataError(f"Cannot read line {start} of {path}: {error}.") from error


def _find_parquets(folder: Path) -> list[Path]:
    """Return Parquet files in the locations that hub data sets use."""
    return [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]


def _iter_dataset(path: Path, split: str | None) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path} needs the datasets library: pip install tokenprune-bench") from error
    try:
        if path.is_file():
            dataset = datasets.Dataset.from_parquet(str(path))
        elif any((path / name).exists() for name in _SAVED):
            dataset = datasets.load_from_disk(str(path))
        else:
            kind = "imagefolder" if any((path / name).exists() for name in _FOLDERS) else "parquet"
            dataset = datasets.load_dataset(kind, data_dir=str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"Cannot read {path} as a dataset: {str(error).splitlines()[0]}") from error
    if isinstance(dataset, dict):
        if split is None and len(dataset) == 1:
            (split,) = dataset
        if split not in dataset:
            raise DataError(f"{path} has the splits {', '.join(dataset)}. Select one with --split.")
        dataset = dataset[split]
    # Keep bytes or paths: an image that cannot be decoded makes only its own row invalid.
    for name, feature in dataset.features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, (datasets.Image, datasets.Video)):
            plain = type(inner)(decode=False)
            dataset = dataset.cast_column(name, plain if inner is feature else datasets.List(plain))
    for index in range(len(dataset)):
        yield f"row {index}", dataset[index]
