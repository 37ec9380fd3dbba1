# SPDX-License-Identifier: Apache-2.0
"""Drawn videos of eight frames with questions whose answers are known, for training and benchmarking small models.

A video is drawn from one ``numpy.random.Generator``: a ground (still, noisy, panning behind the things, or with one
cut) and things on it that stay, move, blink, change colour or are there for a frame or two. Every answer of a kind is
equally likely, whatever else the video holds, and only `still` can be answered from the first frame. What moves leaves
on one side and comes in on the other, so that all its places are as likely and no single frame tells which way; that a
thing moves sideways, or up or down, is all that frames in another order tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from tokenprune_demo.backgrounds import BACKGROUNDS, draw_background
from tokenprune_demo.scenes import LARGE, TINY
from tokenprune_demo.video_acts import (
    ANSWERS,
    CHANCE,
    CHANCE_SHUFFLED,
    FRAMES,
    TEXTS,
    TIMED,
    VIDEO_KINDS,
    ActStage,
    DrawnQuestion,
    Region,
    Thing,
)

__all__ = [
    "ANSWERS",
    "CHANCE",
    "CHANCE_SHUFFLED",
    "FRAMES",
    "GROUNDS",
    "TIMED",
    "VIDEO_KINDS",
    "DrawnQuestion",
    "DrawnVideo",
    "Region",
    "Thing",
    "draw_video",
    "get_video_words",
]

GROUNDS = ("still", "noisy", "pan", "cut")
NOISE = 0.02 * 255  # standard deviation of the noise on a noisy ground


@dataclass
class DrawnVideo:
    """A video: its frames, its ground (one of `GROUNDS`), what is in it, and all questions that it answers."""

    frames: list[Image.Image]
    ground: str
    things: list[Thing]
    questions: list[DrawnQuestion] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[DrawnQuestion]:
        return [question for question in self.questions if question.kind == kind]


def get_video_words() -> list[str]:
    """Return all words and marks of the questions about videos and their answers, sorted."""
    texts = [text.replace("{}", " ") for text in TEXTS.values()]
    answers = (word for kind, words in ANSWERS.items() if kind != "order" for word in words)
    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)} | {*answers, *LARGE, *TINY})


def draw_video(
    rng: np.random.Generator,
    size: tuple[int, int] = (224, 224),
    ground: str | None = None,
    *,
    photos: tuple[Image.Image, ...] = (),
    kinds: Sequence[str] | None = None,
    answers: Mapping[str, str] | None = None,
) -> DrawnVideo:
    """Draw one video.

    size: (width, height) of its frames, each 112 to 224 pixels. ground: one of `GROUNDS`; None: any. photos: to be put
    behind things, as of `backgrounds.load_photos`. kinds: what its things shall be asked about, the later ones only
    where there is room; None: all, in any order. answers: for each kind the answer that its first question shall have,
    out of `ANSWERS`; those that are not named are drawn evenly.
    Raises ValueError for another size, ground or kind.
    """
    if not all(112 <= side <= 224 for side in size):
        raise ValueError(f"frames must be 112 to 224 pixels wide and high, not {size}")
    ground = GROUNDS[rng.integers(len(GROUNDS))] if ground is None else ground
    kinds = [VIDEO_KINDS[number] for number in rng.permutation(len(VIDEO_KINDS))] if kinds is None else kinds
    if ground not in GROUNDS or not set(kinds) <= set(VIDEO_KINDS):
        raise ValueError(f"ground={ground!r}, kinds={kinds}: grounds are {GROUNDS}, kinds {VIDEO_KINDS}")
    stage = ActStage(rng, _grounds(rng, ground, size, photos))
    # A move is placed first, on the empty ground: what it crosses depends on its direction.
    for kind in sorted(kinds, key=lambda kind: kind != "direction"):
        options = ANSWERS[kind]
        drawn = options[rng.integers(len(options))]
        stage.act(kind, (answers or {}).get(kind, drawn))
    frames = stage.grounds
    if ground == "noisy":
        frames = [_noisy(rng, frame) for frame in frames]
    return DrawnVideo(frames, ground, stage.things, stage.questions)


def _grounds(
    rng: np.random.Generator, ground: str, size: tuple[int, int], photos: tuple[Image.Image, ...]
) -> list[Image.Image]:
    """Return what is behind the things, frame by frame."""
    width, height = size

    def drawn(larger: tuple[int, int] = (0, 0)) -> Image.Image:
        # A plain ground would hide that it moves.
        kinds = BACKGROUNDS[1:] if ground == "pan" else BACKGROUNDS
        image = draw_background(rng, kinds[rng.integers(len(kinds))], photos)
        return image.resize((width + larger[0], height + larger[1]), Image.Resampling.BILINEAR)

    if ground == "pan":
        across, down = (int(step) for step in rng.integers(-4, 5, 2))
        if not (across or down):
            across = 2
        wide = drawn((abs(across) * (FRAMES - 1), abs(down) * (FRAMES - 1)))
        frames = []
        for frame in range(FRAMES):
            left, top = (step * frame if step >= 0 else -step * (FRAMES - 1 - frame) for step in (across, down))
            frames.append(wide.crop((left, top, left + width, top + height)))
        return frames
    first = drawn()
    if ground != "cut":
        return [first.copy() for _ in range(FRAMES)]
    cut, second = int(rng.integers(2, FRAMES - 1)), drawn()
    return [(first if frame < cut else second).copy() for frame in range(FRAMES)]


def _noisy(rng: np.random.Generator, frame: Image.Image) -> Image.Image:
    pixels = np.asarray(frame)
    noise = rng.standard_normal(pixels.shape, dtype=np.float32) * np.float32(NOISE)
    return Image.fromarray(np.clip(pixels + noise + 0.5, 0, 255).astype(np.uint8))
