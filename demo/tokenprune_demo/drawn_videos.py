# SPDX-License-Identifier: Apache-2.0
"""Drawn videos of eight frames with known answers, for training and benchmarking small models.

A video is drawn from one `numpy.random.Generator`: a ground (still, noisy, panning, or with a cut) and objects that
stay, move, blink, change colour, or appear for one or two frames. All answers of a kind are equally likely for any
other content, and only `still` can be answered from the first frame. Moving objects wrap around at the edges, so all
their positions are equally likely and no single frame shows the direction. Shuffled frames only show whether an object
moves horizontally or vertically.
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
    """A drawn video.

    Attributes:
        frames: The frames.
        ground: One of `GROUNDS`.
        things: Objects in the video.
        questions: All questions that the video answers.
    """

    frames: list[Image.Image]
    ground: str
    things: list[Thing]
    questions: list[DrawnQuestion] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[DrawnQuestion]:
        return [question for question in self.questions if question.kind == kind]


def get_video_words() -> list[str]:
    """Return all words and punctuation of video questions and answers, sorted."""
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

    Args:
        rng: Random generator.
        size: (width, height) of a frame, each 112 to 224 pixels.
        ground: One of `GROUNDS`. None selects at random.
        photos: Background photographs, as from `backgrounds.load_photos`.
        kinds: Kinds of question in order of priority; later kinds are skipped without room. None selects all
            kinds in random order.
        answers: Answer of the first question of each kind, out of `ANSWERS`. Other answers are drawn uniformly.

    Raises:
        ValueError: If the size, ground or kind is not valid.

    Examples:
        >>> video = draw_video(np.random.default_rng(0), (112, 112), "still", kinds=["still"], answers={"still": "red"})
        >>> video.questions[0].answer
        'red'
    """
    if not all(112 <= side <= 224 for side in size):
        raise ValueError(f"size={size} is not valid. Frames are 112 to 224 pixels wide and high.")
    ground = GROUNDS[rng.integers(len(GROUNDS))] if ground is None else ground
    kinds = [VIDEO_KINDS[index] for index in rng.permutation(len(VIDEO_KINDS))] if kinds is None else kinds
    if ground not in GROUNDS or not set(kinds) <= set(VIDEO_KINDS):
        raise ValueError(f"ground={ground!r}, kinds={kinds}: grounds are {GROUNDS}, kinds {VIDEO_KINDS}")
    stage = ActStage(rng, _draw_grounds(rng, ground, size, photos))
    # Moving objects come first, on the empty ground, because the direction determines the covered area.
    for kind in sorted(kinds, key=lambda kind: kind != "direction"):
        options = ANSWERS[kind]
        drawn = options[rng.integers(len(options))]
        stage.act(kind, (answers or {}).get(kind, drawn))
    frames = stage.grounds
    if ground == "noisy":
        frames = [_add_noise(rng, frame) for frame in frames]
    return DrawnVideo(frames, ground, stage.things, stage.questions)


def _draw_grounds(
    rng: np.random.Generator, ground: str, size: tuple[int, int], photos: tuple[Image.Image, ...]
) -> list[Image.Image]:
    """Return the background of each frame."""
    width, height = size

    def drawn(larger: tuple[int, int] = (0, 0)) -> Image.Image:
        # Panning is invisible on a plain ground.
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


def _add_noise(rng: np.random.Generator, frame: Image.Image) -> Image.Image:
    pixels = np.asarray(frame)
    noise = rng.standard_normal(pixels.shape, dtype=np.float32) * np.float32(NOISE)
    return Image.fromarray(np.clip(pixels + noise + 0.5, 0, 255).astype(np.uint8))
