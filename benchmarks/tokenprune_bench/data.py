# SPDX-License-Identifier: Apache-2.0
"""Questions of one's own, from the rows of files (rows.py) with their images and videos (media.py).

A row is {image | images | video, question, answer | answers, kind?}. Everything is checked before any model runs.
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
    read_video,
    shorten,
)
from tokenprune_bench.rows import read_rows

COLUMNS = ("image", "images", "video", "question", "answer", "answers", "kind")
DEFAULT_KIND = "all"
FRAMES = 8
_NO_VIDEO = "asks about a video, and this model takes none"
_SHOWN = 10  # bad rows named in an error, for each reason; and reasons


@dataclass(frozen=True)
class Question:
    """One question. where: its row, for messages. answers: those that are accepted. frames: taken of a video."""

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
        """The images, read anew; raises DataError."""
        try:
            return tuple(map(read_image, self.sources))
        except RowError as error:
            raise DataError(f"{self.where}: {error}") from error

    @property
    def video(self) -> list[Image.Image]:
        """Frames of the video, evenly chosen, read anew; none without a video. Raises DataError."""
        if self.video_source is None:
            return []
        try:
            return read_video(self.video_source, self.frames)
        except RowError as error:
            raise DataError(f"{self.where}: {error}") from error


@dataclass(frozen=True)
class Data:
    """Questions, the name of their file, the rows that were left out, as "line 3: why", and notes for the user."""

    name: str
    questions: list[Question]
    skipped: list[str]
    notes: tuple[str, ...] = ()

    def about(self) -> dict[str, Any]:
        """Return what tells these questions from others, as plain values."""
        parts: list[tuple] = []
        for one in self.questions:
            files = [(source.name, source.size) for source in (*one.sources, *filter(None, [one.video_source]))]
            parts.append((one.question, one.answers, one.kind, one.frames if one.video_source else 0, files))
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

    path: a file of JSON lines, a list in a .json, .csv, .tsv or .parquet; a folder with one file of JSON lines; or a
    folder of the `datasets` library (`save_to_disk`, or images with a metadata file). Images are named relative to
    the folder. skip_bad: leave out rows that cannot be asked
    instead of raising. columns: names to change, from theirs to ours; "" drops a column. split: of a `datasets` folder
    with several. frames: taken of a video. limit: only the first rows; 0: all.
    Raises DataError, which names up to ten bad rows for each reason, or says that there are none at all.
    """
    questions, bad = [], []
    folder, rows = read_rows(path, split)
    for where, row in islice(rows, limit or None):
        try:
            questions.append(_question(where, row, folder, dict(columns or {}), frames))
        except RowError as error:
            bad.append((where, str(error)))
    skipped = [f"{where}: {reason}" for where, reason in bad]
    if bad and not skip_bad:
        count = f"{len(bad)} bad row{'s' if len(bad) > 1 else ''}"
        raise DataError(f"{path} has {count} (--skip-bad leaves them out): {_alike(bad)}")
    if not questions:
        raise _nothing_left(path, skipped)
    return Data(path.resolve().name, questions, skipped, _notes(questions))


def _notes(questions: Sequence[Question]) -> tuple[str, ...]:
    """Say which rows hold an animated image, of which only the first frame is asked about."""
    animated = [one.where for one in questions if any(map(is_animated, one.sources))]
    if not animated:
        return ()
    return (f'{_named(animated)}: an animated image is read as its first frame. Name it "video" to read all frames.',)


def _nothing_left(name: Path | str, skipped: Sequence[str]) -> DataError:
    why = f": all {len(skipped)} rows are bad, {skipped[0]}" if skipped else ""
    return DataError(f"{name} holds no questions{why}")


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


def find_misfits(questions: Sequence[Question], processor: Any) -> list[tuple[int, str]]:
    """Return the places of the questions that do not fit the model's processor, each with the reason: a video where it
    takes none, or words in a question that it takes for an image."""
    no_videos, marks = getattr(processor, "video_processor", None) is None, _marks(processor)
    found = []
    for place, one in enumerate(questions):
        mark = next((mark for mark in marks if mark in one.question), None)
        if one.is_video and no_videos:
            found.append((place, _NO_VIDEO))
        elif mark is not None:
            found.append((place, f"its question holds {mark!r}, which stands for an image in prompts: take it out"))
    return found


def drop_questions(data: Data, unfit: Sequence[tuple[int, str]]) -> Data:
    """Return the data without the questions at these places, which are listed among those skipped, in the rows' order.

    unfit: of `misfits` or of a benchmark's backend. Raises DataError where no question is left.
    """
    gone = dict(unfit)
    said = [f"{data.questions[place].where}: {reason}" for place, reason in gone.items()]
    skipped = sorted([*data.skipped, *said], key=lambda line: int(line.partition(":")[0].split()[-1]))
    questions = [one for place, one in enumerate(data.questions) if place not in gone]
    if not questions:
        raise _nothing_left(data.name, skipped)
    return Data(data.name, questions, skipped, _notes(questions))


def check_questions(questions: Iterable[Question], processor: Any) -> None:
    """Raise DataError where questions do not fit the model's processor; see `misfits`."""
    questions = list(questions)
    raise_for_misfits(questions, find_misfits(questions, processor))


def raise_for_misfits(questions: Sequence[Any], unfit: Sequence[tuple[int, str]]) -> None:
    """Raise DataError for the questions at these places, if any, which names up to ten rows for each reason."""
    if unfit:
        bad = [(getattr(questions[place], "where", f"question {place}"), reason) for place, reason in unfit]
        asked = f"{len(bad)} of {len(questions)} questions cannot be asked of this model"
        raise DataError(f"{asked} (--skip-bad leaves such rows out): {_alike(bad)}")


def find_refused_images(questions: Sequence[Any], takes: Callable[[Image.Image], Any]) -> list[tuple[int, str]]:
    """Return the places of the questions with an image of a size that the model's processor refuses, with its reason.

    takes: hands a blank image to the processor, and raises DataError. The narrowest, widest, smallest and largest are
    tried first: where these pass, so do the others.
    """
    sizes = [_sizes(one) for one in questions]
    known = set().union(*sizes)
    if not known:
        return []
    orders = (lambda size: size[0] / size[1], lambda size: size[0] * size[1])
    ends = {pick(known, key=order) for order in orders for pick in (min, max)}
    reasons = _refused(ends, takes)
    if reasons:
        reasons |= _refused(known - ends, takes)
    found = ((place, next((size for size in mine if size in reasons), None)) for place, mine in enumerate(sizes))
    return [(place, f"has an image of {size[0]} x {size[1]}: {reasons[size]}") for place, size in found if size]


def _refused(sizes: Iterable[tuple[int, int]], takes: Callable[[Image.Image], Any]) -> dict[tuple[int, int], str]:
    reasons = {}
    for size in sizes:
        try:
            takes(Image.new("RGB", size))
        except DataError as error:
            cause = str(error.__cause__ or error).splitlines()
            reasons[size] = cause[0] if cause else "the processor refuses it"
    return reasons


def _sizes(question: Any) -> set[tuple[int, int]]:
    """Return the sizes of a question's images in files; what cannot be read is said where it is read."""
    try:
        return {get_image_size(one) for one in getattr(question, "sources", ()) if isinstance(one, Source)}
    except RowError:
        return set()


def _marks(processor: Any) -> list[str]:
    """Return the placeholders of images, videos and sounds in prompts."""
    kinds = ("image", "video", "audio")
    marks = {getattr(processor, name, None) for name in ("boi_token", *(f"{kind}_token" for kind in kinds))}
    for kind in kinds:
        number = getattr(processor, f"{kind}_token_id", None)
        if isinstance(number, int):
            marks.add(processor.tokenizer.convert_ids_to_tokens(number))
    return sorted(mark for mark in marks if isinstance(mark, str) and mark)


def _alike(bad: list[tuple[str, str]]) -> str:
    """Rows that are bad for one reason are reported together."""
    places: dict[str, list[str]] = {}
    for where, reason in bad:
        places.setdefault(reason, []).append(where)
    return _first([f"{_named(rows)}: {reason}" for reason, rows in places.items()])


def _named(rows: list[str]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(rows[:_SHOWN]) + more


def _first(said: list[str]) -> str:
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return "; ".join(said[:_SHOWN]) + more


def _question(where: str, row: Any, folder: Path, columns: dict[str, str], frames: int) -> Question:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError("no JSON object")
    row = {columns.get(name, name): value for name, value in row.items() if value is not None}
    row.pop("", None)
    for name in row:
        if name not in COLUMNS:
            close = get_close_matches(name, COLUMNS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"a row has {', '.join(COLUMNS)}"
            raise RowError(f"unknown column {name!r}: {hint} (--columns {name}=OURS renames it, {name}= drops it)")
    seen = [name for name in ("image", "images", "video") if name in row]
    if len(seen) != 1:
        raise RowError(f"needs one of image, images and video, has {' and '.join(seen) or 'none'}")
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise RowError("has no question")
    kind = row.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str):
        raise RowError(f"kind must be a text, not {shorten(kind)}")
    answers = _answers(row)
    value = row[seen[0]]
    if "images" in row and not (isinstance(value, list) and value):
        hint = ' (one image: write "image")' if isinstance(value, (str, dict)) else ""
        raise RowError(f"images must be a list of images{hint}")
    if "image" in row and isinstance(value, list):
        raise RowError('image holds a list: write "images" for several images')
    if "video" in row and isinstance(value, list):
        raise RowError("video holds a list: name a video file, a GIF, or a folder of frames")
    sources = tuple(find_source(one, folder) for one in (value if "images" in row else [value]))
    for text in (row["question"], kind, *answers, *(source.name for source in sources)):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RowError("holds half of a letter (a surrogate), which cannot be written in UTF-8")
    if "video" in row:
        read_video(sources[0], frames)
        return Question(where, row["question"], answers, kind, (), sources[0], frames)
    for source in sources:
        read_image(source)
    return Question(where, row["question"], answers, kind, sources)


def _answers(row: dict[str, Any]) -> tuple[str, ...]:
    if ("answer" in row) == ("answers" in row):
        raise RowError("needs either answer or answers")
    answers = row["answers"] if "answers" in row else [row["answer"]]
    valid = isinstance(answers, list) and answers
    if not valid or not all(isinstance(one, str) or _is_number(one) for one in answers):
        raise RowError(f"answers must be texts or numbers, not {shorten(answers)}")
    # 2.0 is what tables make of a column of whole numbers with a gap.
    texts = tuple(str(int(one)) if isinstance(one, float) and one.is_integer() else str(one) for one in answers)
    if not any(text.strip() for text in texts):
        raise RowError("has an empty answer")
    return texts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
