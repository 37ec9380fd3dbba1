# SPDX-License-Identifier: Apache-2.0
"""Videos with many motions and short appearances, and labels about time for their visual tokens.

A moving thing has its direction, and a thing in two frames has its time, as an answer word on the visual tokens that
show it. The model learned to look up colors quickly, because the tower encodes them as the decoder's words. With these
labels, it can look up directions and times, too. The loss does not depend on attention.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F

import fast
from native_scenes import photographs
from packing import Asked, Shown
from qwen_model import CELL, FRAMES
from qwen_vocabulary import ID
from tokenprune_demo.drawn_videos import ANSWERS, DrawnVideo, Region, draw_video

IGNORE = -100
SAID = ("direction", "when", "text", "order")  # kinds whose answers are labels of the visual tokens
GROUPS = tuple(torch.tensor([ID[word] for word in ANSWERS[kind]]) for kind in SAID)
# The kinds of a video: first the kinds that need time, then four of the others if they fit.
ALWAYS, OTHERS = ("direction", "when", "order", "order"), ("text", "rare", "change", "still", "when", "events")
_TIMES = {1: 0, 3: 1, 5: 2, 6: 2}  # first frame of a short appearance -> answer index of `when`
LEAST = 0.35  # minimum share of a token's cell that a thing covers


def draw_moments(seed, interval: int, tokens=1600, low=7, high=10, always=ALWAYS, split="train"):
    """Draw a batch of videos, as `draws.draw_moving`, with the labels of their visual tokens as a fourth part."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    h, w = (int(v) for v in rng.integers(low, high + 1, 2))
    videos = []
    for _ in range(int(np.clip(round(tokens / (4 * h * w)), 2, 20))):
        kinds = [*always, *(OTHERS[i] for i in rng.permutation(len(OTHERS))[:4])]
        kinds = [kinds[i] for i in rng.permutation(len(kinds))]
        videos.append(draw_video(rng, (w * CELL, h * CELL), photos=photos, kinds=kinds))
    frames = np.stack([np.stack([np.asarray(frame) for frame in video.frames]) for video in videos])
    visuals = (Shown((frames.shape[1] // FRAMES, h, w), video=True, interval=interval),)
    questions = [[Asked(q.kind, q.text, q.answer) for q in video.questions] for video in videos]
    labels = np.stack([said_by(video, h, w) for video in videos])
    return frames.reshape(len(videos), -1, FRAMES, *frames.shape[2:]), visuals, questions, labels


def said_by(video: DrawnVideo, h: int, w: int) -> np.ndarray:
    """Return the answer index of each visual token for each kind of `SAID`, or `IGNORE`: shape (4, t * h * w)."""
    pairs = len(video.frames) // FRAMES
    labels = np.full((len(SAID), pairs, h, w), IGNORE, np.int64)
    left, top = np.arange(w) * CELL, np.arange(h) * CELL

    def say(places: Iterable[Region], kind: str, answer: int) -> None:
        for frame, (x0, y0, x1, y1) in places:
            wide = np.clip(np.minimum(left + CELL, x1) - np.maximum(left, x0), 0, None)
            high = np.clip(np.minimum(top + CELL, y1) - np.maximum(top, y0), 0, None)
            labels[SAID.index(kind), frame // FRAMES][np.outer(high, wide) >= LEAST * CELL**2] = answer

    for question in video.questions:
        if question.kind == "order":
            begins = [min(frame for frame, _ in look) for look in question.looks]
            for look, begin in zip(question.looks, begins, strict=True):
                say(look, "order", int(begin != min(begins)))
                if begin in _TIMES:
                    say(look, "when", _TIMES[begin])
        elif question.kind in SAID:
            say(question.boxes, question.kind, ANSWERS[question.kind].index(question.answer))
    return labels.reshape(len(SAID), -1)


def said_loss(language, state: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    """Return the cross-entropy of visual token states, (B, n, d), with their labels, by the output layer."""
    words = fast.rms(state, language.norm)
    total = state.new_zeros(())
    for index, group in enumerate(GROUPS):
        target = torch.from_numpy(labels[:, index])
        labeled = target >= 0
        if labeled.any():
            total = total + F.cross_entropy(words[labeled] @ language.embed_tokens.weight[group].T, target[labeled])
    return total
