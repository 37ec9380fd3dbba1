# SPDX-License-Identifier: Apache-2.0
"""Example images and a drawn video, with questions and correct answers."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenprune_bench.demo_package import import_demo

IMAGES = 6  # number of held-out images to search for questions of different kinds


@dataclass(frozen=True)
class PageExample:
    """A file with a question. `video` is True for a video."""

    file: Path
    question: str
    video: bool = False


@dataclass
class Examples:
    """Examples of a page, images first, and the correct answers to the questions about their files."""

    listed: list[PageExample] = field(default_factory=list)
    _answers: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def load(cls, model: str, folder: Path) -> Examples:
        """Return the examples of a model. Empty without tokenprune-demo.

        Args:
            model: Name of the model.
            folder: Folder for the drawn video.
        """
        examples = cls()
        if importlib.util.find_spec("tokenprune_demo") is None:
            return examples
        heldout, kinds = import_demo("heldout"), set()
        for example in heldout.load_heldout(folder=heldout.get_heldout_folder(model), limit=IMAGES):
            examples._add_answer(example.path, example)
            if example.kind not in kinds and all(example.path != other.file for other in examples.listed):
                kinds.add(example.kind)
                examples.listed.append(PageExample(example.path, example.question))
        video = next(
            example
            for example in import_demo("drawn_sets").draw_set("small-videos", 1).questions
            if example.kind == "change"
        )
        file = folder / "drawn.gif"
        video.frames[0].save(file, save_all=True, append_images=list(video.frames[1:]), duration=400, loop=0)
        examples._add_answer(file, video)
        examples.listed.append(PageExample(file, video.question, video=True))
        return examples

    def find_answer(self, file: str | Path, question: str) -> str | None:
        """Return the correct answer to a question about a file, or None. The file is identified by its content."""
        return self._answers.get((_digest(Path(file)), question.strip()))

    def find_number(self, file: str | Path) -> int | None:
        """Return the number of an example file, from 1, or None for a user's file."""
        digest = _digest(Path(file))
        return next((index for index, example in enumerate(self.listed, 1) if _digest(example.file) == digest), None)

    def list_supported(self, video: bool) -> list[PageExample]:
        """Return the examples that a model supports. `video` is True for models with video input."""
        return [example for example in self.listed if video or not example.video]

    def _add_answer(self, file: Path, question: Any) -> None:
        self._answers[_digest(file), question.question] = question.answers[0]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
