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

_LONG_TEXT = 32  # text between two visuals that is longer than this is a block of its own


@register("pevlm", site=Site.ATTENTION, paper="arXiv 2506.19651")
@dataclass(frozen=True)
class PEVLM(AttentionPattern):
    """Prefill a video in blocks of frames that see the prompt's start and themselves; removes no tokens.

    The sink is everything before the first frame and the first frames of the (first) video; the other frames form
    context blocks, which attend to the sink and to themselves; what follows the last frame attends to everything. Every
    token stays in the cache, and decoding is as ever.

    sink_frames: int >= 1, frames in the sink (frames as the decoder sees them: Qwen's towers join two of a video's).
    block_frames: int >= 1, frames in a context block; a last block of fewer than half of them joins the one before it.
    min_frames: int >= 1; prompts with fewer frames of video keep full attention, and the stats say so. None: one and a
    half times a sink and a block.
    sink_mode: "text+frames", or "text" for a sink without frames.
    position_mode: "sequential" keeps the positions of full attention; "reuse" starts every context block where the
    first one starts (as APE and Star Attention do).
    dense_layers: decoder layers, counted from 0, that keep full attention.
    only_single_video: prompts with more than one video or image keep full attention.

    Source: Kang et al., "PEVLM: Parallel Encoding for Vision-Language Models". Its body could not be read: the rule is
    from the abstracts of v1-v3 [A], the four ICLR reviews [R], machine-written review summaries of v1 [M] and the
    caption of figure 1 [C]. A sink of text and first frames [M, C], blocks cut at frames [M], sequential positions
    [M, R], an end that attends to everything [A, M].

    Differs from the paper: a reconstruction, not a reproduction. Sizes of sink and block, `min_frames`, the last block,
    the block that text between frames joins (that of the frame it precedes) and prompts with several videos or images
    could not be established and are our decision.
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
        """Frames of video that a prompt needs to be read in blocks."""
        sink = self.sink_frames if self.sink_mode == "text+frames" else 0
        return (3 * (sink + self.block_frames) + 1) // 2 if self.min_frames is None else self.min_frames

    def block_starts(self, visuals: Sequence[Visual], end: int) -> list[int] | str:
        videos = [index for index, visual in enumerate(visuals) if visual.modality == "video"]
        frames = sum(len(visuals[index].frames) for index in videos)
        if not videos:
            return "it holds no video"
        if self.only_single_video and len(visuals) > 1:
            return "it holds more than one video or image (only_single_video)"
        if frames < self.required_frames:
            return f"its {frames} frames are fewer than min_frames={self.required_frames}"
        tail = visuals[-1].frames[-1][1]
        if tail >= end:
            return "nothing follows its last frame, so no token would see all of it"

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
        return [*starts, tail] if starts else "its sink holds all of its frames"

    def _split_frames(self, frames: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], ...]]:
        """Return the frames of each block; see `block_frames`."""
        firsts = list(range(0, len(frames), self.block_frames))
        if len(firsts) > 1 and 2 * (len(frames) - firsts[-1]) < self.block_frames:
            firsts.pop()
        return [frames[a:b] for a, b in pairwise([*firsts, len(frames)])]
