# SPDX-License-Identifier: Apache-2.0
"""Questions of a run with what each method kept of their images: the folder `samples`, as it is laid out and read.

samples.json names the images beside it, all of which are small WebP files. drawing.py writes it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

FOLDER, FILE, SCHEMA = "samples", "samples.json", 1
_AGAIN = "The same `tokenprune bench` command with `--samples 4` draws some; nothing is asked anew for the tables."
_MOST_PIXELS, _MOST_BYTES = 2**24, 2**22


@dataclass(frozen=True)
class QuestionImage:
    """uri: the image itself, as a data: URI. width, height: in pixels."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class DrawnAnswer:
    """The result of one method on the question. image: with its kept patches, None where `note` says why not. kept: its
    visual tokens after pruning. score: of the answer that the run counted."""

    method: str
    prediction: str
    score: float
    kept: int | None
    image: QuestionImage | None
    note: str


@dataclass(frozen=True)
class Sample:
    """A question. number: its place in the run. tokens: visual tokens of the unpatched model."""

    number: int
    kind: str
    text: str
    answers: tuple[str, ...]
    tokens: int | None
    prediction: str
    score: float
    image: QuestionImage | None
    note: str
    drawn: tuple[DrawnAnswer, ...]

    @property
    def is_strip(self) -> bool:
        """Return True if its drawings are wide: frames side by side."""
        images = (self.image, *(one.image for one in self.drawn))
        return any(image.width > 2 * image.height for image in images if image)


@dataclass(frozen=True)
class Samples:
    """keep: at which the methods ran. how: the questions were chosen. missing: why there are none."""

    keep: float = 1.0
    how: str = ""
    items: tuple[Sample, ...] = field(default=())
    missing: str = ""


NOT_KEPT = Samples(missing="Images are drawn for runs that are kept in a folder: `tokenprune bench --run DIR`.")


def read_samples(run: Path) -> Samples:
    """Read the samples of a run's folder; where there are none, or they are damaged, `missing` says so."""
    folder = run / FOLDER
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            return Samples(missing=f"The drawn samples have schema {data['schema']}, not {SCHEMA}. {_AGAIN}")
        items = tuple(_sample(folder, entry) for entry in data["samples"])
        missing = "" if items else f"No question was drawn. {_AGAIN}"
        return Samples(float(data["keep"]), str(data["how"]), items, missing)
    except FileNotFoundError:
        return Samples(missing=f"This run has no drawn samples. {_AGAIN}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Samples(missing=f"The drawn samples are damaged ({type(error).__name__}). {_AGAIN}")


def _sample(folder: Path, entry: Mapping[str, Any]) -> Sample:
    image, note = _image(folder, entry)
    return Sample(
        number=int(entry["question"]),
        kind=str(entry["kind"]),
        text=str(entry["text"]),
        answers=tuple(map(str, entry["answers"])),
        tokens=_count(entry["tokens"]),
        prediction=str(entry["prediction"]),
        score=float(entry["score"]),
        image=image,
        note=note,
        drawn=tuple(_drawn(folder, one) for one in entry["methods"]),
    )


def _drawn(folder: Path, entry: Mapping[str, Any]) -> DrawnAnswer:
    image, note = _image(folder, entry)
    return DrawnAnswer(
        str(entry["method"]), str(entry["prediction"]), float(entry["score"]), _count(entry["kept"]), image, note
    )


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _image(folder: Path, entry: Mapping[str, Any]) -> tuple[QuestionImage | None, str]:
    """Return the image that an entry names, and the words to show in its place or below it."""
    name, note = entry["image"], str(entry["note"])
    if name is None:
        return None, note
    # The folder may come from anybody: no file outside it, and nothing that is no small image.
    if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".webp":
        return None, "this image has a name that none of ours has"
    try:
        data = (folder / name).read_bytes()
        if len(data) > _MOST_BYTES:
            return None, "this image is too large to be one of ours"
        with Image.open(io.BytesIO(data), formats=["WEBP"]) as image:
            if image.width * image.height > _MOST_PIXELS:
                return None, "this image is too large to be one of ours"
            image.load()
            size = image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None, "this image cannot be read"
    return QuestionImage(f"data:image/webp;base64,{base64.b64encode(data).decode()}", *size), note
