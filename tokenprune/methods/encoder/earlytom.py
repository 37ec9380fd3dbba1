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

_NEW = 0.9  # weight of the current frame in the running similarity


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

    Example:
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
            fine = layer >= 0 and (isinstance(layer, int) or layer <= 1)
            self._check(fine, f"layers={self.layers!r}: {layer!r} must be a block index or a share of the depth")

    def blocks(self, depth: int) -> list[int]:
        found = set()
        for layer in self.layers:
            index = layer if isinstance(layer, int) else min(round(layer * depth), depth - 1)
            self._check(
                index < depth, f"layers={self.layers!r}: block {layer} does not exist, the model reads {depth} blocks"
            )
            found.add(index)
        return sorted(found)

    def mix(self, hidden: Tensor) -> FrameMix:
        alike = _similarities(hidden, self.longest - 1)
        left: list[tuple[int, int, float]] = []
        start = 0
        for size in self._segments(len(hidden), alike):
            left += self._mixed(start, size, alike)
            start += size
        return FrameMix.from_frames(left)

    def groups(self, hidden: Tensor) -> list[int]:
        return self._segments(len(hidden), _similarities(hidden, self.longest - 1))

    def choose_tokens(self, received: Tensor, groups: Sequence[int], keep: int) -> Tensor:
        frames, places = received.shape
        total = min(keep, frames * places)
        # Frames have equal shares. The remainder is spread evenly.
        ends = [total * (frame + 1) // frames for frame in range(frames)]
        counts = torch.tensor(ends, device="cpu").diff(prepend=torch.zeros(1, dtype=torch.long, device="cpu"))
        score = received.float().nan_to_num(nan=-torch.inf)
        stays = top_mask(score, torch.ones_like(score, dtype=torch.bool), counts, places)
        for start, size in zip(accumulate(groups, initial=0), groups, strict=False):
            for frame in range(start + 1, start + size - 1):
                stays[frame] = _best_of_stretches(score[frame], int(counts[frame]))
        return stays

    def _segments(self, frames: int, alike: list[list[float]]) -> list[int]:
        """Return the number of frames of each segment. `alike` is the result of `_similarities`."""
        starts, running = [0], 1.0
        for frame in range(1, frames):
            apart = frame - starts[-1]
            if apart < self.longest:
                running = _NEW * alike[apart - 1][starts[-1]] + (1 - _NEW) * running
            if apart >= self.longest or running < self.threshold:
                starts.append(frame)
                running = 1.0
        return [end - start for start, end in zip(starts, [*starts[1:], frames], strict=True)]

    def _mixed(self, start: int, size: int, alike: list[list[float]]) -> list[tuple[int, int, float]]:
        """Return (first, second, weight) of each remaining frame of a segment."""
        whole = [(frame, frame, 1.0) for frame in range(start, start + size)]
        if size < 4:  # at most one frame between the ends
            return whole
        last = start + size - 1
        bar = alike[size - 2][start]
        found, frame = [whole[0]], start + 1
        while frame < last - 1:
            here, final = alike[0][frame], frame == last - 2
            following = here if final else alike[0][frame + 1]
            if here > bar and (final or here > following):
                both = max(here, 0.0) + max(following, 0.0)
                weight = max(here, 0.0) / both if both else 0.5
                if final and self.lose_last:
                    found.append((frame, frame, 1.0))
                else:
                    found.append((frame, frame + 1, weight))
                frame += 2
            else:
                found.append((frame, frame, 1.0))
                frame += 1
        if frame == last - 1 and not self.lose_last:
            found.append((frame, frame, 1.0))
        return [*found, whole[-1]]


def _similarities(hidden: Tensor, most: int) -> list[list[float]]:
    """Return the mean cosine of each frame to the frame d later, for d from 1 to `most`, on the host.

    Args:
        hidden: Hidden states, shape (frames, tokens, channels).
        most: Maximum distance in frames.
    """
    frames = len(hidden)
    most = min(most, frames - 1)
    if most < 1:
        return []
    x = normalize(hidden)
    # Rounding makes the similarity of unchanged frames exactly 1. Padding allows a single transfer to the host.
    rows = [round_cosines((x[far:] * x[:-far]).sum(-1)).mean(-1) for far in range(1, most + 1)]
    padded = torch.stack([torch.nn.functional.pad(row, (0, frames - len(row))) for row in rows])
    return padded.tolist()


def _best_of_stretches(score: Tensor, number: int) -> Tensor:
    """Return the best token of each of `number` stretches of a frame as a mask. Longer stretches come first."""
    stays = torch.zeros(score.shape, dtype=torch.bool, device="cpu")
    if not number:
        return stays
    size, longer = divmod(len(score), number)
    split = longer * (size + 1)
    for start, part in ((0, score[:split].view(longer, size + 1)), (split, score[split:].view(-1, size))):
        if len(part):
            # argmax may return any of several equal maxima. Select the first.
            first = (part == part.amax(1, keepdim=True)).to(torch.uint8).argmax(1)
            stays[start + torch.arange(len(part), device="cpu") * part.shape[1] + first] = True
    return stays
