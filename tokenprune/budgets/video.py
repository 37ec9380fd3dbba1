# SPDX-License-Identifier: Apache-2.0
"""Budgets of videos: tokens for each second, a number or a share for each frame, or weights that divide a budget."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from tokenprune.errors import BudgetError


@dataclass(frozen=True)
class Clip:
    """A segment that is a video, or a frame of one, as budgets of videos see it.

    length:  frames of the whole video, such as the decoder sees them; None: this is not known.
    frame:   index of the frame that the segment is; None: it is the whole video.
    seconds: of video that a frame stands for, as the caller's arguments tell it; None: they do not.
    joined:  sampled frames that the decoder sees as one.
    """

    length: int | None
    frame: int | None = None
    seconds: float | None = None
    joined: int = 1

    def duration(self, fps: float | None) -> float | None:
        """Return the seconds that the segment lasts; None where that is not known. fps: sampled frames a second."""
        seconds = self.seconds if fps is None else self.joined / fps
        number = self.length if self.frame is None else 1
        return None if seconds is None or number is None else number * seconds


@dataclass(frozen=True)
class VideoBudget:
    """Tokens for each second or frame of a video. Exactly one of `per_second`, `frames` and `frame_weights` is set.

    per_second:    Tokens for each second.
    fps:           Frames per second at which videos were sampled, for `per_second`.
    frames:        For each frame an int >= 2 (tokens) or a share in (0, 1].
    frame_weights: Weights by which the frames divide the tokens that the budget's `keep` leaves of the video.

    Raises:
        BudgetError: If a value is invalid; the message names the frame.
    """

    per_second: float | None = None
    fps: float | None = None
    frames: tuple[float | int, ...] | None = None
    frame_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_rate(self.per_second, self.fps)
        vars(self).update(frames=_read_frames(self.frames), frame_weights=_read_weights(self.frame_weights))
        if sum(value is not None for value in (self.per_second, self.frames, self.frame_weights)) != 1:
            raise BudgetError("a budget of videos needs exactly one of per_second, frames and frame_weights")

    @property
    def target(self) -> str:
        """Name of the target that is set; `frame_weights` is not a target."""
        return "frames" if self.per_second is None else "per_second"

    @property
    def amount(self) -> Any:
        """Value of the target."""
        return self.frames if self.per_second is None else self.per_second

    def describe_constructor(self, keep: str, per: str) -> str:
        """Return the call of the constructor of `Budget` that makes this budget."""
        if self.frame_weights is not None:
            return f"by_frame_weights({keep}, {self.frame_weights!r})"
        if self.frames is not None:
            return f"by_frame({self.frames!r})"
        fps = "" if self.fps is None else f", fps={self.fps!r}"
        return f"per_second({self.per_second!r}{fps}{per})"


class HasVideoBudget(Protocol):
    """The part of a `Budget` that is read here."""

    @property
    def video(self) -> VideoBudget | None: ...

    def resolve_keep(self, count: int) -> int: ...


def _check_rate(per_second: Any, fps: Any) -> None:
    """Raise BudgetError for a rate that is not positive, or for `fps` without `per_second`."""
    for name, value in (("per_second", per_second), ("fps", fps)):
        if value is not None and not (_is_real(value) and 0 < value < math.inf):
            raise BudgetError(f"{name}={value!r} must be a positive number, for each second of video")
    if fps is not None and per_second is None:
        raise BudgetError(f"fps={fps} tells how long a video is, and no per_second= is given: add it, or leave fps out")


def _read_frames(frames: Any) -> tuple[float | int, ...] | None:
    listed = _listed("frames", frames)
    for frame, value in enumerate(listed or ()):
        if not _is_real(value) or not (value >= 2 if _is_whole(value) else 0 < value <= 1):
            raise BudgetError(
                f"frames[{frame}]={value!r} must be an int >= 2 (tokens of the frame) or a float in (0, 1] (its "
                "share): every frame keeps a token at least, and 1.0 keeps it whole"
            )
    return None if listed is None else tuple(map(_plain, listed))


def _read_weights(weights: Any) -> tuple[float, ...] | None:
    listed = _listed("frame_weights", weights)
    for frame, value in enumerate(listed or ()):
        if not _is_real(value) or not 0 <= value < math.inf:
            raise BudgetError(f"frame_weights[{frame}]={value!r} must be a number that is 0 or more")
    if listed is not None and not any(listed):
        raise BudgetError("frame_weights are all 0: give the frames that matter a weight, or leave frame_weights out")
    return None if listed is None else tuple(map(float, listed))


def resolve_videos(budget: HasVideoBudget, counts: Sequence[int], clips: Sequence[Clip | None]) -> list[int]:
    """Return how many of each segment's `counts` tokens a budget of videos keeps, at least 1 and at most all.

    Args:
        clips: The clip of each segment of a prompt, in order. None for an image, which keeps all its tokens, or with
            `frame_weights` its `keep`.

    Raises:
        BudgetError: If the budget does not fit a video, or too little is known about the video.
    """
    video = budget.video
    assert video is not None
    if video.per_second is not None:
        return [
            count if clip is None else _whole(count, video.per_second * _duration(video, clip))
            for count, clip in zip(counts, clips, strict=True)
        ]
    kept = [count if video.frames else budget.resolve_keep(count) for count in counts]
    for segments in _videos(clips):
        frames = [(counts[index], _frame(video, clips[index])) for index in segments]
        for index, num_kept in zip(segments, _of_frames(budget, video, frames), strict=True):
            kept[index] = num_kept
    return kept


def spread(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Return how many of `total` tokens each frame gets by its weight, at most `most` and at least 1 (DyToK).

    Shares are rounded down, and what is left goes to the largest fractions, one each. What a frame cannot take goes in
    rounds to the others, one each, the heaviest first. A frame that would get nothing gets 1 of the frame that has
    most. Of equal ones the earlier comes first.

    Source: DyToK (arXiv 2512.06866, NeurIPS 2025), the budgets of its code. Differs from it: no frame is left without
    a token, so that `total` may be exceeded where there are more frames than tokens; and no endless loop where all
    tokens of a video are kept.
    """
    total = min(total, sum(most))
    # Exact, so that a share which is a whole number is not missed by its last bit.
    parts = [Fraction(weight) for weight in weights]
    exact = [total * part / sum(parts) for part in parts]
    given = [math.floor(one) for one in exact]
    first = sorted(range(len(exact)), key=lambda frame: given[frame] - exact[frame])
    for frame in first[: total - sum(given)]:
        given[frame] += 1
    given = [min(number, limit) for number, limit in zip(given, most, strict=True)]
    heaviest = sorted(range(len(parts)), key=lambda frame: -parts[frame])
    while (left := total - sum(given)) > 0:
        for frame in [one for one in heaviest if given[one] < most[one]][:left]:
            given[frame] += 1
    for frame in [one for one, number in enumerate(given) if number == 0]:
        given[frame] = 1
        if (largest := max(given)) > 1:
            given[given.index(largest)] -= 1
    return given


def _of_frames(budget: HasVideoBudget, video: VideoBudget, frames: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of kept tokens of each frame of a video. frames: (tokens, index) of each."""
    if (weights := video.frame_weights) is not None:
        counts = [count for count, _ in frames]
        return spread(budget.resolve_keep(sum(counts)), [weights[index] for _, index in frames], counts)
    amounts = [(count, (video.frames or ())[index]) for count, index in frames]
    return [
        min(count, amount) if isinstance(amount, int) else _whole(count, count * amount) for count, amount in amounts
    ]


def _videos(clips: Sequence[Clip | None]) -> list[list[int]]:
    """Return the segments of each video, one for each frame."""
    videos: list[list[int]] = []
    last = -1  # frame before
    for index, clip in enumerate(clips):
        if clip is None or clip.frame is None:
            continue
        if not videos or clip.frame <= last:
            videos.append([])
        videos[-1].append(index)
        last = clip.frame
    return videos


def _frame(video: VideoBudget, clip: Clip | None) -> int:
    """Return which frame a segment is, of a video that has as many as the budget lists."""
    name = "frame_weights" if video.frames is None else "frames"
    listed = len(getattr(video, name))
    assert clip is not None and clip.frame is not None  # `_videos` names no others
    if clip.length != listed:
        joined = f" ({clip.joined} of those sampled are joined to one)" if clip.joined > 1 else ""
        raise BudgetError(
            f"{name}= lists {listed} frames, and the decoder sees {clip.length} of this video{joined}: list "
            f"{clip.length} numbers"
        )
    return clip.frame


def _duration(video: VideoBudget, clip: Clip) -> float:
    seconds = clip.duration(video.fps)
    if seconds is None or not 0 < seconds < math.inf:
        raise BudgetError(
            f"per_second={video.per_second!r}: nothing tells how long a video of this call lasts (Qwen2.5-VL's "
            "processor does, by second_per_grid_ts): give the frames a second at which it was sampled, as in "
            f"Budget.per_second({video.per_second!r}, fps=2.0)"
        )
    return seconds


def _whole(count: int, wanted: float) -> int:
    return min(count, max(1, round(min(wanted, count))))


def _listed(name: str, given: Any) -> list[Any] | None:
    if given is None:
        return None
    plain: Callable[[], Any] | None = getattr(given, "tolist", None)  # of a tensor or an array
    given = given if plain is None else plain()
    if not isinstance(given, (list, tuple)) or not given:
        raise BudgetError(f"{name}={given!r} must list a number for each frame of a video, such as (64, 16, 16)")
    return list(given)


def _plain(value: Any) -> float | int:
    return int(value) if _is_whole(value) else float(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
