# SPDX-License-Identifier: Apache-2.0
"""The fixed held-out sets: drawn images that ship with the package, with questions of several kinds.

`FOLDER` holds images of 224 x 224 pixels (of `demo_vlm`), `NATIVE` images of 112 to 448 pixels a side (of `demo_qwen`
and `demo_video`), `SMOL` images of 336 x 336 pixels (of `demo_smol`), more than half of them with photographs.
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
    """Return the folder of the set that belongs to a model, by its name; None: the default model."""
    return {"demo_qwen": NATIVE, "demo_video": NATIVE, "demo_smol": SMOL}.get(model or "", FOLDER)


@dataclass(frozen=True)
class Example:
    """One question about one held-out image; ``boxes`` are the pixels (left, top, right, bottom) of the evidence."""

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
        """The boxes that hold the evidence, as in `DrawnQuestion.looks`."""
        return tuple(((0, box),) for box in self.boxes)

    @property
    def is_video(self) -> bool:
        return False

    def is_right(self, generated: str) -> bool:
        """Return True if generated text (special tokens removed) is the answer and nothing else."""
        return generated.strip().lower() == self.answer


def load_heldout(
    kinds: Collection[str] | None = None, limit: int | None = None, folder: str | Path = FOLDER
) -> list[Example]:
    """Return the examples of the given kinds (default: all) on the first ``limit`` images, image by image."""
    folder, examples = Path(folder), []
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[:limit]):
        row = json.loads(line)
        for asked in row["questions"]:
            if kinds is None or asked["kind"] in kinds:
                boxes = tuple(tuple(box) for box in asked["boxes"])
                examples.append(
                    Example(
                        number,
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
    """Return the examples of so many images (0: all), image by image, with each kind of question as often as may be.

    The next image is always the first one that asks about the kind that was asked about least so far.
    """
    rest: dict[int, list[Example]] = {}
    for example in load_heldout(folder=folder):
        rest.setdefault(example.index, []).append(example)
    asked = Counter(dict.fromkeys((one.kind for examples in rest.values() for one in examples), 0))
    taken: list[Example] = []
    for _ in range(min(images, len(rest)) or len(rest)):
        kinds = {one.kind for examples in rest.values() for one in examples}
        least = min(kinds, key=lambda kind: (asked[kind], kind))
        number = next(number for number, examples in rest.items() if any(one.kind == least for one in examples))
        asked.update(one.kind for one in rest[number])
        taken += rest.pop(number)
    return sorted(taken, key=lambda one: one.index)
