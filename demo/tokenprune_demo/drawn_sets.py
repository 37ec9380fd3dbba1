# SPDX-License-Identifier: Apache-2.0
"""Held-out question sets that are drawn on demand: videos, prompts of six images, documents, and pages.

Their seeds are far from the training seeds, they contain no photographs, and the answers of a kind are balanced. Two
machines draw equal pixels with equal versions of NumPy and Pillow; the digest in the header of a run shows whether they
did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image

from tokenprune_demo.drawn_documents import DOCUMENT_KINDS, LAYOUTS, draw_document, get_document_answers
from tokenprune_demo.drawn_pages import PAGE_LAYOUTS, PAGE_SIZES, draw_pages
from tokenprune_demo.drawn_videos import (
    ANSWERS,
    CHANCE,
    CHANCE_SHUFFLED,
    GROUNDS,
    TIMED,
    VIDEO_KINDS,
    DrawnQuestion,
    Region,
    draw_video,
)
from tokenprune_demo.drawn_views import CAMERAS, VIEW_KINDS, draw_views, get_view_answers

SEED = 20260102
SETS = ("images", "videos", "small-videos", "views", "documents", "pages")
MAX_EXAMPLES = 96  # videos, prompts or documents of the full set
_MAX_PAGES = 75  # prompts of the full set of pages
_GROUPS = {"still": "still ground", "noisy": "noisy ground", "pan": "panning ground", "cut": "with a cut"} | {
    layout: f"{layout}s" for layout in (*LAYOUTS, *PAGE_LAYOUTS)
}
_SIZES = ((224, 224), (224, 160), (160, 224), (192, 192))  # 16 videos cover every ground in every size
_SMALL = ((144, 144),)  # the largest size that demo_qwen was trained on, with room for eight questions
_VIDEOS = {"videos": (0, _SIZES), "small-videos": (5, _SMALL)}  # number in the seed, and sizes
_PAPER = ((448, 448), (336, 448), (448, 336), (320, 448), (448, 288))  # multiples of 16 pixels (one visual token)


@dataclass(frozen=True, eq=False)
class DrawnExample:
    """One question of a drawn set.

    Attributes:
        index: Index of its video or prompt.
        kind: Kind of question.
        question: The text.
        answer: The answer.
        looks: Evidence, see `DrawnQuestion`.
        frames: Frames of a video.
        images: Images of a prompt.
        labels: Text before each image.
        ground: Ground of a video, or layout of a document.
    """

    index: int
    kind: str
    question: str
    answer: str
    looks: tuple[tuple[Region, ...], ...]
    frames: tuple[Image.Image, ...] = ()
    images: tuple[Image.Image, ...] = ()
    labels: tuple[str, ...] = ()
    ground: str = ""

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.answer,)

    @property
    def is_video(self) -> bool:
        return bool(self.frames)

    @property
    def sources(self) -> tuple[Image.Image, ...]:
        """Images of the question, in memory."""
        return self.images

    @property
    def video(self) -> list[Image.Image]:
        return list(self.frames)

    @property
    def where(self) -> str:
        return f"drawn {'video' if self.is_video else self.ground or 'prompt'} {self.index}"


@dataclass(frozen=True)
class Control:
    """Questions with incomplete input for the unpatched model, which must score at chance level.

    Attributes:
        name: Name of the control.
        questions: The questions.
        chance: Chance level of each kind that must fail.
    """

    name: str
    questions: list[DrawnExample]
    chance: dict[str, float]


@dataclass(frozen=True)
class DrawnSet:
    """A question set for a benchmark.

    Attributes:
        name: Name of the set.
        questions: All questions.
        kinds: Kinds of question.
        controls: Controls of the set.
        options: Options of methods whose defaults do not fit the set.
    """

    name: str
    questions: list[DrawnExample]
    kinds: tuple[str, ...]
    controls: list[Control] = field(default_factory=list)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def groups(self) -> list[str]:
        """Group of each question (its ground or layout). Empty if the set has no groups."""
        return [_GROUPS[question.ground] for question in self.questions if question.ground]

    def first(self, limit: int) -> DrawnSet:
        """Return the set with the first `limit` questions. 0 for all."""
        if not limit:
            return self
        questions = self.questions[:limit]
        kinds = tuple(kind for kind in self.kinds if any(question.kind == kind for question in questions))
        controls = [
            Control(
                control.name,
                control.questions[:limit],
                {kind: control.chance[kind] for kind in kinds if kind in control.chance},
            )
            for control in self.controls
        ]
        return replace(self, questions=questions, kinds=kinds, controls=controls)

    def about(self) -> dict[str, Any]:
        """Return name, size and digest of these questions as plain values."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(f"{question.question}\n{question.answer}\n".encode())
        for images in {question.index: question.frames or question.images for question in self.questions}.values():
            for image in images:
                digest.update(image.tobytes())
        description = {"name": f"drawn {self.name.replace('-', ' ')}", "questions": len(self.questions), "skipped": []}
        return description | {"digest": digest.hexdigest()[:16]}


def draw_set(name: str, limit: int) -> DrawnSet:
    """Draw one of the `SETS` except "images".

    Args:
        name: Name of the set.
        limit: Number of videos, prompts or documents, each with one question of every kind. 0 for all.
    """
    count = min(limit or MAX_EXAMPLES, MAX_EXAMPLES)
    if name in _VIDEOS:
        return _build_video_set(name, count)
    return {"views": _build_view_set, "documents": _build_document_set, "pages": _build_page_set}[name](count)


def freeze_first_frame(question: DrawnExample) -> DrawnExample:
    """Return the question with a video that repeats its first frame."""
    return replace(question, frames=question.frames[:1] * len(question.frames))


def shuffle_frames(question: DrawnExample) -> DrawnExample:
    """Return the question with shuffled frames, in the same order for all questions of a video."""
    order = np.random.default_rng((SEED, 2, question.index)).permutation(len(question.frames))
    return replace(question, frames=tuple(question.frames[index] for index in order))


def _build_video_set(name: str, count: int) -> DrawnSet:
    decks, (part, sizes) = _build_decks(dict(ANSWERS), count), _VIDEOS[name]
    questions = []
    for index in range(count):
        size = sizes[(index + index // len(GROUNDS)) % len(sizes)]
        requested = {kind: deck[index] for kind, deck in decks.items()}

        def draw(
            seed: tuple[int, ...],
            size: tuple[int, int] = size,
            ground: str = GROUNDS[index % len(GROUNDS)],
            requested: dict[str, str] = requested,
        ) -> Any:
            return draw_video(np.random.default_rng(seed), size, ground, answers=requested)

        video, asked = _draw_complete(draw, (SEED, part, index), VIDEO_KINDS)
        frames = tuple(video.frames)
        questions += [_build_example(index, question, frames=frames, ground=video.ground) for question in asked]
    controls = [
        Control(
            "first frame only",
            [freeze_first_frame(question) for question in questions],
            {kind: CHANCE[kind] for kind in VIDEO_KINDS if kind != "still"},
        ),
        Control(
            "shuffled frames",
            [shuffle_frames(question) for question in questions],
            {kind: CHANCE_SHUFFLED[kind] for kind in TIMED},
        ),
    ]
    # Eight frames give four or eight decoder frames, far fewer than the default blocks.
    blocks = {"sink_frames": 1, "block_frames": 1, "min_frames": 2}
    return DrawnSet(name, questions, VIDEO_KINDS, controls, {"pevlm": blocks})


def _build_view_set(count: int) -> DrawnSet:
    decks = _build_decks(get_view_answers(), count)
    questions = []
    for index in range(count):
        requested = {kind: deck[index] for kind, deck in decks.items()}
        views = draw_views(np.random.default_rng((SEED, 1, index)), len(CAMERAS), named=True, answers=requested)
        for kind in VIEW_KINDS:
            example = _build_example(index, views.of_kind(kind)[0], images=tuple(views.images), labels=views.labels)
            questions.append(example)
    return DrawnSet("views", questions, VIEW_KINDS, options={"view_select": {"views": list(CAMERAS)}})


def _build_document_set(count: int) -> DrawnSet:
    decks = _build_decks(get_document_answers(), count)
    questions = []
    for index in range(count):
        requested, layout = {kind: deck[index] for kind, deck in decks.items()}, LAYOUTS[index % len(LAYOUTS)]
        size = _PAPER[index % len(_PAPER)]
        document = draw_document(np.random.default_rng((SEED, 4, index)), layout, size, answers=requested)
        shown = {"images": (document.image,), "ground": layout}
        questions += [_build_example(index, question, **shown) for question in document.questions]
    return DrawnSet("documents", questions, DOCUMENT_KINDS)


def _build_page_set(count: int) -> DrawnSet:
    count = min(count, _MAX_PAGES)
    decks = _build_decks(get_document_answers(), count)
    questions = []
    for index in range(count):
        requested, layout = {kind: deck[index] for kind, deck in decks.items()}, PAGE_LAYOUTS[index % len(PAGE_LAYOUTS)]
        sizes = PAGE_SIZES[layout]
        size = sizes[index // len(PAGE_LAYOUTS) % len(sizes)]
        pages = draw_pages(np.random.default_rng((SEED, 6, index)), layout, size, answers=requested)
        shown = {"images": tuple(pages.images), "ground": layout}
        questions += [_build_example(index, question, **shown) for question in pages.questions]
    return DrawnSet("pages", questions, DOCUMENT_KINDS)


def _build_example(index: int, asked: DrawnQuestion, **shown: Any) -> DrawnExample:
    return DrawnExample(index, asked.kind, asked.text, asked.answer, asked.looks, **shown)


def _draw_complete(
    draw: Callable[[tuple[int, ...]], Any], seed: tuple[int, ...], kinds: Sequence[str]
) -> tuple[Any, list]:
    """Draw until a drawing has a question of each kind. Return the drawing and one question per kind."""
    for attempt in range(100):
        drawing = draw((*seed, attempt))
        asked = [drawing.of_kind(kind)[:1] for kind in kinds]
        if all(asked):
            return drawing, [question for (question,) in asked]
    raise AssertionError(f"no drawing with all of {kinds} in 100 attempts from {seed}")


def _build_decks(answers: dict[str, tuple[str, ...]], count: int) -> dict[str, list[str]]:
    """Return an answer for each drawing by kind, all answers equally often in random order."""
    decks = {}
    for index, (kind, options) in enumerate(answers.items()):
        rng = np.random.default_rng((SEED, 3, index))
        rounds = [rng.permutation(len(options)) for _ in range(-(-count // len(options)))]
        decks[kind] = [options[index] for index in np.concatenate(rounds)[:count]]
    return decks
