# SPDX-License-Identifier: Apache-2.0
"""stc against a naive loop."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from naive_video import stc
from videos import given, select


def draw_video(draw: random.Random, frames: int, num_tokens: int) -> Tensor:
    """Return a video of tokens with different norms and some duplicates within frames."""
    g = torch.Generator().manual_seed(draw.randrange(2**30))
    video = torch.randn(num_tokens, draw.choice([4, 7, 12]), generator=g) + torch.randn(1, generator=g)
    video = video + draw.choice([0.1, 1.0]) * torch.randn(frames, *video.shape, generator=g)
    video = video * torch.exp(draw.choice([0.0, 1.0, 2.0]) * torch.randn(frames, num_tokens, 1, generator=g))
    for _ in range(draw.randrange(4)):
        frame, target, source = (draw.randrange(n) for n in (frames, num_tokens, num_tokens))
        video[frame, target] = video[frame, source]
    return video


def test_matches_loop_in_200_cases() -> None:
    draw = random.Random(0)
    for case in range(200):
        frames, num_tokens, chunk = draw.randint(1, 9), draw.randint(3, 12), draw.choice([1, 1, 2, 3, 9])
        keep = draw.randint(1, frames * num_tokens - 1)
        video = draw_video(draw, frames, num_tokens)
        kept = (
            select("stc", given([video], [keep], [(1, num_tokens)]), chunk=chunk).keep[0].nonzero().flatten().tolist()
        )
        assert [divmod(i, num_tokens) for i in kept] == stc(video.double(), keep, chunk), case
