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

_NEW = 0.9  # weight of a frame's own similarity in the running one


@register("earlytom", site=Site.IN_ENCODER, paper="arXiv 2605.30010, CVPR 2026", merges=True)
@dataclass(frozen=True)
class EarlyTom(FrameMerger):
    """Merge frames of a video that are alike inside the vision tower, so that it runs on fewer of them, and keep of the
    others what the tower attends to (EarlyTom).

    After three blocks the frames fall into segments: a new one begins where the running similarity to a segment's
    first frame gets too low. Within a segment the first and the last frame stay; of those between, two neighbours that
    are more alike than these become one. Then each frame left keeps an equal part of the budget: in a short segment,
    and at the ends of one, what receives most attention; between, the same in as many stretches of the frame as tokens
    stay, so that they cover it.

    `keep` counts tokens of the whole video. Where the frames left hold fewer, all of these stay. Images are left alone.

    threshold: running cosine to a segment's first frame below which a new segment begins; above 1 nothing merges.
    longest: frames of a segment, at most.
    layers: blocks after which frames merge: shares of the depth that the model reads, or indices.
    lose_last: drop the last of four or more frames of a segment but one, where it found no partner, as the authors'
    code does; False keeps it.

    Source: "EarlyTom: Early Token Compression Completes Fast Video Understanding", the authors' code.

    Differs from the paper: one setting (the authors set thresholds and layers for each benchmark); exact counts, spread
    evenly over the frames; the last two frames between are averaged (the code takes the first alone, and loses the last
    one); of two similarities a negative one counts as 0 in weights; each video is for itself. The cut inside the
    language model is left out: compose it with `fastv`. The paper's text was not read.
    """

    threshold: float = 0.5
    longest: Annotated[int, Ge(1)] = 5
    layers: tuple[float, ...] = (0.3, 0.8, 0.9)
    lose_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(len(self.layers) > 0, "layers names no block after which frames merge")
        for layer in self.layers:
            fine = layer >= 0 and (isinstance(layer, int) or layer <= 1)
            self._check(fine, f"layers={self.layers!r}: {layer!r} is no index of a block, and no share of the depth")

    def blocks(self, depth: int) -> list[int]:
        found = set()
        for layer in self.layers:
            index = layer if isinstance(layer, int) else min(round(layer * depth), depth - 1)
            self._check(
                index < depth, f"layers={self.layers!r}: the model reads {depth} blocks of the vision tower, from 0"
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
        # All frames ask for as much: what does not divide is spread evenly.
        ends = [total * (frame + 1) // frames for frame in range(frames)]
        counts = torch.tensor(ends, device="cpu").diff(prepend=torch.zeros(1, dtype=torch.long, device="cpu"))
        score = received.float().nan_to_num(nan=-torch.inf)
        stays = top_mask(score, torch.ones_like(score, dtype=torch.bool), counts, places)
        for start, size in zip(accumulate(groups, initial=0), groups, strict=False):
            for frame in range(start + 1, start + size - 1):
                stays[frame] = _best_of_stretches(score[frame], int(counts[frame]))
        return stays

    def _segments(self, frames: int, alike: list[list[float]]) -> list[int]:
        """Return how many frames each segment has. alike: see `_similarities`."""
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
        """Return (first, second, weight) of each frame that is left of a segment."""
        whole = [(frame, frame, 1.0) for frame in range(start, start + size)]
        if size < 4:  # nothing, or one frame, between the first and the last
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
    """Return, for each distance from 1 to `most` frames, the mean over places of the cosine of each frame to the one so
    far after it, on the host. hidden: `[F, N, D]`."""
    frames = len(hidden)
    most = min(most, frames - 1)
    if most < 1:
        return []
    x = normalize(hidden)
    # Rounded, so that of frames that do not change all are 1; padded to one length: one read for all.
    rows = [round_cosines((x[far:] * x[:-far]).sum(-1)).mean(-1) for far in range(1, most + 1)]
    padded = torch.stack([torch.nn.functional.pad(row, (0, frames - len(row))) for row in rows])
    return padded.tolist()


def _best_of_stretches(score: Tensor, number: int) -> Tensor:
    """bool `[P]`: the best of each of `number` stretches of a frame, of which the first ones are a token longer."""
    stays = torch.zeros(score.shape, dtype=torch.bool, device="cpu")
    if not number:
        return stays
    size, longer = divmod(len(score), number)
    split = longer * (size + 1)
    for start, part in ((0, score[:split].view(longer, size + 1)), (split, score[split:].view(-1, size))):
        if len(part):
            # argmax names any of equal values; the first of them is asked for.
            first = (part == part.amax(1, keepdim=True)).to(torch.uint8).argmax(1)
            stays[start + torch.arange(len(part), device="cpu") * part.shape[1] + first] = True
    return stays
