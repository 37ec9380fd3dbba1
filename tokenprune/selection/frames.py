# SPDX-License-Identifier: Apache-2.0
"""Frames of videos: number of tokens per frame, and positions in the prompt."""

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
    """One image or video of a prompt, with the positions of its frames.

    Args:
        modality: "image" or "video".
        frames: (start, end) of each frame: the position of its first visual token, and one past its last. An image has
            one frame. Frames are counted as the decoder sees them: Qwen's towers join two frames of a video.

    Examples:
        >>> Visual.from_positions("video", range(10, 18), frames=2)
        Visual(modality='video', frames=((10, 14), (14, 18)))
    """

    modality: str
    frames: tuple[tuple[int, int], ...]

    @staticmethod
    def from_positions(modality: str, positions: Sequence[int], frames: int) -> Visual | None:
        """Split the visual tokens at `positions` into `frames` frames. Return None if they do not split evenly."""
        counts = split_into_frames(len(positions), frames)
        if counts is None:
            return None
        ends = list(accumulate(counts))
        spans = ((positions[end - count], positions[end - 1] + 1) for end, count in zip(ends, counts, strict=True))
        return Visual(modality, tuple(spans))


def count_tokens_per_frame(tokens: int, frames: int, behind: int = 0) -> list[int] | None:
    """Return the number of tokens in each frame of a video, or None if the tokens do not split evenly.

    Args:
        tokens: Number of visual tokens of the video.
        frames: Number of frames.
        behind: Number of tokens after the last frame that belong to no frame (the newline of LLaVA-OneVision).
    """
    size, rest = divmod(tokens - behind, frames) if frames > 0 else (0, 0)
    return [size] * frames if size > 0 and rest == 0 else None


def compute_frame_indices(frames: Sequence[Sequence[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the frame of each token, and the index of each token in its frame.

    Both tensors have shape (S, width) and dtype int64. Tokens outside of frames (a newline, padding) get -1. The
    tensors are built on the host, which avoids waiting for the device.

    Args:
        frames: Number of tokens in each frame, for each of S segments.
        width: Number of tokens in the longest segment.
        device: Device of the result.
    """
    indices = torch.full((2, len(frames), width), -1, device="cpu")
    for segment, counts in enumerate(frames):
        length = torch.tensor(counts, device="cpu")
        frame = torch.arange(len(counts), device="cpu").repeat_interleave(length)
        start = (length.cumsum(0) - length).repeat_interleave(length)
        indices[0, segment, : len(frame)] = frame
        indices[1, segment, : len(frame)] = torch.arange(len(frame), device="cpu") - start
    frame, index_in_frame = to_device(indices, device)
    return frame, index_in_frame


def split_into_frames(tokens: int, frames: int) -> list[int] | None:
    """Return the number of tokens in each frame, or None if they do not split evenly.

    A remainder smaller than a frame (the newline of LLaVA-OneVision) is added to the last frame.
    """
    size = tokens // frames if frames > 0 else 0
    if size == 0 or tokens - frames * size >= size:
        return None
    return [size] * (frames - 1) + [tokens - (frames - 1) * size]
