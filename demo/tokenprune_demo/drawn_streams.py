# SPDX-License-Identifier: Apache-2.0
"""Drawn streams without an end, in which something is shown once, to be asked about later.

A stream is a row of clips, videos of eight frames as `drawn_videos` draws them. One clip is the event: a tiny thing in
one of its frames, a word in one of them, and a shape in all. No other clip shows a word, or a thing of any shape that
the event shows, so that what is asked about is seen in the event or never. There are no photographs in them: two
machines draw the same. Seeds are held out from training.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
from PIL import Image

from tokenprune_demo.drawn_videos import CHANCE, DrawnQuestion, DrawnVideo, draw_video

SEED = 340_034  # no training run began with it
EVENT_KINDS = ("rare", "text", "still")
STREAM_CHANCE = {kind: CHANCE[kind] for kind in EVENT_KINDS}
_OTHERS = ("still", "change")  # what the other clips show: shapes that stay or change colour


@dataclass(frozen=True)
class DrawnStream:
    """A stream of clips of eight frames, drawn one by one: the same number gives the same clip.

    number: of the stream; other numbers are other streams. size: (width, height) of a frame. before: clips ahead of the
    event. event: the clip in which all questions are answered.
    """

    index: int
    size: tuple[int, int]
    before: int
    event: DrawnVideo

    @property
    def questions(self) -> list[DrawnQuestion]:
        """A question of each of `EVENT_KINDS`, in their order; frames in `looks` are counted within the event."""
        return [self.event.of_kind(kind)[0] for kind in EVENT_KINDS]

    @property
    def shapes(self) -> set[str]:
        """The shapes of the event, "sign" among them, which no other clip shows."""
        return {thing.what for thing in self.event.things}

    def video(self, number: int) -> DrawnVideo:
        """Return a clip, counted from 0 on."""
        if number == self.before:
            return self.event
        drawn = (_drawn((SEED, self.index, 1, number, attempt), self.size, _OTHERS) for attempt in count())
        return next(one for one in drawn if not self.shapes & {thing.what for thing in one.things})

    def clip(self, number: int) -> np.ndarray:
        """Return the pixels of a clip, uint8 `[8, height, width, 3]`."""
        return stack_frames(self.video(number).frames)


def draw_stream(number: int, before: int, size: tuple[int, int] = (112, 112)) -> DrawnStream:
    """Draw a stream whose event comes after so many clips; raises ValueError for a size that videos cannot have."""
    drawn = (_drawn((SEED, number, 0, attempt), size, EVENT_KINDS) for attempt in count())
    event = next(one for one in drawn if all(one.of_kind(kind) for kind in EVENT_KINDS))
    return DrawnStream(number, size, before, event)


def stack_frames(frames: list[Image.Image]) -> np.ndarray:
    """Return frames as uint8 `[T, height, width, 3]`."""
    return np.stack([np.asarray(frame) for frame in frames])


def _drawn(seed: tuple[int, ...], size: tuple[int, int], kinds: tuple[str, ...]) -> DrawnVideo:
    return draw_video(np.random.default_rng(seed), size, kinds=kinds)
