# SPDX-License-Identifier: Apache-2.0
"""Endless drawn streams with one event, for questions asked later.

A stream is a sequence of clips, videos of eight frames as drawn by `drawn_videos`. One clip is the event: a tiny shape
in one frame, a word in one frame, and a shape in all frames. Other clips have no words and none of the event's shapes,
so that the answers are visible in the event only. Streams do not use photographs, so machines draw equal pixels. The
seeds are held out from training.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
from PIL import Image

from tokenprune_demo.drawn_videos import CHANCE, DrawnQuestion, DrawnVideo, draw_video

SEED = 340_034  # not used by any training run
EVENT_KINDS = ("rare", "text", "still")
STREAM_CHANCE = {kind: CHANCE[kind] for kind in EVENT_KINDS}
_OTHERS = ("still", "change")  # kinds of the other clips: shapes that are constant or change colour


@dataclass(frozen=True)
class DrawnStream:
    """A stream of clips of eight frames, drawn on demand. The same index gives the same clip.

    Attributes:
        index: Index of the stream.
        size: (width, height) of a frame.
        before: Number of clips before the event.
        event: The clip with the answers to all questions.
    """

    index: int
    size: tuple[int, int]
    before: int
    event: DrawnVideo

    @property
    def questions(self) -> list[DrawnQuestion]:
        """A question of each of `EVENT_KINDS`, in order. Frames in `looks` are relative to the event."""
        return [self.event.of_kind(kind)[0] for kind in EVENT_KINDS]

    @property
    def shapes(self) -> set[str]:
        """Shapes of the event (including "sign"), which no other clip has."""
        return {thing.what for thing in self.event.things}

    def video(self, index: int) -> DrawnVideo:
        """Return a clip by index."""
        if index == self.before:
            return self.event
        drawn = (_draw_from_seed((SEED, self.index, 1, index, attempt), self.size, _OTHERS) for attempt in count())
        return next(clip for clip in drawn if not self.shapes & {thing.what for thing in clip.things})

    def clip(self, index: int) -> np.ndarray:
        """Return the pixels of a clip, uint8, shape (8, height, width, 3)."""
        return stack_frames(self.video(index).frames)


def draw_stream(index: int, before: int, size: tuple[int, int] = (112, 112)) -> DrawnStream:
    """Draw a stream with its event after `before` clips.

    Raises:
        ValueError: If the size is not valid for videos.
    """
    drawn = (_draw_from_seed((SEED, index, 0, attempt), size, EVENT_KINDS) for attempt in count())
    event = next(clip for clip in drawn if all(clip.of_kind(kind) for kind in EVENT_KINDS))
    return DrawnStream(index, size, before, event)


def stack_frames(frames: list[Image.Image]) -> np.ndarray:
    """Return frames as an array, uint8, shape (frames, height, width, 3)."""
    return np.stack([np.asarray(frame) for frame in frames])


def _draw_from_seed(seed: tuple[int, ...], size: tuple[int, int], kinds: tuple[str, ...]) -> DrawnVideo:
    return draw_video(np.random.default_rng(seed), size, kinds=kinds)
