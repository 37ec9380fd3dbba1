# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge

from tokenprune.kernels.pairs import normalize, round_cosines
from tokenprune.kernels.take import top_mask
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.frames import FrameMerger, FrameMix

if TYPE_CHECKING:
    from torch import Tensor

_SMOOTHING = 0.9  # weight of the current frame in the running similarity


@register("earlytom", site=Site.IN_ENCODER, paper="arXiv 2605.30010, CVPR 2026", merges=True)
@dataclass(frozen=True)
class EarlyTom(FrameMerger):
    """Merge similar frames inside the tower and keep attended tokens (EarlyTom).

    After three of the tower's blocks, frames are grouped into segments. A segment ends if the running similarity to its
    first frame is too low. The first and last frame of a segment are kept; two adjacent frames between them merge if
    they are more similar to each other than the first frame is to the last. Each remaining frame then keeps an equal
    part of the budget: the tokens with the most attention in the tower, or, in the middle of a segment, the best token
    of each stretch of the frame, so that the tokens cover the frame.

    `keep` counts the tokens of the whole video. If the remaining frames have fewer tokens, all are kept. Images are not
    changed.

    Args:
        threshold: Running cosine to the segment's first frame below which a new segment starts. Above 1, no frames
            merge.
        longest: Maximum number of frames in a segment.
        layers: Blocks after which frames merge. Floats are shares of the depth that the model reads, ints are indices.
        lose_last: Drop the second-to-last frame of a segment of four or more frames if it found no partner, as the
            authors' code does. False keeps it.

    Source:
        "EarlyTom: Early Token Compression Completes Fast Video Understanding" (arXiv 2605.30010), the authors' code.
        The paper's text was not available.

    Differences from the paper:
        - There is one default setting. The authors set thresholds and layers for each benchmark.
        - Counts are exact and spread evenly over the frames.
        - The last two frames between the ends are averaged. The code keeps the first and drops the second.
        - A negative similarity counts as 0 in the weights.
        - Each video is processed separately.
        - The cut inside the language model is left out. Combine with `fastv`.

    Examples:
        >>> EarlyTom(threshold=0.8, layers=(6, 12)).blocks(24)
        [6, 12]
    """

    threshold: float = 0.5
    longest: Annotated[int, Ge(1)] = 5
    layers: tuple[float, ...] = (0.3, 0.8, 0.9)
    lose_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(len(self.layers) > 0, "layers is empty. Pass at least one block.")
        for layer in self.layers:
            is_valid = layer >= 0 and (isinstance(layer, int) or layer <= 1)
            self._check(is_valid, f"layers={self.layers!r}: {layer!r} must be a block index or a share of the depth")

    def blocks(self, depth: int) -> list[int]:
        indices = set()
        for layer in self.layers:
            index = layer if isinstance(layer, int) else min(round(layer * depth), depth - 1)
            self._check(
                index < depth, f"layers={self.layers!r}: block {layer} does not exist, the model reads {depth} blocks"
            )
            indices.add(index)
        return sorted(indices)

    def mix(self, hidden: Tensor) -> FrameMix:
        similarities = _compute_similarities(hidden, self.longest - 1)
        remaining: list[tuple[int, int, float]] = []
        start = 0
        for size in self._find_segments(len(hidden), similarities):
            remaining += self._merge_segment(start, size, similarities)
            start += size
        return FrameMix.from_frames(remaining)

    def groups(self, hidden: Tensor) -> list[int]:
        return self._find_segments(len(hidden), _compute_similarities(hidden, self.longest - 1))

    def choose_tokens(self, received: Tensor, groups: Sequence[int], keep: int) -> Tensor:
        frames, num_tokens = received.shape
        total = min(keep, frames * num_tokens)
        # Frames have equal shares. The remainder is spread evenly.
        ends = [total * (frame + 1) // frames for frame in range(frames)]
        counts = torch.tensor(ends, device="cpu").diff(prepend=torch.zeros(1, dtype=torch.long, device="cpu"))
        score = received.float().nan_to_num(nan=-torch.inf)
        kept = top_mask(score, torch.ones_like(score, dtype=torch.bool), counts, num_tokens)
        for start, size in zip(accumulate(groups, initial=0), groups, strict=False):
            for frame in range(start + 1, start + size - 1):
                kept[frame] = _select_by_stretch(score[frame], int(counts[frame]))
        return kept

    def _find_segments(self, frames: int, similarities: list[list[float]]) -> list[int]:
        """Return the number of frames of each segment. `similarities` is the result of `_compute_similarities`."""
        starts, running = [0], 1.0
        for frame in range(1, frames):
            distance = frame - starts[-1]
            if distance < self.longest:
                running = _SMOOTHING * similarities[distance - 1][starts[-1]] + (1 - _SMOOTHING) * running
            if distance >= self.longest or running < self.threshold:
                starts.append(frame)
                running = 1.0
        return [end - start for start, end in zip(starts, [*starts[1:], frames], strict=True)]

    def _merge_segment(self, start: int, size: int, similarities: list[list[float]]) -> list[tuple[int, int, float]]:
        """Return (first, second, weight) of each remaining frame of a segment."""
        unmerged = [(frame, frame, 1.0) for frame in range(start, start + size)]
        if size < 4:  # at most one frame between the ends
            return unmerged
        last = start + size - 1
        end_similarity = similarities[size - 2][start]
        merged, frame = [unmerged[0]], start + 1
        while frame < last - 1:
            similarity, is_last = similarities[0][frame], frame == last - 2
            next_similarity = similarity if is_last else similarities[0][frame + 1]
            if similarity > end_similarity and (is_last or similarity > next_similarity):
                total = max(similarity, 0.0) + max(next_similarity, 0.0)
                weight = max(similarity, 0.0) / total if total else 0.5
                if is_last and self.lose_last:
                    merged.append((frame, frame, 1.0))
                else:
                    merged.append((frame, frame + 1, weight))
                frame += 2
            else:
                merged.append((frame, frame, 1.0))
                frame += 1
        if frame == last - 1 and not self.lose_last:
            merged.append((frame, frame, 1.0))
        return [*merged, unmerged[-1]]


def _compute_similarities(hidden: Tensor, max_distance: int) -> list[list[float]]:
    """Return the mean cosine of each frame to the frame d later, for d from 1 to `max_distance`, on the host.

    Args:
        hidden: Hidden states, shape (frames, tokens, channels).
        max_distance: Maximum distance in frames.
    """
    frames = len(hidden)
    max_distance = min(max_distance, frames - 1)
    if max_distance < 1:
        return []
    x = normalize(hidden)
    # Rounding makes the similarity of unchanged frames exactly 1. Padding allows a single transfer to the host.
    rows = [round_cosines((x[distance:] * x[:-distance]).sum(-1)).mean(-1) for distance in range(1, max_distance + 1)]
    padded = torch.stack([torch.nn.functional.pad(row, (0, frames - len(row))) for row in rows])
    return padded.tolist()


def _select_by_stretch(score: Tensor, num_stretches: int) -> Tensor:
    """Return the best token of each of `num_stretches` stretches of a frame as a mask. Longer stretches come first."""
    kept = torch.zeros(score.shape, dtype=torch.bool, device="cpu")
    if not num_stretches:
        return kept
    size, num_longer = divmod(len(score), num_stretches)
    split = num_longer * (size + 1)
    for start, part in ((0, score[:split].view(num_longer, size + 1)), (split, score[split:].view(-1, size))):
        if len(part):
            # argmax may return any of several equal maxima. Select the first.
            first = (part == part.amax(1, keepdim=True)).to(torch.uint8).argmax(1)
            kept[start + torch.arange(len(part), device="cpu") * part.shape[1] + first] = True
    return kept
