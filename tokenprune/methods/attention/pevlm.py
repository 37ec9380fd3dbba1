# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from annotated_types import Ge

from tokenprune.methods.registry import register
from tokenprune.selection.frames import Visual
from tokenprune.selection.method import Site
from tokenprune.selection.sites.attention import AttentionPattern

_LONG_TEXT = 32  # longer text between two visuals forms its own block


@register("pevlm", site=Site.ATTENTION, paper="arXiv 2506.19651")
@dataclass(frozen=True)
class PEVLM(AttentionPattern):
    """Prefill a video in blocks of frames, each attending to itself and to the prompt's start.

    The sink contains everything before the first frame and the first frames of the first video. The other frames form
    context blocks, which attend to the sink and to themselves. Tokens after the last frame attend to everything. No
    token is removed, and decoding is unchanged.

    Args:
        sink_frames: Number of frames in the sink, >= 1. Frames are counted as the decoder sees them; Qwen's towers join
            two video frames.
        block_frames: Number of frames in a context block, >= 1. A last block with fewer than half of this number joins
            the block before it.
        min_frames: Prompts with fewer video frames keep full attention, which the stats report. None uses one and a
            half times a sink and a block.
        sink_mode: "text+frames", or "text" for a sink without frames.
        position_mode: "sequential" keeps the positions of full attention. "reuse" starts every context block at the
            position of the first one, as APE and Star Attention do.
        dense_layers: Decoder layers that keep full attention, counted from 0.
        only_single_video: Keep full attention for prompts with more than one video or image.

    Source:
        Kang et al., "PEVLM: Parallel Encoding for Vision-Language Models" (arXiv 2506.19651). The body of the paper
        could not be read. The rule is from the abstracts of v1 to v3 [A], four ICLR reviews [R], machine-written review
        summaries of v1 [M] and the caption of figure 1 [C]: a sink of text and first frames [M, C], blocks cut at
        frames [M], sequential positions [M, R], and a tail that attends to everything [A, M].

    Differences from the paper:
        - A reconstruction, not a reproduction.
        - The sizes of sink and block, `min_frames` and the rule for the last block are decisions of this
          implementation.
        - Text between frames joins the block of the next frame. This rule, and prompts with several videos or images,
          are decisions as well.

    Examples:
        >>> method = tokenprune.method("pevlm", sink_frames=4)
        >>> method.required_frames
        30
    """

    sink_frames: Annotated[int, Ge(1)] = 8
    block_frames: Annotated[int, Ge(1)] = 16
    min_frames: Annotated[int, Ge(1)] | None = None
    sink_mode: Literal["text+frames", "text"] = "text+frames"
    position_mode: Literal["sequential", "reuse"] = "sequential"
    dense_layers: Sequence[Annotated[int, Ge(0)]] = ()
    only_single_video: bool = False

    @property
    def required_frames(self) -> int:
        """Minimum number of video frames for attention in blocks."""
        sink = self.sink_frames if self.sink_mode == "text+frames" else 0
        return (3 * (sink + self.block_frames) + 1) // 2 if self.min_frames is None else self.min_frames

    def block_starts(self, visuals: Sequence[Visual], end: int) -> list[int] | str:
        videos = [index for index, visual in enumerate(visuals) if visual.modality == "video"]
        frames = sum(len(visuals[index].frames) for index in videos)
        if not videos:
            return "it contains no video"
        if self.only_single_video and len(visuals) > 1:
            return "it contains more than one video or image (only_single_video)"
        if frames < self.required_frames:
            return f"its {frames} frames are fewer than min_frames={self.required_frames}"
        tail = visuals[-1].frames[-1][1]
        if tail >= end:
            return "no token follows its last frame"

        first, *later = visuals[videos[0] :]
        sink = first.frames[: self.sink_frames] if self.sink_mode == "text+frames" else ()
        starts, start = [], sink[-1][1] if sink else first.frames[0][0]
        for index, frames_of_visual in enumerate([first.frames[len(sink) :], *(visual.frames for visual in later)]):
            if index and frames_of_visual[0][0] - start > _LONG_TEXT:
                starts.append(start)
                start = frames_of_visual[0][0]
            for chunk in self._split_frames(frames_of_visual):
                starts.append(start)
                start = chunk[-1][1]
        return [*starts, tail] if starts else "its sink contains all of its frames"

    def _split_frames(self, frames: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], ...]]:
        """Return the frames of each block. See `block_frames`."""
        firsts = list(range(0, len(frames), self.block_frames))
        if len(firsts) > 1 and 2 * (len(frames) - firsts[-1]) < self.block_frames:
            firsts.pop()
        return [frames[a:b] for a, b in pairwise([*firsts, len(frames)])]
