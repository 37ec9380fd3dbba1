# SPDX-License-Identifier: Apache-2.0
"""Positions of the frames of videos in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Visual:
    """One video or image of a row.

    modality: "image" or "video". frames: for each frame in order (an image is one) the position of its first visual
    token, and the one after its last. A frame is what the decoder sees as one: Qwen's towers join two of a video's.
    """

    modality: str
    frames: tuple[tuple[int, int], ...]

    @staticmethod
    def from_positions(modality: str, positions: Sequence[int], frames: int) -> Visual | None:
        """Return the visual whose tokens stand at `positions`, split into `frames` by `split_into_frames`, or None."""
        counts = split_into_frames(len(positions), frames)
        if counts is None:
            return None
        end = list(accumulate(counts))
        return Visual(
            modality, tuple((positions[b - n], positions[b - 1] + 1) for b, n in zip(end, counts, strict=True))
        )


def count_tokens_per_frame(tokens: int, frames: int, behind: int = 0) -> list[int] | None:
    """Return how many of a video's `tokens` each of its `frames` has, or None if they do not split evenly. behind:
    tokens that follow the last frame and are in none (the newline of LLaVA-OneVision)."""
    size, rest = divmod(tokens - behind, frames) if frames > 0 else (0, 0)
    return [size] * frames if size > 0 and rest == 0 else None


def compute_frame_indices(frames: Sequence[Sequence[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return long `[S, width]` twice: the index of each token's frame in its segment, and of the token in its frame; -1
    for what is in no frame (a newline after a video, padding).

    frames: how many tokens each frame of each segment has. Both are made on the host, so that the device is not asked.
    """
    made = torch.full((2, len(frames), width), -1, device="cpu")
    for segment, counts in enumerate(frames):
        length = torch.tensor(counts, device="cpu")
        frame = torch.arange(len(counts), device="cpu").repeat_interleave(length)
        start = (length.cumsum(0) - length).repeat_interleave(length)
        made[0, segment, : len(frame)] = frame
        made[1, segment, : len(frame)] = torch.arange(len(frame), device="cpu") - start
    frame, place = to_device(made, device)
    return frame, place


def split_into_frames(tokens: int, frames: int) -> list[int] | None:
    """Return how many of a video's `tokens` each of its `frames` has, or None if they do not split evenly. A rest, the
    newline after a video of LLaVA-OneVision, belongs to the last."""
    size = tokens // frames if frames > 0 else 0
    if size == 0 or tokens - frames * size >= size:
        return None
    return [size] * (frames - 1) + [tokens - (frames - 1) * size]
