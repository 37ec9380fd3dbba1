# SPDX-License-Identifier: Apache-2.0
"""Video budgets: tokens per second, tokens or a share per frame, or weights that split a budget over the frames."""

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
    """Facts about a segment that is a video, or a frame of a video.

    Args:
        length: Number of frames of the video, as the decoder sees them. None if it is unknown.
        frame: Index of the frame, if the segment is one frame. None if it is a whole video.
        seconds: Duration of one frame, from the arguments of the caller. None if it is unknown.
        joined: Number of sampled frames that form one frame of the decoder.
    """

    length: int | None
    frame: int | None = None
    seconds: float | None = None
    joined: int = 1

    def duration(self, fps: float | None) -> float | None:
        """Return the duration of the segment in seconds, or None if it is unknown.

        Args:
            fps: Sampled frames per second. None: use `seconds`.
        """
        seconds = self.seconds if fps is None else self.joined / fps
        num_frames = self.length if self.frame is None else 1
        return None if seconds is None or num_frames is None else num_frames * seconds


@dataclass(frozen=True)
class VideoBudget:
    """Tokens per second or per frame of a video. Exactly one of `per_second`, `frames` and `frame_weights` is set.

    Args:
        per_second: Number of tokens per second.
        fps: Frames per second at which videos were sampled, for `per_second`.
        frames: An int >= 2 (tokens) or a share in (0, 1] for each frame.
        frame_weights: Weight of each frame. The kept tokens of the video are split over its frames by weight. `keep` of
            the `Budget` sets their number.

    Raises:
        BudgetError: If a value is invalid.
    """

    per_second: float | None = None
    fps: float | None = None
    frames: tuple[float | int, ...] | None = None
    frame_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_rate(self.per_second, self.fps)
        vars(self).update(frames=_read_frames(self.frames), frame_weights=_read_weights(self.frame_weights))
        if sum(value is not None for value in (self.per_second, self.frames, self.frame_weights)) != 1:
            raise BudgetError("A video budget needs exactly one of per_second, frames and frame_weights.")

    @property
    def target(self) -> str:
        """Name of the target that is set; `frame_weights` is not a target."""
        return "frames" if self.per_second is None else "per_second"

    @property
    def amount(self) -> Any:
        """Value of the target."""
        return self.frames if self.per_second is None else self.per_second

    def describe_constructor(self, keep: str, per: str) -> str:
        """Return the call of the `Budget` constructor, such as `per_second(64)`."""
        if self.frame_weights is not None:
            return f"by_frame_weights({keep}, {self.frame_weights!r})"
        if self.frames is not None:
            return f"by_frame({self.frames!r})"
        fps = "" if self.fps is None else f", fps={self.fps!r}"
        return f"per_second({self.per_second!r}{fps}{per})"


class HasVideoBudget(Protocol):
    """Part of a `Budget` that this module reads."""

    @property
    def video(self) -> VideoBudget | None: ...

    def resolve_keep(self, count: int) -> int: ...


def _check_rate(per_second: Any, fps: Any) -> None:
    """Raise BudgetError if a rate is not positive, or `fps` is set without `per_second`."""
    for name, value in (("per_second", per_second), ("fps", fps)):
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise BudgetError(f"{name}={value!r} must be a positive number per second of video.")
    if fps is not None and per_second is None:
        raise BudgetError(f"fps={fps} requires per_second=. Pass per_second=, or leave out fps.")


def _read_frames(frames: Any) -> tuple[float | int, ...] | None:
    values = _to_list("frames", frames)
    for frame, value in enumerate(values or ()):
        if not _is_number(value) or not (value >= 2 if _is_integer(value) else 0 < value <= 1):
            raise BudgetError(
                f"frames[{frame}]={value!r} must be an int >= 2 (tokens of the frame) or a float in (0, 1] (share of "
                "its tokens). Pass 1.0 to keep all tokens of a frame."
            )
    return None if values is None else tuple(map(_to_number, values))


def _read_weights(weights: Any) -> tuple[float, ...] | None:
    values = _to_list("frame_weights", weights)
    for frame, value in enumerate(values or ()):
        if not _is_number(value) or not 0 <= value < math.inf:
            raise BudgetError(f"frame_weights[{frame}]={value!r} must be a number >= 0.")
    if values is not None and not any(values):
        raise BudgetError("frame_weights are all 0. Pass at least one positive weight, or leave out frame_weights.")
    return None if values is None else tuple(map(float, values))


def resolve_videos(budget: HasVideoBudget, counts: Sequence[int], clips: Sequence[Clip | None]) -> list[int]:
    """Return the number of kept tokens per segment for a video budget, at least 1.

    Args:
        budget: Budget with `video` set.
        counts: Number of tokens of each segment of a prompt.
        clips: Clip of each segment, in order. None for an image, which keeps all its tokens, or its `keep` with
            `frame_weights`.

    Raises:
        BudgetError: If the budget lists a different number of frames, or the duration of a video is unknown.
    """
    video = budget.video
    assert video is not None
    if video.per_second is not None:
        return [
            count if clip is None else _round_count(count, video.per_second * _get_duration(video, clip))
            for count, clip in zip(counts, clips, strict=True)
        ]
    kept = [count if video.frames else budget.resolve_keep(count) for count in counts]
    for segments in _group_videos(clips):
        frames = [(counts[index], _get_frame(video, clips[index])) for index in segments]
        for index, num_kept in zip(segments, _resolve_frames(budget, video, frames), strict=True):
            kept[index] = num_kept
    return kept


def spread(total: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Split `total` tokens over frames in proportion to their weights.

    Shares are rounded down. The remainder goes to the frames with the largest fractions, one token each. Tokens above
    the limit of a frame go to the other frames in rounds, one token each, in order of decreasing weight. A frame
    without a token takes one from the frame with most tokens. Ties go to the earlier frame.

    Args:
        total: Number of tokens.
        weights: Weight of each frame.
        limits: Maximum number of tokens of each frame.

    Returns:
        The number of tokens of each frame, at least 1.

    Source:
        "DyToK" (arXiv 2512.06866, NeurIPS 2025), the budgets in the authors' code.

    Differences from the paper:
        - Every frame keeps at least one token, so `total` is exceeded if there are more frames than tokens.
        - A video that keeps all tokens does not cause an endless loop.

    Examples:
        >>> spread(10, [3.0, 1.0], limits=[6, 6])
        [6, 4]
    """
    total = min(total, sum(limits))
    # Fractions are exact, so that rounding errors do not lower a share that is a whole number.
    parts = [Fraction(weight) for weight in weights]
    exact = [total * part / sum(parts) for part in parts]
    counts = [math.floor(share) for share in exact]
    by_fraction = sorted(range(len(exact)), key=lambda frame: counts[frame] - exact[frame])
    for frame in by_fraction[: total - sum(counts)]:
        counts[frame] += 1
    counts = [min(count, limit) for count, limit in zip(counts, limits, strict=True)]
    heaviest = sorted(range(len(parts)), key=lambda frame: -parts[frame])
    while (remaining := total - sum(counts)) > 0:
        for frame in [frame for frame in heaviest if counts[frame] < limits[frame]][:remaining]:
            counts[frame] += 1
    for frame in [frame for frame, count in enumerate(counts) if count == 0]:
        counts[frame] = 1
        if (largest := max(counts)) > 1:
            counts[counts.index(largest)] -= 1
    return counts


def _resolve_frames(budget: HasVideoBudget, video: VideoBudget, frames: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of kept tokens of each frame of a video, given (tokens, index) of each frame."""
    if (weights := video.frame_weights) is not None:
        counts = [count for count, _ in frames]
        return spread(budget.resolve_keep(sum(counts)), [weights[index] for _, index in frames], counts)
    amounts = [(count, (video.frames or ())[index]) for count, index in frames]
    return [
        min(count, amount) if isinstance(amount, int) else _round_count(count, count * amount)
        for count, amount in amounts
    ]


def _group_videos(clips: Sequence[Clip | None]) -> list[list[int]]:
    """Return the indices of the segments of each video, one segment per frame."""
    videos: list[list[int]] = []
    last = -1  # index of the previous frame
    for index, clip in enumerate(clips):
        if clip is None or clip.frame is None:
            continue
        if not videos or clip.frame <= last:
            videos.append([])
        videos[-1].append(index)
        last = clip.frame
    return videos


def _get_frame(video: VideoBudget, clip: Clip | None) -> int:
    """Return the frame index of a segment. Raise BudgetError if the budget lists a different number of frames."""
    name = "frame_weights" if video.frames is None else "frames"
    num_listed = len(getattr(video, name))
    assert clip is not None and clip.frame is not None  # `_group_videos` returns only such segments
    if clip.length != num_listed:
        joined = f" ({clip.joined} sampled frames form one)" if clip.joined > 1 else ""
        raise BudgetError(
            f"{name}= lists {num_listed} frames, but the decoder sees {clip.length} frames of this video{joined}. "
            f"Pass {clip.length} numbers."
        )
    return clip.frame


def _get_duration(video: VideoBudget, clip: Clip) -> float:
    seconds = clip.duration(video.fps)
    if seconds is None or not 0 < seconds < math.inf:
        raise BudgetError(
            f"per_second={video.per_second!r} requires the duration of each video, which this processor does not "
            f"return. Pass the sampling rate, as in Budget.per_second({video.per_second!r}, fps=2.0)."
        )
    return seconds


def _round_count(count: int, requested: float) -> int:
    return min(count, max(1, round(min(requested, count))))


def _to_list(name: str, values: Any) -> list[Any] | None:
    if values is None:
        return None
    tolist: Callable[[], Any] | None = getattr(values, "tolist", None)  # of a tensor or an array
    values = values if tolist is None else tolist()
    if not isinstance(values, (list, tuple)) or not values:
        raise BudgetError(f"{name}={values!r} must be a list of one number per frame of a video, such as (64, 16, 16).")
    return list(values)


def _to_number(value: Any) -> float | int:
    return int(value) if _is_integer(value) else float(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
