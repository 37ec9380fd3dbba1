# SPDX-License-Identifier: Apache-2.0
"""Where the frames of videos stand in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visual:
    """One video or picture of a row.

    modality: "image" or "video". frames: for each frame in order (a picture is one) the position of its first visual
    token, and the one behind its last. A frame is what the decoder sees as one: Qwen's towers join two of a video's.
    """

    modality: str
    frames: tuple[tuple[int, int], ...]

    @staticmethod
    def of(modality: str, positions: Sequence[int], frames: int) -> Visual | None:
        """Return the visual whose tokens stand at `positions`, split into `frames` of the same number of tokens, or
        None if they do not split so. A rest, the newline behind a video of LLaVA-OneVision, belongs to the last."""
        size = len(positions) // frames if frames > 0 else 0
        if size == 0 or len(positions) - frames * size >= size:
            return None
        first = [number * size for number in range(frames)]
        last = [start - 1 for start in first[1:]] + [len(positions) - 1]
        return Visual(modality, tuple((positions[a], positions[b] + 1) for a, b in zip(first, last, strict=True)))
