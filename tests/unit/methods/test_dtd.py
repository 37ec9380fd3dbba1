# SPDX-License-Identifier: Apache-2.0
"""dtd against the invariants of its description; the numbers refer to that list."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from naive_video import Places, cosine, dtd
from tests.unit.methods.test_video_methods import PLACES, kept_of, moving, places, tokens_of
from tokenprune import OptionError
from tokenprune.testing import visual_tokens
from zoo import FAMILIES

ALL = 10**6


def kept(video: Tensor, keep: int = ALL, **options: Any) -> Places:
    count = video.shape[0] * video.shape[1]
    (found,) = kept_of("dtd", tokens_of("dtd", [video], [min(keep, count)]), **options)
    return places(found, video.shape[1])


@each("against", ["before", "kept"])
@each("threshold", [-1.0, -0.2, 0.0, 0.5, 0.9, 1.0])
def test_matches_loop(threshold: float, against: str) -> None:
    g = torch.Generator().manual_seed(0)
    drifting = torch.randn(1, PLACES, 12, generator=g) + torch.randn(9, PLACES, 12, generator=g).cumsum(0) / 2
    for video in (moving(9)[0], drifting, moving(1)[0], moving(2)[0]):
        count = video.shape[0] * PLACES
        for keep in (3, PLACES, PLACES + 5, count // 2, count):
            want = dtd(video.double(), min(keep, count), threshold=threshold, against=against)
            assert kept(video, keep, threshold=threshold, against=against) == want, (count, keep)


def test_static_video_keeps_first_frame() -> None:
    """1: and 2, at a threshold of 1 all stay."""
    still = moving(1)[0].repeat(5, 1, 1)
    assert kept(still, threshold=0.999) == [(0, p) for p in range(PLACES)]
    assert len(kept(still, threshold=1.0)) == 5 * PLACES == len(kept(moving(5)[0], threshold=1.0))


def test_lower_threshold_drops_more() -> None:
    """3: a lower threshold drops a superset."""
    video = torch.randn(8, PLACES, 12, generator=torch.Generator().manual_seed(0))
    found = [set(kept(video, threshold=threshold)) for threshold in (-1.0, -0.3, 0.1, 0.5, 0.9, 1.0)]
    assert all(fewer <= more for fewer, more in pairwise(found))
    assert len({len(one) for one in found}) > 3


@pytest.mark.parametrize("against", ["before", "kept"])
def test_later_frames_do_not_change_selection(against: str) -> None:
    """5: a stream is cut as it arrives."""
    video = moving(9)[0]
    whole = kept(video, against=against)
    for frames in range(1, 9):
        assert kept(video[:frames], against=against) == [one for one in whole if one[0] < frames]


def test_scale_does_not_matter() -> None:
    """8: the scale of a token does not matter, and a zero token is similar to nothing."""
    video = moving(6)[0]
    scale = 2.0 ** torch.randint(-3, 4, (6, PLACES, 1), generator=torch.Generator().manual_seed(0))
    assert kept(video * scale) == kept(video)
    video[3, 2] = 0
    assert {(3, 2), (4, 2)} <= set(kept(video, threshold=0.0)) and (3, 2) not in kept(video, threshold=-0.5)


def test_bound_selects_like_evs() -> None:
    """10: at the threshold that leaves so many, and under a bound."""
    video = torch.randn(6, PLACES, 12, generator=torch.Generator().manual_seed(1))
    x = video.double()
    alike = sorted(cosine(x[t, p], x[t - 1, p]) for t in range(1, 6) for p in range(PLACES))
    for keep in (PLACES + 1, 15, 30):
        evs = places(kept_of("evs", tokens_of("evs", [video], [keep]))[0])
        # Halfway to the next: another processor rounds the last bit of a cosine otherwise.
        threshold = sum(alike[keep - PLACES - 1 : keep - PLACES + 1]) / 2
        assert kept(video, threshold=threshold) == evs == kept(video, keep, threshold=1.0)


def test_slow_drift_accumulates_against_kept() -> None:
    """Steps of 22.5 degrees are similar to the previous frame, but two steps are not."""
    angle = torch.arange(9) * torch.pi / 8
    video = torch.stack([angle.cos(), angle.sin(), *torch.zeros(10, 9)], 1)[:, None]
    assert kept(video, threshold=0.8) == [(0, 0)]
    assert kept(video, threshold=0.8, against="kept") == [(0, 0), (2, 0), (4, 0), (6, 0), (8, 0)]


@pytest.mark.parametrize("against", ["before", "kept"])
def test_token_without_reference_is_kept(against: str) -> None:
    """The extra tokens of a larger frame have no reference at any threshold; in the next frame they have."""
    token = torch.eye(12)[[0]]
    tokens = visual_tokens(token.expand(4 + 6 + 6, -1), keep=16, frames=[[4, 6, 6]], modality="video")
    assert kept_of("dtd", tokens, threshold=-0.5, against=against) == [[0, 1, 2, 3, 8, 9]]


def test_content_decides_without_bound(build: Any) -> None:
    """In a model, videos are independent, an image keeps all tokens, and `keep=1.0` drops none."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1, 0), video=([5, 3], 4))
    before = model(**inputs).logits
    seen = {}
    for keep in (None, 0.25, 1.0):
        with torch.no_grad(), tokenprune.patched(model, "dtd", keep=keep, threshold=0.1, record=True):
            logits = model(**inputs).logits
            seen[keep] = tokenprune.stats(model).visual_tokens_out
            assert torch.equal(logits, before) == (keep == 1.0)
    assert seen[0.25] < seen[None] < seen[1.0] == sum(map(sum, inputs.counts))


@pytest.mark.parametrize("wrong", [{"threshold": 1.5}, {"threshold": "half"}, {"against": "first"}])
def test_invalid_options_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"dtd.*{next(iter(wrong))}"):
        tokenprune.method("dtd", **wrong)
