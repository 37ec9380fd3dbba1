# SPDX-License-Identifier: Apache-2.0
"""Drawn images, and a drawn video, with questions whose answers are known."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenprune_bench.demo_package import import_demo

IMAGES = 6  # of the held-out set, of which those with a question of another kind are taken


@dataclass(frozen=True)
class PageExample:
    """A file with a question. video: whether it is one."""

    file: Path
    question: str
    video: bool = False


@dataclass
class Examples:
    """The examples of a page, images first, and the right answers to questions about their files."""

    listed: list[PageExample] = field(default_factory=list)
    _answers: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str, folder: Path) -> Examples:
        """Return the examples of a model, by its name; none without tokenprune-demo. folder: for a drawn video."""
        found = cls()
        if importlib.util.find_spec("tokenprune_demo") is None:
            return found
        heldout, kinds = import_demo("heldout"), set()
        for one in heldout.load_heldout(folder=heldout.get_heldout_folder(model), limit=IMAGES):
            found._know(one.path, one)
            if one.kind not in kinds and all(one.path != other.file for other in found.listed):
                kinds.add(one.kind)
                found.listed.append(PageExample(one.path, one.question))
        video = next(
            one for one in import_demo("drawn_sets").draw_set("small-videos", 1).questions if one.kind == "change"
        )
        file = folder / "drawn.gif"
        video.frames[0].save(file, save_all=True, append_images=list(video.frames[1:]), duration=400, loop=0)
        found._know(file, video)
        found.listed.append(PageExample(file, video.question, video=True))
        return found

    def answer(self, file: str | Path, question: str) -> str | None:
        """Return the right answer to a question about a file, known by its content; None where it is not known."""
        return self._answers.get((_digest(Path(file)), question.strip()))

    def number(self, file: str | Path) -> int | None:
        """Return the number of the example that a file is, from 1; None: it is the user's own."""
        digest = _digest(Path(file))
        return next((number for number, one in enumerate(self.listed, 1) if _digest(one.file) == digest), None)

    def shown(self, video: bool) -> list[PageExample]:
        """Return the examples for a model. video: whether it takes videos."""
        return [one for one in self.listed if video or not one.video]

    def _know(self, file: Path, asked: Any) -> None:
        self._answers[_digest(file), asked.question] = asked.answers[0]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
