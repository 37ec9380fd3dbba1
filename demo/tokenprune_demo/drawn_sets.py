# SPDX-License-Identifier: Apache-2.0
"""The held-out sets that are drawn when they are asked: videos, prompts of six images, documents, and pages.

Their seeds are far from those that training draws from, they have no photographs in them, and the answers of a kind are
evened out. Two machines draw the same pixels with the same versions of NumPy and Pillow; the digest in the header of a
run tells whether they did.
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
MAX_EXAMPLES = 96  # videos, prompts or documents of a whole set
_MOST_PAGES = 75  # prompts of a whole set of pages
_GROUPS = {"still": "still ground", "noisy": "noisy ground", "pan": "panning ground", "cut": "with a cut"} | {
    layout: f"{layout}s" for layout in (*LAYOUTS, *PAGE_LAYOUTS)
}
_SIZES = ((224, 224), (224, 160), (160, 224), (192, 192))  # every ground in every size, after 16 videos
_SMALL = ((144, 144),)  # as large as any on which demo_qwen was trained, and no larger than eight questions need
_VIDEOS = {"videos": (0, _SIZES), "small-videos": (5, _SMALL)}  # part of the seed, and sizes
_PAPER = ((448, 448), (336, 448), (448, 336), (320, 448), (448, 288))  # in whole visual tokens of 16 pixels


@dataclass(frozen=True, eq=False)
class DrawnExample:
    """One question of a drawn set.

    number: of its video or prompt. frames: of a video, else none. images: of a prompt, else none; labels: what stands
    before each. ground: of a video, or what kind of document it is. looks: see `DrawnQuestion`.
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
        """The images in memory that the question's images come from."""
        return self.images

    @property
    def video(self) -> list[Image.Image]:
        return list(self.frames)

    @property
    def where(self) -> str:
        return f"drawn {'video' if self.is_video else self.ground or 'prompt'} {self.index}"


@dataclass(frozen=True)
class Control:
    """Questions that cannot be answered from what is shown, asked of the unpatched model.

    chance: for each kind that must fail the score that knowing nothing more gives.
    """

    name: str
    questions: list[DrawnExample]
    chance: dict[str, float]


@dataclass(frozen=True)
class DrawnSet:
    """A set as a benchmark asks it.

    options: of methods whose own do not fit this set. groups: for each question the group beside its kind (its ground)
    by which results are kept apart; none.
    """

    name: str
    questions: list[DrawnExample]
    kinds: tuple[str, ...]
    controls: list[Control] = field(default_factory=list)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def groups(self) -> list[str]:
        return [_GROUPS[one.ground] for one in self.questions if one.ground]

    def first(self, limit: int) -> DrawnSet:
        """Return the set with only the first `limit` questions; 0: all."""
        if not limit:
            return self
        questions = self.questions[:limit]
        kinds = tuple(kind for kind in self.kinds if any(question.kind == kind for question in questions))
        controls = [
            Control(one.name, one.questions[:limit], {kind: one.chance[kind] for kind in kinds if kind in one.chance})
            for one in self.controls
        ]
        return replace(self, questions=questions, kinds=kinds, controls=controls)

    def about(self) -> dict[str, Any]:
        """Return what tells these questions from others, as plain values."""
        digest = hashlib.sha256()
        for one in self.questions:
            digest.update(f"{one.question}\n{one.answer}\n".encode())
        for images in {one.index: one.frames or one.images for one in self.questions}.values():
            for image in images:
                digest.update(image.tobytes())
        said = {"name": f"drawn {self.name.replace('-', ' ')}", "questions": len(self.questions), "skipped": []}
        return said | {"digest": digest.hexdigest()[:16]}


def draw_set(name: str, limit: int) -> DrawnSet:
    """Return one of the `SETS` but "images". limit: how many videos, prompts or documents, each with one question of
    every kind; 0: all."""
    number = min(limit or MAX_EXAMPLES, MAX_EXAMPLES)
    if name in _VIDEOS:
        return _videos(name, number)
    return {"views": _views, "documents": _documents, "pages": _pages}[name](number)


def freeze_first_frame(question: DrawnExample) -> DrawnExample:
    """Return the question with a video that stands still at its first frame."""
    return replace(question, frames=question.frames[:1] * len(question.frames))


def shuffle_frames(question: DrawnExample) -> DrawnExample:
    """Return the question with the frames of its video in another order, the same for all questions of the video."""
    order = np.random.default_rng((SEED, 2, question.index)).permutation(len(question.frames))
    return replace(question, frames=tuple(question.frames[place] for place in order))


def _videos(name: str, number: int) -> DrawnSet:
    decks, (part, sizes) = _decks(dict(ANSWERS), number), _VIDEOS[name]
    questions = []
    for index in range(number):
        size = sizes[(index + index // len(GROUNDS)) % len(sizes)]
        wanted = {kind: deck[index] for kind, deck in decks.items()}

        def drawn(
            seed: tuple[int, ...],
            size: tuple[int, int] = size,
            ground: str = GROUNDS[index % len(GROUNDS)],
            wanted: dict[str, str] = wanted,
        ) -> Any:
            return draw_video(np.random.default_rng(seed), size, ground, answers=wanted)

        video, asked = _whole(drawn, (SEED, part, index), VIDEO_KINDS)
        frames = tuple(video.frames)
        questions += [_example(index, one, frames=frames, ground=video.ground) for one in asked]
    controls = [
        Control(
            "first frame only",
            [freeze_first_frame(one) for one in questions],
            {kind: CHANCE[kind] for kind in VIDEO_KINDS if kind != "still"},
        ),
        Control(
            "shuffled frames",
            [shuffle_frames(one) for one in questions],
            {kind: CHANCE_SHUFFLED[kind] for kind in TIMED},
        ),
    ]
    # Eight frames are four, or eight, to the decoder: far fewer than blocks are made for.
    blocks = {"sink_frames": 1, "block_frames": 1, "min_frames": 2}
    return DrawnSet(name, questions, VIDEO_KINDS, controls, {"pevlm": blocks})


def _views(number: int) -> DrawnSet:
    decks = _decks(get_view_answers(), number)
    questions = []
    for index in range(number):
        wanted = {kind: deck[index] for kind, deck in decks.items()}
        views = draw_views(np.random.default_rng((SEED, 1, index)), len(CAMERAS), named=True, answers=wanted)
        for kind in VIEW_KINDS:
            made = _example(index, views.of_kind(kind)[0], images=tuple(views.images), labels=views.labels)
            questions.append(made)
    return DrawnSet("views", questions, VIEW_KINDS, options={"view_select": {"views": list(CAMERAS)}})


def _documents(number: int) -> DrawnSet:
    decks = _decks(get_document_answers(), number)
    questions = []
    for index in range(number):
        wanted, layout = {kind: deck[index] for kind, deck in decks.items()}, LAYOUTS[index % len(LAYOUTS)]
        size = _PAPER[index % len(_PAPER)]
        made = draw_document(np.random.default_rng((SEED, 4, index)), layout, size, answers=wanted)
        questions += [_example(index, one, images=(made.image,), ground=layout) for one in made.questions]
    return DrawnSet("documents", questions, DOCUMENT_KINDS)


def _pages(number: int) -> DrawnSet:
    number = min(number, _MOST_PAGES)
    decks = _decks(get_document_answers(), number)
    questions = []
    for index in range(number):
        wanted, layout = {kind: deck[index] for kind, deck in decks.items()}, PAGE_LAYOUTS[index % len(PAGE_LAYOUTS)]
        sizes = PAGE_SIZES[layout]
        size = sizes[index // len(PAGE_LAYOUTS) % len(sizes)]
        made = draw_pages(np.random.default_rng((SEED, 6, index)), layout, size, answers=wanted)
        questions += [_example(index, one, images=tuple(made.images), ground=layout) for one in made.questions]
    return DrawnSet("pages", questions, DOCUMENT_KINDS)


def _example(number: int, asked: DrawnQuestion, **shown: Any) -> DrawnExample:
    return DrawnExample(number, asked.kind, asked.text, asked.answer, asked.looks, **shown)


def _whole(draw: Callable[[tuple[int, ...]], Any], seed: tuple[int, ...], kinds: Sequence[str]) -> tuple[Any, list]:
    """Return the first drawing, and a question of each kind out of it, that has room for all kinds."""
    for attempt in range(100):
        made = draw((*seed, attempt))
        asked = [made.of_kind(kind)[:1] for kind in kinds]
        if all(asked):
            return made, [one for (one,) in asked]
    raise AssertionError(f"no drawing with all of {kinds} in 100 attempts from {seed}")


def _decks(answers: dict[str, tuple[str, ...]], number: int) -> dict[str, list[str]]:
    """Return for each kind an answer for each drawing: all equally often, in an order of their own."""
    decks = {}
    for place, (kind, options) in enumerate(answers.items()):
        rng = np.random.default_rng((SEED, 3, place))
        rounds = [rng.permutation(len(options)) for _ in range(-(-number // len(options)))]
        decks[kind] = [options[index] for index in np.concatenate(rounds)[:number]]
    return decks
