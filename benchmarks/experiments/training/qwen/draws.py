# SPDX-License-Identifier: Apache-2.0
"""Batches for training the language model: images, videos, or several images per prompt.

A batch is (frames as bytes of shape (B, images or pairs of frames, 1 or 2, H, W, 3), visual parts of the prompt,
questions of each row). All rows of a batch have the same size.
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
WEIGHT = {"text": 2.0, "when": 2.0, "order": 2.0}  # loss weights of the kinds that are learned last
# Positions between pairs of frames: 2 if the processor gets no frame rate, 24 at two frames per second. With other
# values, position 4 would be the third pair in some videos and the second in others, and tokens could not encode time.
INTERVALS, OFTEN = (2, 24), (0.8, 0.2)


def grid(rng: np.random.Generator, low: int, high: int, large: float, max_side: int) -> tuple[int, int]:
    """Return height and width in tokens: usually from `low` to `high`, in a share `large` of cases up to `max_side`."""
    return tuple(int(v) for v in rng.integers(low, (max_side if rng.random() < large else high) + 1, 2))


def scale_for(rng: np.random.Generator, height: int, width: int) -> float:
    """Return a random scale of drawn items, so that a scene has a third to all of the room of the first model's."""
    side = (height * width) ** 0.5 / 224
    return float(np.clip(side / rng.uniform(0.55, 1.0), 0.6, 1.6))


def rows_of(tokens: int, tokens_per_row: int, max_rows: int = 20) -> int:
    return int(np.clip(round(tokens / tokens_per_row), 2, max_rows))


def draw_questions(
    seed, tokens=1200, low=7, high=10, large=0.05, max_side=14, level=1.0, mix=MIX, square=0.0, split="train"
):
    """Draw a batch of images. `square` is the share of batches with 128 x 128 pixels."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    h, w = (8, 8) if rng.random() < square else grid(rng, low, high, large, max_side)
    scenes = [
        draw_native(rng, w * CELL, h * CELL, scale_for(rng, h * CELL, w * CELL), photos, rng.uniform(level, 1.0))
        for _ in range(rows_of(tokens, h * w))
    ]
    visuals = (Shown((1, h, w)),)
    return np.stack([s.pixels for s in scenes])[:, None], visuals, [choose(rng, s, mix) for s in scenes]


def draw_moving(seed, tokens=1600, low=7, high=10, large=0.15, max_side=14, split="train"):
    """Draw a batch of videos with all of their questions."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    h, w = grid(rng, low, high, large, max_side)
    videos = [draw_video(rng, (w * CELL, h * CELL), photos=photos) for _ in range(rows_of(tokens, 4 * h * w))]
    frames = np.stack([np.stack([np.asarray(frame) for frame in video.frames]) for video in videos])
    visuals = (Shown((frames.shape[1] // FRAMES, h, w), video=True, interval=int(rng.choice(INTERVALS, p=OFTEN))),)
    questions = [
        [Asked(q.kind, q.text, q.answer, WEIGHT.get(q.kind, 1.0)) for q in video.questions] for video in videos
    ]
    moment_labels = np.stack([said_by(video, h, w) for video in videos])
    return frames.reshape(len(videos), -1, FRAMES, *frames.shape[2:]), visuals, questions, moment_labels


def draw_several(seed, tokens=1600, split="train"):
    """Draw a batch of prompts with several images. All prompts have the same number of images and the same cameras."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    views, named = int(rng.integers(2, 7)), bool(rng.random() < 0.6)
    h, w = ((7, 7), (7, 8), (8, 7))[rng.integers(3)]
    sets: list = []
    while len(sets) < rows_of(tokens, views * h * w, 12):
        scene_set = draw_views(rng, views, (w * CELL, h * CELL), named, photos)
        if not sets or scene_set.cameras == sets[0].cameras or views < 6:
            sets.append(scene_set)
    pixels = np.stack([np.stack([np.asarray(image) for image in view_set.images]) for view_set in sets])
    rows = [[Asked(q.kind, q.text, q.answer) for q in view_set.questions] for view_set in sets]
    labels = [view_set.labels or ("",) * views for view_set in sets]
    if len(set(labels)) > 1:  # rows of a batch share their prefix: keep the rows with the first row's cameras
        same = [i for i, label in enumerate(labels) if label == labels[0]]
        pixels, rows = pixels[same], [rows[i] for i in same]
    visuals = tuple(Shown((1, h, w), label=label) for label in labels[0])
    return pixels[:, :, None], visuals, rows


def draw_any(seed, videos=0.0, several=0.0, moments=0.0, split="train", **images):
    """Draw a batch of one of four sorts. `videos`, `several` and `moments` are shares of the batches."""
    rng = np.random.default_rng((*seed, 77))
    part = rng.random()
    if part < videos:
        return draw_moving(seed, split=split)
    if part < videos + several:
        return draw_several(seed, split=split)
    if part < videos + several + moments:
        return draw_moments(seed, int(rng.choice(INTERVALS, p=OFTEN)), split=split)
    return draw_questions(seed, split=split, **images)
