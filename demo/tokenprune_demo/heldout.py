# SPDX-License-Identifier: Apache-2.0
"""Fixed held-out sets of drawn images, shipped with the package, with questions of several kinds.

`FOLDER` has images of 224 x 224 pixels (for `demo_vlm`), `NATIVE` images of 112 to 448 pixels per side (for `demo_qwen`
and `demo_video`), and `SMOL` images of 336 x 336 pixels (for `demo_smol`), more than half of them with photographs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).resolve().parent / "heldout"
NATIVE = FOLDER.with_name("heldout_native")
SMOL = FOLDER.with_name("heldout_smol")

Box = tuple[int, int, int, int]


@lru_cache(maxsize=256)
def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def get_heldout_folder(model: str | None) -> Path:
    """Return the folder of a model's set by the model's name. None selects the default model."""
    return {"demo_qwen": NATIVE, "demo_video": NATIVE, "demo_smol": SMOL}.get(model or "", FOLDER)


@dataclass(frozen=True)
class Example:
    """One question about one held-out image.

    Attributes:
        index: Index of the image.
        path: Image file.
        background: Kind of background.
        kind: Kind of question.
        question: The text.
        answer: The answer.
        boxes: Boxes (left, top, right, bottom) of the evidence in pixels.
    """

    index: int
    path: Path
    background: str
    kind: str
    question: str
    answer: str
    boxes: tuple[Box, ...]

    @property
    def image(self) -> Image.Image:
        return _open(self.path)

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return (self.image,)

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.answer,)

    @property
    def looks(self) -> tuple[tuple[tuple[int, Box], ...], ...]:
        """The evidence as in `DrawnQuestion.looks`."""
        return tuple(((0, box),) for box in self.boxes)

    @property
    def is_video(self) -> bool:
        return False

    def is_right(self, generated: str) -> bool:
        """Return True if the generated text (without special tokens) is exactly the answer."""
        return generated.strip().lower() == self.answer


def load_heldout(
    kinds: Collection[str] | None = None, limit: int | None = None, folder: str | Path = FOLDER
) -> list[Example]:
    """Return the examples of the given kinds (default all) on the first `limit` images, image by image."""
    folder, examples = Path(folder), []
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines[:limit]):
        row = json.loads(line)
        for asked in row["questions"]:
            if kinds is None or asked["kind"] in kinds:
                boxes = tuple(tuple(box) for box in asked["boxes"])
                examples.append(
                    Example(
                        index,
                        folder / row.get("image", row.get("picture")),
                        row["background"],
                        asked["kind"],
                        asked["question"],
                        asked["answer"],
                        boxes,
                    )
                )
    return examples


def load_sample(images: int, folder: str | Path = FOLDER) -> list[Example]:
    """Return the examples of `images` images (0 for all) with balanced kinds of question.

    Images are added greedily: the next image is the first one with a question of the kind that is rarest so far.
    """
    rest: dict[int, list[Example]] = {}
    for example in load_heldout(folder=folder):
        rest.setdefault(example.index, []).append(example)
    asked = Counter(dict.fromkeys((example.kind for examples in rest.values() for example in examples), 0))
    taken: list[Example] = []
    for _ in range(min(images, len(rest)) or len(rest)):
        kinds = {example.kind for examples in rest.values() for example in examples}
        rarest = min(kinds, key=lambda kind: (asked[kind], kind))
        index = next(index for index, examples in rest.items() if any(example.kind == rarest for example in examples))
        asked.update(example.kind for example in rest[index])
        taken += rest.pop(index)
    return sorted(taken, key=lambda example: example.index)
