# SPDX-License-Identifier: Apache-2.0
"""stc against a loop written from its description."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from naive_video import stc
from videos import given, select


def made_up(draw: random.Random, frames: int, places: int) -> Tensor:
    """Return a video of tokens with various norms, some of them duplicated in a frame."""
    g = torch.Generator().manual_seed(draw.randrange(2**30))
    video = torch.randn(places, draw.choice([4, 7, 12]), generator=g) + torch.randn(1, generator=g)
    video = video + draw.choice([0.1, 1.0]) * torch.randn(frames, *video.shape, generator=g)
    video = video * torch.exp(draw.choice([0.0, 1.0, 2.0]) * torch.randn(frames, places, 1, generator=g))
    for _ in range(draw.randrange(4)):
        frame, one, other = (draw.randrange(n) for n in (frames, places, places))
        video[frame, one] = video[frame, other]
    return video


def test_matches_loop_in_200_cases() -> None:
    draw = random.Random(0)
    for case in range(200):
        frames, places, chunk = draw.randint(1, 9), draw.randint(3, 12), draw.choice([1, 1, 2, 3, 9])
        keep = draw.randint(1, frames * places - 1)
        video = made_up(draw, frames, places)
        kept = select("stc", given([video], [keep], [(1, places)]), chunk=chunk).keep[0].nonzero().flatten().tolist()
        assert [divmod(i, places) for i in kept] == stc(video.double(), keep, chunk), case
