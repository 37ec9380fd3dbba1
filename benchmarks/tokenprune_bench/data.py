# SPDX-License-Identifier: Apache-2.0
"""Questions of the user, from rows of files (rows.py) with images and videos (media.py).

A row is {image | images | video, question, answer | answers, kind?}. All rows are checked before a model runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from tokenprune_bench.errors import DataError
from tokenprune_bench.profiling.media import (
    RowError,
    Source,
    find_source,
    get_image_size,
    is_animated,
    read_image,
    read_jpeg,
    read_video,
    shorten,
)
from tokenprune_bench.rows import read_rows

COLUMNS = ("image", "images", "video", "question", "answer", "answers", "kind")
DEFAULT_KIND = "all"
FRAMES = 8
_NO_VIDEO = "is about a video, but this model does not support videos"
_SHOWN = 10  # maximum number of reasons in an error, and of rows per reason


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        where: Name of its row, for messages.
        question: The text.
        answers: Accepted answers.
        kind: Kind of question.
        sources: Images.
        video_source: Video.
        frames: Number of frames to read from the video.
    """

    where: str
    question: str
    answers: tuple[str, ...]
    kind: str
    sources: tuple[Source, ...] = ()
    video_source: Source | None = None
    frames: int = FRAMES

    @property
    def is_video(self) -> bool:
        return self.video_source is not None

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """The images, read on each access.

        Raises:
            DataError: If an image cannot be read.
        """
        return self.load_images(None)

    def load_images(self, processor: Any) -> tuple[Image.Image, ...]:
        """Read the images for a processor. See `read_image`.

        Raises:
            DataError: If an image cannot be read.
        """
        try:
            return tuple(read_image(source, processor) for source in self.sources)
        except RowError as error:
            raise DataError(f"{self.where}: {error}") from error

    def load_files(self) -> tuple[Image.Image | bytes, ...]:
        """Read the images as clients send them: the content of JPEG files, and other images decoded.

        Raises:
            DataError: If an image cannot be read.
        """
        try:
            return tuple(read_jpeg(source) or read_image(source) for source in self.sources)
        except RowError as error:
            raise DataError(f"{self.where}: {error}") from error

    @property
    def video(self) -> list[Image.Image]:
        """Evenly spaced frames of the video, read on each access. Empty without a video.

        Raises:
            DataError: If the video cannot be read.
        """
        if self.video_source is None:
            return []
        try:
            return read_video(self.video_source, self.frames)
        except RowError as error:
            raise DataError(f"{self.where}: {error}") from error


@dataclass(frozen=True)
class Data:
    """Questions of one file.

    Attributes:
        name: Name of the file.
        questions: Valid questions.
        skipped: Skipped rows, as "line 3: reason".
        notes: Notes for the user.
    """

    name: str
    questions: list[Question]
    skipped: list[str]
    notes: tuple[str, ...] = ()

    def about(self) -> dict[str, Any]:
        """Return name, size and digest of these questions as plain values."""
        parts: list[tuple] = []
        for question in self.questions:
            files = [
                (source.name, source.size) for source in (*question.sources, *filter(None, [question.video_source]))
            ]
            parts.append(
                (
                    question.question,
                    question.answers,
                    question.kind,
                    question.frames if question.video_source else 0,
                    files,
                )
            )
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

    Args:
        path: A file (JSON lines, .json with a list, .csv, .tsv or .parquet), a folder with one file of JSON lines, or a
            folder of the `datasets` library. Image paths are relative to the folder.
        skip_bad: Skip invalid rows instead of raising.
        columns: New names of columns, by the names in the file. "" drops a column.
        split: Split of a `datasets` folder.
        frames: Number of frames to read from a video.
        limit: Maximum number of rows. 0 for all.

    Raises:
        DataError: If there are invalid rows or no questions. The message lists up to ten rows per reason.
    """
    questions, bad = [], []
    folder, rows = read_rows(path, split)
    for where, row in islice(rows, limit or None):
        try:
            questions.append(_parse_question(where, row, folder, dict(columns or {}), frames))
        except RowError as error:
            bad.append((where, str(error)))
    skipped = [f"{where}: {reason}" for where, reason in bad]
    if bad and not skip_bad:
        count = f"{len(bad)} bad row{'s' if len(bad) > 1 else ''}"
        raise DataError(f"{path} has {count} (--skip-bad skips them): {_format_bad_rows(bad)}")
    if not questions:
        raise _build_empty_error(path, skipped)
    return Data(path.resolve().name, questions, skipped, _describe_animated_images(questions))


def _describe_animated_images(questions: Sequence[Question]) -> tuple[str, ...]:
    """Return a note on animated images. Only their first frame is read."""
    animated = [question.where for question in questions if any(map(is_animated, question.sources))]
    if not animated:
        return ()
    return (
        f"{_format_row_names(animated)}: an animated image is read as its first frame. "
        'Name it "video" to read all frames.',
    )


def _build_empty_error(name: Path | str, skipped: Sequence[str]) -> DataError:
    why = f": all {len(skipped)} rows are bad, {skipped[0]}" if skipped else ""
    return DataError(f"{name} has no questions{why}")


def read_columns(text: str) -> dict[str, str]:
    """Parse "query=question,label=answers,id=".

    Raises:
        DataError: If a target column does not exist.

    Examples:
        >>> read_columns("query=question,label=answers,id=")
        {'query': 'question', 'label': 'answers', 'id': ''}
    """
    renamed = {}
    for part in filter(None, (text_part.strip() for text_part in text.split(","))):
        theirs, equals, ours = (text_part.strip() for text_part in part.partition("="))
        if not equals or (ours and ours not in COLUMNS):
            ours = ", ".join(COLUMNS)
            raise DataError(
                f"--columns {part!r} is not valid. Use THEIRS=OURS with one of {ours}, or THEIRS= to drop a column."
            )
        renamed[theirs] = ours
    return renamed


def find_misfits(questions: Sequence[Question], processor: Any) -> list[tuple[int, str]]:
    """Return (index, reason) of questions that do not fit the processor: videos, or texts with placeholders."""
    no_videos, marks = getattr(processor, "video_processor", None) is None, _list_placeholder_tokens(processor)
    reasons = []
    for index, question in enumerate(questions):
        mark = next((mark for mark in marks if mark in question.question), None)
        if question.is_video and no_videos:
            reasons.append((index, _NO_VIDEO))
        elif mark is not None:
            reasons.append((index, f"its question contains the placeholder {mark!r}; remove it"))
    return reasons


def drop_questions(data: Data, unfit: Sequence[tuple[int, str]]) -> Data:
    """Return the data without the given questions, which are added to the skipped rows in row order.

    Args:
        data: The data.
        unfit: Pairs (index, reason), from `find_misfits` of this module or of a back end.

    Raises:
        DataError: If no question remains.
    """
    reasons = dict(unfit)
    lines = [f"{data.questions[index].where}: {reason}" for index, reason in reasons.items()]
    skipped = sorted([*data.skipped, *lines], key=lambda line: int(line.partition(":")[0].split()[-1]))
    questions = [question for index, question in enumerate(data.questions) if index not in reasons]
    if not questions:
        raise _build_empty_error(data.name, skipped)
    return Data(data.name, questions, skipped, _describe_animated_images(questions))


def check_questions(questions: Iterable[Question], processor: Any) -> None:
    """Check that all questions fit the model's processor.

    Raises:
        DataError: If a question does not fit, see `find_misfits`.
    """
    questions = list(questions)
    raise_for_misfits(questions, find_misfits(questions, processor))


def raise_for_misfits(questions: Sequence[Any], unfit: Sequence[tuple[int, str]]) -> None:
    """Raise DataError if there are unfit questions. The message lists up to ten rows per reason."""
    if unfit:
        bad = [(getattr(questions[index], "where", f"question {index}"), reason) for index, reason in unfit]
        message = f"{len(bad)} of {len(questions)} questions do not fit this model"
        raise DataError(f"{message} (--skip-bad skips them): {_format_bad_rows(bad)}")


def find_refused_images(questions: Sequence[Any], takes: Callable[[Image.Image], Any]) -> list[tuple[int, str]]:
    """Return (index, reason) of the questions with an image size that the processor rejects.

    The narrowest, widest, smallest and largest sizes are tried first. If these pass, all others pass.

    Args:
        questions: Questions with image sources.
        takes: Passes a blank image to the processor, and raises DataError if it is rejected.
    """
    sizes = [_get_image_sizes(question) for question in questions]
    known = set().union(*sizes)
    if not known:
        return []
    orders = (lambda size: size[0] / size[1], lambda size: size[0] * size[1])
    ends = {pick(known, key=order) for order in orders for pick in (min, max)}
    reasons = _find_refused_sizes(ends, takes)
    if reasons:
        reasons |= _find_refused_sizes(known - ends, takes)
    first_refused = (
        (index, next((size for size in sizes_of_question if size in reasons), None))
        for index, sizes_of_question in enumerate(sizes)
    )
    return [(index, f"has an image of {size[0]} x {size[1]}: {reasons[size]}") for index, size in first_refused if size]


def _find_refused_sizes(
    sizes: Iterable[tuple[int, int]], takes: Callable[[Image.Image], Any]
) -> dict[tuple[int, int], str]:
    reasons = {}
    for size in sizes:
        try:
            takes(Image.new("RGB", size))
        except DataError as error:
            cause = str(error.__cause__ or error).splitlines()
            reasons[size] = cause[0] if cause else "the processor rejects it"
    return reasons


def _get_image_sizes(question: Any) -> set[tuple[int, int]]:
    """Return the sizes of a question's image files. Unreadable files are reported by other checks."""
    try:
        return {get_image_size(source) for source in getattr(question, "sources", ()) if isinstance(source, Source)}
    except RowError:
        return set()


def _list_placeholder_tokens(processor: Any) -> list[str]:
    """Return the placeholder tokens of images, videos and audio."""
    kinds = ("image", "video", "audio")
    marks = {getattr(processor, name, None) for name in ("boi_token", *(f"{kind}_token" for kind in kinds))}
    for kind in kinds:
        token_id = getattr(processor, f"{kind}_token_id", None)
        if isinstance(token_id, int):
            marks.add(processor.tokenizer.convert_ids_to_tokens(token_id))
    return sorted(mark for mark in marks if isinstance(mark, str) and mark)


def _format_bad_rows(bad: list[tuple[str, str]]) -> str:
    """Format bad rows, grouped by reason."""
    rows_by_reason: dict[str, list[str]] = {}
    for where, reason in bad:
        rows_by_reason.setdefault(reason, []).append(where)
    return _join_first_messages([f"{_format_row_names(rows)}: {reason}" for reason, rows in rows_by_reason.items()])


def _format_row_names(rows: list[str]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(rows[:_SHOWN]) + more


def _join_first_messages(messages: list[str]) -> str:
    more = f"; and {len(messages) - _SHOWN} more" if len(messages) > _SHOWN else ""
    return "; ".join(messages[:_SHOWN]) + more


def _parse_question(where: str, row: Any, folder: Path, columns: dict[str, str], frames: int) -> Question:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError("not a JSON object")
    row = {columns.get(name, name): value for name, value in row.items() if value is not None}
    row.pop("", None)
    for name in row:
        if name not in COLUMNS:
            close = get_close_matches(name, COLUMNS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known columns are {', '.join(COLUMNS)}"
            raise RowError(f"unknown column {name!r}: {hint} (--columns {name}=OURS renames it, {name}= drops it)")
    media_columns = [name for name in ("image", "images", "video") if name in row]
    if len(media_columns) != 1:
        raise RowError(f"needs one of image, images and video, has {' and '.join(media_columns) or 'none'}")
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise RowError("has no question")
    kind = row.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str):
        raise RowError(f"kind must be a string, not {shorten(kind)}")
    answers = _parse_answers(row)
    value = row[media_columns[0]]
    if "images" in row and not (isinstance(value, list) and value):
        hint = ' (use "image" for one image)' if isinstance(value, (str, dict)) else ""
        raise RowError(f"images must be a list of images{hint}")
    if "image" in row and isinstance(value, list):
        raise RowError('image is a list; use "images" for several images')
    if "video" in row and isinstance(value, list):
        raise RowError("video is a list; use a video file, a GIF, or a folder of frames")
    sources = tuple(find_source(item, folder) for item in (value if "images" in row else [value]))
    for text in (row["question"], kind, *answers, *(source.name for source in sources)):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RowError("contains an unpaired surrogate, which cannot be encoded in UTF-8")
    if "video" in row:
        read_video(sources[0], frames)
        return Question(where, row["question"], answers, kind, (), sources[0], frames)
    for source in sources:
        read_image(source)
    return Question(where, row["question"], answers, kind, sources)


def _parse_answers(row: dict[str, Any]) -> tuple[str, ...]:
    if ("answer" in row) == ("answers" in row):
        raise RowError("needs either answer or answers")
    answers = row["answers"] if "answers" in row else [row["answer"]]
    valid = isinstance(answers, list) and answers
    if not valid or not all(isinstance(answer, str) or _is_number(answer) for answer in answers):
        raise RowError(f"answers must be strings or numbers, not {shorten(answers)}")
    # Tables turn a column of integers with a gap into floats: 2.0 means 2.
    texts = tuple(
        str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer) for answer in answers
    )
    if not any(text.strip() for text in texts):
        raise RowError("has an empty answer")
    return texts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
