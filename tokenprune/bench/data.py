# SPDX-License-Identifier: Apache-2.0
"""Questions from files: JSON lines, or a folder that the `datasets` library reads.

A row is {image | images | video, question, answer | answers, kind?}. Everything is checked before any model runs.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from tokenprune.errors import DataError, TokenPruneError

COLUMNS = ("image", "images", "video", "question", "answer", "answers", "kind")
DEFAULT_KIND = "all"
FRAMES = 8
_SHOWN = 10  # bad rows named in an error
# Files that say how the `datasets` library shall read a folder.
_SAVED, _FOLDERS = ("dataset_info.json", "dataset_dict.json"), ("metadata.jsonl", "metadata.csv", "metadata.parquet")


class BadRow(Exception):
    """Why one row cannot be asked."""


@dataclass(frozen=True)
class Source:
    """Where a picture or video is. name: for messages. size: in bytes. read: returns its path or its bytes."""

    name: str
    size: int
    read: Callable[[], Path | bytes]


@dataclass(frozen=True)
class Question:
    """One question. where: its row, for messages. answers: those that are accepted. frames: taken of a video."""

    where: str
    question: str
    answers: tuple[str, ...]
    kind: str
    pictures: tuple[Source, ...] = ()
    film: Source | None = None
    frames: int = FRAMES

    @property
    def is_film(self) -> bool:
        return self.film is not None

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """The pictures, read anew; raises DataError."""
        try:
            return tuple(map(_picture, self.pictures))
        except BadRow as error:
            raise DataError(f"{self.where}: {error}") from error

    @property
    def video(self) -> list[Image.Image]:
        """Frames of the video, evenly chosen, read anew; none without a video. Raises DataError."""
        if self.film is None:
            return []
        try:
            return _video(self.film, self.frames)
        except BadRow as error:
            raise DataError(f"{self.where}: {error}") from error


@dataclass(frozen=True)
class Data:
    """Questions, the name of what they came from, and what was left out, as "line 3: why"."""

    name: str
    questions: list[Question]
    skipped: list[str]

    def about(self) -> dict[str, Any]:
        """Return what tells these questions from others, as plain values."""
        parts: list[tuple] = []
        for one in self.questions:
            files = [(source.name, source.size) for source in (*one.pictures, *filter(None, [one.film]))]
            parts.append((one.question, one.answers, one.kind, one.frames if one.film else 0, files))
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return {"name": self.name, "questions": len(self.questions), "skipped": self.skipped, "digest": digest}


def load_data(
    path: Path,
    *,
    skip_bad: bool = False,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    frames: int = FRAMES,
    limit: int = 0,
) -> Data:
    """Read and check questions.

    path: a file of JSON lines (pictures are named relative to it); a folder with one such file; or a folder of the
    `datasets` library (`save_to_disk`, or pictures with a metadata file). skip_bad: leave out rows that cannot be asked
    instead of raising. columns: names to change, from theirs to ours; "" drops a column. split: of a `datasets` folder
    with several. frames: taken of a video. limit: only the first rows; 0: all.
    Raises DataError, which names up to ten bad rows, or says that there are none at all.
    """
    questions, bad = [], []
    for number, (where, row) in enumerate(_rows(path, split)):
        if limit and number == limit:
            break
        try:
            questions.append(_question(where, row, dict(columns or {}), frames))
        except BadRow as error:
            bad.append(f"{where}: {error}")
    if bad and not skip_bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        count = f"{len(bad)} bad row{'s' if len(bad) > 1 else ''}"
        raise DataError(f"{path} has {count} (--skip-bad leaves them out): {'; '.join(bad[:_SHOWN])}{more}")
    if not questions:
        raise DataError(f"{path} holds no questions" + (f": all {len(bad)} rows are bad, {bad[0]}" if bad else ""))
    return Data(path.resolve().name, questions, bad)


def read_columns(text: str) -> dict[str, str]:
    """Read "query=question,label=answers,id="; raises DataError for a column that a row does not have."""
    renamed = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        theirs, equals, ours = (one.strip() for one in part.partition("="))
        if not equals or (ours and ours not in COLUMNS):
            ours = ", ".join(COLUMNS)
            raise DataError(f"--columns {part!r}: write THEIRS=OURS, with one of {ours}; or THEIRS= to drop a column")
        renamed[theirs] = ours
    return renamed


def _rows(path: Path, split: str | None) -> Iterator[tuple[str, Any]]:
    """Yield each row with the words that name it; a row that is no JSON comes as a BadRow."""
    if not path.exists():
        raise DataError(f"there is no {path}")
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        if names & {*_SAVED, *_FOLDERS}:
            yield from _stored(path, split, saved=bool(names & {*_SAVED}))
            return
        files = sorted(path.glob("*.jsonl"))
        if len(files) != 1:
            found = f"{len(files)} of them: name one" if files else "none"
            raise DataError(f"{path} is no `datasets` folder, and of files with JSON lines (*.jsonl) it has {found}")
        (path,) = files
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parsed(line, path.parent)


def _parsed(line: str, folder: Path) -> Any:
    try:
        row = json.loads(line)
    except ValueError as error:
        return BadRow(f"no JSON: {error}")
    if not isinstance(row, dict):
        return BadRow("no JSON object")
    for name in ("image", "images", "video"):
        value = row.get(name)
        if isinstance(value, str):
            row[name] = folder / value
        elif isinstance(value, list):
            row[name] = [folder / one if isinstance(one, str) else one for one in value]
    return row


def _stored(path: Path, split: str | None, saved: bool) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path} needs the datasets library: pip install 'tokenprune-vlm[bench]'") from error
    try:
        if saved:
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset("imagefolder", data_dir=str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot read {path} as a dataset: {str(error).splitlines()[0]}") from error
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            (split,) = found
        if split not in found:
            raise DataError(f"{path} has the splits {', '.join(found)}: name one of them with --split")
        found = found[split]
    # As bytes or paths: a picture that cannot be decoded is the fault of one row.
    for name, feature in found.features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, (datasets.Image, datasets.Video)):
            plain = type(inner)(decode=False)
            found = found.cast_column(name, plain if inner is feature else datasets.List(plain))
    for number in range(len(found)):
        yield f"row {number}", found[number]


def _question(where: str, row: Any, columns: dict[str, str], frames: int) -> Question:
    if isinstance(row, BadRow):
        raise row
    row = {columns.get(name, name): value for name, value in row.items() if value is not None}
    row.pop("", None)
    for name in row:
        if name not in COLUMNS:
            close = get_close_matches(name, COLUMNS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"a row has {', '.join(COLUMNS)}"
            raise BadRow(f"unknown column {name!r}: {hint} (--columns {name}= drops it)")
    seen = [name for name in ("image", "images", "video") if name in row]
    if len(seen) != 1:
        raise BadRow(f"needs one of image, images and video, has {' and '.join(seen) or 'none'}")
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise BadRow("has no question")
    if ("answer" in row) == ("answers" in row):
        raise BadRow("needs either answer or answers")
    answers = row["answers"] if "answers" in row else [row["answer"]]
    valid = isinstance(answers, list) and answers
    if not valid or any(isinstance(one, bool) or not isinstance(one, (str, int, float)) for one in answers):
        raise BadRow(f"answers must be texts or numbers, not {answers!r}")
    kind = row.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str):
        raise BadRow(f"kind must be a text, not {kind!r}")
    value = row[seen[0]]
    if "images" in row and not (isinstance(value, list) and value):
        raise BadRow("images must be a list of pictures")
    sources = tuple(map(_source, value if "images" in row else [value]))
    if "video" in row:
        _video(sources[0], frames)
        return Question(where, row["question"], tuple(map(str, answers)), kind, (), sources[0], frames)
    for source in sources:
        _picture(source)
    return Question(where, row["question"], tuple(map(str, answers)), kind, sources)


def _source(value: Any) -> Source:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        data = value["bytes"]
        return Source(Path(value.get("path") or "picture").name, len(data), lambda: data)
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        value = value["path"]
    if not isinstance(value, (str, Path)):
        raise BadRow(f"{value!r} names no file")
    path = Path(value)
    try:
        return Source(path.name, path.stat().st_size, lambda: path)
    except OSError as error:
        raise BadRow(f"cannot read {path}: {error.strerror}") from error


def _picture(source: Source) -> Image.Image:
    found = source.read()
    try:
        with Image.open(io.BytesIO(found) if isinstance(found, bytes) else found) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadRow(f"cannot read {source.name} as a picture: {_reason(error)}") from error


def _video(source: Source, most: int) -> list[Image.Image]:
    """An animation or a folder of frames by Pillow, anything else by PyAV."""
    from tokenprune.bench.strip import read_frames

    found = source.read()
    if isinstance(found, bytes):
        raise BadRow("videos must be files")
    try:
        return read_frames([found], most)
    except TokenPruneError as error:
        if found.is_dir():
            raise BadRow(f"cannot read {source.name} as a video: {error}") from error
    try:
        import av
    except ImportError as error:
        raise BadRow(
            f"cannot read {source.name} as a video: Pillow reads GIF, WebP and folders of frames; for others, "
            "pip install av"
        ) from error
    from transformers.video_utils import load_video

    try:
        film, _ = load_video(str(found), num_frames=most, backend="pyav")
    except (OSError, ValueError, av.FFmpegError) as error:
        raise BadRow(f"cannot read {source.name} as a video: {_reason(error)}") from error
    return [Image.fromarray(frame) for frame in film]


def _reason(error: Exception) -> str:
    # Pillow's own words for a file without a format end with its whole path.
    if isinstance(error, UnidentifiedImageError):
        return "no format that Pillow knows"
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def check_films(questions: Iterable[Question], processor: Any) -> None:
    """Raise DataError for a video where the model's processor takes none."""
    film = next((one for one in questions if one.is_film), None)
    if film is not None and getattr(processor, "video_processor", None) is None:
        raise DataError(f"{film.where} asks about a video, and this model takes none")
