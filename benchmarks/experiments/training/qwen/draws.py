# SPDX-License-Identifier: Apache-2.0
"""What the language model is trained on: batches of images, of videos or of several images a prompt.

Each is (frames as bytes [B, images or pairs of frames, 1 or 2, H, W, 3], what is shown, questions of each row); all
rows of a batch have one size.
"""

from __future__ import annotations

import numpy as np

from moments import draw_moments, said_by
from native_scenes import draw_native, photographs
from packing import Asked, Shown
from questions import IMAGE_KINDS, MIX, choose
from qwen_model import CELL, FRAMES
from tokenprune_demo.drawn_videos import VIDEO_KINDS, draw_video
from tokenprune_demo.drawn_views import VIEW_KINDS, draw_views

KINDS = (*IMAGE_KINDS, *VIDEO_KINDS, *VIEW_KINDS)
WEIGHT = {"text": 2.0, "when": 2.0, "order": 2.0}  # in the loss, of the kinds that are learned last
# Positions from one pair of frames to the next: 2 where the processor is told no frame rate, 24 at two frames a second.
# With others between them, 4 would be the third pair here and the second there, and no token could tell its time.
INTERVALS, OFTEN = (2, 24), (0.8, 0.2)


def grid(rng: np.random.Generator, low: int, high: int, large: float, most: int) -> tuple[int, int]:
    """Return height and width in tokens: mostly between `low` and `high`, in a share of `large` up to `most`."""
    return tuple(int(v) for v in rng.integers(low, (most if rng.random() < large else high) + 1, 2))


def scale_for(rng: np.random.Generator, height: int, width: int) -> float:
    """Random size of what is drawn, so that a scene has a third to all of the room of the first model's."""
    side = (height * width) ** 0.5 / 224
    return float(np.clip(side / rng.uniform(0.55, 1.0), 0.6, 1.6))


def rows_of(tokens: int, each: int, most: int = 20) -> int:
    return int(np.clip(round(tokens / each), 2, most))


def draw_questions(
    seed, tokens=1200, low=7, high=10, large=0.05, most=14, level=1.0, mix=MIX, square=0.0, split="train"
):
    """Draw a batch of images. square: share of batches of 128 x 128 pixels."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    h, w = (8, 8) if rng.random() < square else grid(rng, low, high, large, most)
    scenes = [
        draw_native(rng, w * CELL, h * CELL, scale_for(rng, h * CELL, w * CELL), photos, rng.uniform(level, 1.0))
        for _ in range(rows_of(tokens, h * w))
    ]
    shown = (Shown((1, h, w)),)
    return np.stack([s.pixels for s in scenes])[:, None], shown, [choose(rng, s, mix) for s in scenes]


def draw_moving(seed, tokens=1600, low=7, high=10, large=0.15, most=14, split="train"):
    """Draw a batch of videos, each asked all that it answers."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    h, w = grid(rng, low, high, large, most)
    videos = [draw_video(rng, (w * CELL, h * CELL), photos=photos) for _ in range(rows_of(tokens, 4 * h * w))]
    frames = np.stack([np.stack([np.asarray(frame) for frame in video.frames]) for video in videos])
    shown = (Shown((frames.shape[1] // FRAMES, h, w), video=True, interval=int(rng.choice(INTERVALS, p=OFTEN))),)
    asked = [[Asked(q.kind, q.text, q.answer, WEIGHT.get(q.kind, 1.0)) for q in video.questions] for video in videos]
    said = np.stack([said_by(video, h, w) for video in videos])
    return frames.reshape(len(videos), -1, FRAMES, *frames.shape[2:]), shown, asked, said


def draw_several(seed, tokens=1600, split="train"):
    """Draw a batch of prompts of several images, all of one number and with the same cameras."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    views, named = int(rng.integers(2, 7)), bool(rng.random() < 0.6)
    h, w = ((7, 7), (7, 8), (8, 7))[rng.integers(3)]
    sets: list = []
    while len(sets) < rows_of(tokens, views * h * w, 12):
        drawn = draw_views(rng, views, (w * CELL, h * CELL), named, photos)
        if not sets or drawn.cameras == sets[0].cameras or views < 6:
            sets.append(drawn)
    pixels = np.stack([np.stack([np.asarray(image) for image in one.images]) for one in sets])
    rows = [[Asked(q.kind, q.text, q.answer) for q in one.questions] for one in sets]
    labels = [one.labels or ("",) * views for one in sets]
    if len(set(labels)) > 1:  # a batch has one beginning: keep the rows of the first one's cameras
        same = [i for i, label in enumerate(labels) if label == labels[0]]
        pixels, rows = pixels[same], [rows[i] for i in same]
    shown = tuple(Shown((1, h, w), label=label) for label in labels[0])
    return pixels[:, :, None], shown, rows


def draw_any(seed, videos=0.0, several=0.0, moments=0.0, split="train", **images):
    """Draw a batch of one of the four sorts; videos, several, moments: shares of the batches."""
    rng = np.random.default_rng((*seed, 77))
    part = rng.random()
    if part < videos:
        return draw_moving(seed, split=split)
    if part < videos + several:
        return draw_several(seed, split=split)
    if part < videos + several + moments:
        return draw_moments(seed, int(rng.choice(INTERVALS, p=OFTEN)), split=split)
    return draw_questions(seed, split=split, **images)
