# SPDX-License-Identifier: Apache-2.0
"""stc against a loop written from its description."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from naive_video import stc
from videos import given, moving, select


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
    """Other sizes, chunks, budgets and ties in each."""
    draw = random.Random(0)
    for case in range(200):
        frames, places, chunk = draw.randint(1, 9), draw.randint(3, 12), draw.choice([1, 1, 2, 3, 9])
        keep = draw.randint(1, frames * places - 1)
        video = made_up(draw, frames, places)
        kept = select("stc", given([video], [keep], [(1, places)]), chunk=chunk).keep[0].nonzero().flatten().tolist()
        assert [divmod(i, places) for i in kept] == stc(video.double(), keep, chunk), case


def test_long_tokens_weigh_more_in_memory() -> None:
    """Tokens similar to a long token of the first frame are dropped, but kept if it is rescaled to the common norm."""
    g = torch.Generator().manual_seed(0)
    first = torch.randn(1, 8, 12, generator=g)
    frame = torch.randn(1, 8, 12, generator=g)
    frame[0, 5] = first[0, 2] * 0.5
    kept = []
    for length in (1.0, 1e3):
        first[0, 2] *= length
        tokens = given([torch.cat([first, frame])], [8], [(1, 8)])
        kept.append(select("stc", tokens, chunk=1).keep[0, 8:].nonzero().flatten().tolist())
    assert 5 in kept[0] and 5 not in kept[1]


def test_later_frames_do_not_change_selection() -> None:
    g = torch.Generator().manual_seed(0)
    video = moving(8, 2, 3)
    other = video.clone()
    other[5:] = torch.randn(3, 6, 12, generator=g)
    one, two = (select("stc", given([x], [24], [(2, 3)])).keep[0].nonzero().flatten().tolist() for x in (video, other))
    assert [i for i in one if i < 30] == [i for i in two if i < 30] and one != two
