# SPDX-License-Identifier: Apache-2.0
"""Questions of a run with the kept tokens of each method: the format of the folder `samples`, and its reader.

samples.json names small WebP images in the same folder. drawing.py writes both.
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
_AGAIN = "Run the same `tokenprune bench` command with `--samples 4` to draw some. Answers are not generated again."
_MAX_PIXELS, _MAX_BYTES = 2**24, 2**22


@dataclass(frozen=True)
class QuestionImage:
    """An image of the page.

    Attributes:
        uri: The image as a data: URI.
        width: Width in pixels.
        height: Height in pixels.
    """

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class DrawnAnswer:
    """Result of one method on a question.

    Attributes:
        method: Name of the method.
        prediction: The answer.
        score: Score of the answer.
        kept: Visual tokens after pruning.
        image: Image with the kept patches, or None.
        note: Reason for a missing image.
    """

    method: str
    prediction: str
    score: float
    kept: int | None
    image: QuestionImage | None
    note: str


@dataclass(frozen=True)
class Sample:
    """A question with the results of all methods.

    Attributes:
        number: Index of the question in the run.
        kind: Kind of question.
        text: The question.
        answers: Correct answers.
        tokens: Visual tokens of the unpatched model.
        prediction: Answer of the unpatched model.
        score: Score of the unpatched model.
        image: Image as the unpatched model sees it.
        note: Reason for a missing image.
        drawn: Results of the methods.
    """

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
        """True if the drawings are wide (frames side by side)."""
        images = (self.image, *(answer.image for answer in self.drawn))
        return any(image.width > 2 * image.height for image in images if image)


@dataclass(frozen=True)
class Samples:
    """Drawn questions of a run.

    Attributes:
        keep: Keep of the drawn methods.
        how: How the questions were chosen.
        items: The questions.
        missing: Reason if there are no questions.
    """

    keep: float = 1.0
    how: str = ""
    items: tuple[Sample, ...] = field(default=())
    missing: str = ""


NOT_KEPT = Samples(missing="Images are drawn only for runs with a folder: `tokenprune bench --run DIR`.")


def read_samples(run: Path) -> Samples:
    """Read the samples of a run. If they are missing or damaged, `missing` has the reason."""
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
    image, note = _read_image(folder, entry)
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
        drawn=tuple(_read_drawn_answer(folder, method) for method in entry["methods"]),
    )


def _read_drawn_answer(folder: Path, entry: Mapping[str, Any]) -> DrawnAnswer:
    image, note = _read_image(folder, entry)
    return DrawnAnswer(
        str(entry["method"]), str(entry["prediction"]), float(entry["score"]), _count(entry["kept"]), image, note
    )


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _read_image(folder: Path, entry: Mapping[str, Any]) -> tuple[QuestionImage | None, str]:
    """Return the image of an entry, and a note."""
    name, note = entry["image"], str(entry["note"])
    if name is None:
        return None, note
    # The folder is untrusted: accept only small images inside it.
    if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".webp":
        return None, "this image has an invalid file name"
    try:
        data = (folder / name).read_bytes()
        if len(data) > _MAX_BYTES:
            return None, "this image is too large"
        with Image.open(io.BytesIO(data), formats=["WEBP"]) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None, "this image is too large"
            image.load()
            size = image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None, "this image cannot be read"
    return QuestionImage(f"data:image/webp;base64,{base64.b64encode(data).decode()}", *size), note
