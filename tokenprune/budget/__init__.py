# SPDX-License-Identifier: Apache-2.0
"""Budgets: `keep` resolved into a number of visual tokens for each image."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tokenprune.budget.by_age import Tiers, aged, checked_tiers
from tokenprune.budget.of_videos import OPTIONS, Clip, check_rate, checked_frames, checked_weights, of_videos
from tokenprune.errors import BudgetError
from tokenprune.shapes.decoder import DecoderShape

_SCOPES = ("image", "frame", "prompt")
TARGETS = ("keep", "tokens", "average_tokens", "average_share", "kv_share", "flops_share", "per_second", "frames")
AGES = ("age", "step")
_NUMBERS = ("average_tokens", "per_second")  # targets that are no shares


@dataclass(frozen=True)
class Budget:
    """The number of visual tokens to keep; exactly one of the first eight fields is given.

    keep:            float in (0, 1]: share of the visual tokens of each image; int >= 2: tokens per image. The int 1 is
                     refused: JSON and many programs write 1.0 as 1, and all tokens would become one.
    tokens:          int >= 1: tokens per image, the same as an int for `keep`.
    average_tokens:  tokens per image averaged over the decoder's layers, what papers mean by "192 tokens".
    average_share:   share of the visual tokens of each image, averaged over the decoder's layers, in (0, 1].
    kv_share:        share of the visual tokens' KV bytes that remains, in (0, 1].
    flops_share:     share of the decoder's prefill FLOPs that remains (text included), in (0, 1].
    per_second:      tokens for each second of a video; images keep all of theirs.
    frames:          what each frame of a video keeps: an int >= 2 for tokens, or its share in (0, 1]; images keep all.
    per:             "image": every image, video or tile has the budget for itself; "frame": so has every frame of a
                     video, such as the decoder sees (Qwen's towers join two); "prompt": all visual tokens of a prompt
                     share it, and compete.
    age:             pairs (age, what is kept), for prompts of several images: an image with that many images after it
                     keeps this share of its budget, or this number of tokens. ((0, 1.0), (2, 0.5)) leaves the last two
                     images alone. It goes with `keep` or `tokens`, and with PRE_LLM methods that read no question.
    step:            ages are counted anew when the number of images is a multiple of it. Between, a prompt that gets
                     longer keeps its earlier images as they are, so that a prefix cache holds.

    fps:             frames a second at which videos were sampled, for `per_second`, in the place of what the processor
                     says, if it does (Qwen2.5-VL's).
    frame_weights:   a number for each frame of a video, by which its frames share what `keep` or `tokens` leaves of it
                     (`tokenprune.budget.of_videos.spread`).

    Budgets of videos (`per_second`, `frames`, `frame_weights`) go with methods that cut once, at the decoder. A frame
    is such as the decoder sees it; with the last two `per` is "frame".
    All but `keep` are solved for the layer at which the method cuts, from closed forms (accounting.py); of a method
    that cuts several times all of them are averages over the layers (schedule.py).
    Raises BudgetError for anything else, and, when solved, for a target that this layer cannot reach.
    """

    keep: float | int | None = None
    tokens: int | None = None
    average_tokens: float | None = None
    average_share: float | None = None
    kv_share: float | None = None
    flops_share: float | None = None
    per_second: float | None = None
    frames: tuple[float | int, ...] | None = None
    per: str = "image"
    age: Tiers | None = None
    step: int = 1
    fps: float | None = None
    frame_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        given = [name for name in TARGETS if getattr(self, name) is not None]
        counted = isinstance(self.keep, numbers.Integral) and self.keep == self.tokens  # a copy of another budget
        if len(given) != 1 + counted:
            raise BudgetError(
                f"a Budget needs exactly one of {', '.join(TARGETS)}; given: {', '.join(given) or 'none'}"
            )
        if self.per not in _SCOPES:
            raise BudgetError(f"per={self.per!r} is not known; use one of {', '.join(map(repr, _SCOPES))}")
        if self.age is not None and (given[0] not in ("keep", "tokens") or self.per != "image"):
            raise BudgetError('age= goes with keep= or tokens=, and with per="image"')
        object.__setattr__(self, "age", checked_tiers(self.age, self.step))
        if self.age is None:
            object.__setattr__(self, "step", 1)  # where tiers change nothing, so that a copy of it is no error
        self._check_videos(given[0])
        value = getattr(self, given[0])
        if given[0] == "frames":
            return
        if not _is_real(value) or value != value:  # NaN
            raise BudgetError(f"{given[0]} must be a number, not {value!r}")
        if counted:
            return
        if given[0] in ("keep", "tokens"):
            self._check_keep(given[0], value)
            if isinstance(value, numbers.Integral):
                object.__setattr__(self, "keep", int(value))
                object.__setattr__(self, "tokens", int(value))
        elif not value > 0 or (given[0] not in _NUMBERS and value > 1) or value == math.inf:
            limit = "" if given[0] in _NUMBERS else ", and at most 1"
            raise BudgetError(f"{given[0]}={value!r} is out of range: it must be positive{limit}")

    def _check_videos(self, target: str) -> None:
        check_rate(self.per_second, self.fps)
        object.__setattr__(self, "frames", checked_frames(self.frames))
        object.__setattr__(self, "frame_weights", checked_weights(self.frame_weights))
        if self.frame_weights is not None and (target not in ("keep", "tokens") or self.age is not None):
            raise BudgetError("frame_weights= goes with keep= or tokens= of a video, and without age=")
        if self.of_videos and self.per == "prompt":
            raise BudgetError('budgets of videos are for each video: leave out per="prompt"')
        if self.frames is not None or self.frame_weights is not None:
            object.__setattr__(self, "per", "frame")

    def __repr__(self) -> str:
        left_out = "keep" if self.tokens == 1 else "tokens"
        targets = [name for name in TARGETS if getattr(self, name) is not None and name != left_out]
        given = [f"{name}={getattr(self, name)!r}" for name in targets]
        by_frame = self.frames is not None or self.frame_weights is not None  # and so is `per`
        given += [f"{name}={getattr(self, name)!r}" for name in OPTIONS if getattr(self, name) is not None]
        given += [] if self.per == "image" or by_frame else [f"per={self.per!r}"]
        given += [] if self.age is None else [f"age={self.age!r}", f"step={self.step}"]
        return f"Budget({', '.join(given)})"

    def short(self) -> str:
        """Return the budget as one writes it after `keep=`: a number alone where that says it all."""
        plain = self.keep is not None and self.tokens != 1 and self.per == "image" and self.age is None
        return repr(self.keep) if plain else repr(self)

    @staticmethod
    def _check_keep(name: str, keep: Any) -> None:
        if name == "tokens" and not isinstance(keep, numbers.Integral):
            raise BudgetError(f"tokens={keep!r} is no number of tokens per image: use an int >= 1; keep= takes shares")
        if isinstance(keep, numbers.Integral):
            if keep < 1:
                raise BudgetError(
                    f"{name}={keep} keeps nothing: use an int >= 1 (tokens per image) or a float in (0, 1] (share)"
                )
            if name == "keep" and keep == 1:
                raise BudgetError(
                    "keep=1 could mean all tokens or a single one: use keep=1.0 for all of them, or Budget(tokens=1) "
                    'for one of each image (in JSON 1.0 and {"tokens": 1})'
                )
        elif not 0 < keep <= 1:
            raise BudgetError(
                f"keep={keep!r} is no share: use a float in (0, 1], where 0.25 keeps a quarter of each image, "
                "or an int for tokens per image"
            )

    @classmethod
    def of(cls, keep: Any) -> Budget:
        """Return `keep` as a Budget: a number, or a Budget already."""
        if isinstance(keep, cls):
            return keep
        if keep is None:
            raise BudgetError("keep=None keeps nothing: use a float in (0, 1], an int >= 2 or a Budget")
        return cls(keep=keep)

    @classmethod
    def of_checked(cls, keep: float | int) -> Budget:
        """Return the budget whose `keep` this is: an int is a number of tokens, 1 too."""
        return cls(tokens=keep) if isinstance(keep, int) else cls(keep=keep)

    @property
    def share(self) -> float | None:
        """The share that is asked for, of whatever the target counts; None for a number of tokens."""
        if self.tokens is not None:
            return None
        shares = (self.keep, self.average_share, self.kv_share, self.flops_share)
        return next((float(one) for one in shares if one is not None), None)

    @cached_property
    def of_videos(self) -> bool:
        """True if what a video keeps follows from its seconds or frames, not from its number of tokens alone."""
        return self.per_second is not None or self.frames is not None or self.frame_weights is not None

    def is_identity(self) -> bool:
        """Return True if this keeps every token of any image."""
        return self.keep == 1 and self.tokens is None and self.age is None

    def resolve(
        self,
        counts: Sequence[int],
        *,
        layer: int,
        shape: DecoderShape,
        text_tokens: int,
        original: Sequence[int] | None = None,
    ) -> list[int]:
        """Return how many of each segment's `counts` tokens to keep, at least 1 and at most all, for one prompt.

        layer: the decoder layer at whose input the cut is made. shape: the decoder's sizes. text_tokens: tokens of the
        prompt that are not visual (for flops_share). original: tokens of each segment at the first cut of the method,
        which only a budget of one of several cuts reads. Raises BudgetError for a budget of videos, which
        `resolve_videos` is for.
        """
        if self.of_videos:
            raise BudgetError(f"{self} is for the videos of a prompt, and nothing is known of any here: say keep=")
        if self.keep is None:
            return self.solve([(layer, 1.0)], counts, shape=shape, text_tokens=text_tokens)[0]
        kept = [self.resolve_keep(count) for count in counts]
        return kept if self.age is None else aged(kept, self.age, self.step)

    def resolve_videos(self, counts: Sequence[int], clips: Sequence[Clip | None]) -> list[int]:
        """Return the same of a budget of videos. clips: what is known of each segment, None of an image."""
        return of_videos(self, counts, clips)

    def resolve_keep(self, count: int) -> int:
        """Return how many of `count` tokens a `keep` leaves of a new image, a share or a number."""
        if self.tokens is not None:
            return min(self.tokens, count)
        assert self.keep is not None  # of other budgets `solve` is asked
        return min(count, max(1, round(count * self.keep)))

    def solve(
        self, cuts: Sequence[tuple[int, float]], counts: Sequence[int], *, shape: DecoderShape, text_tokens: int
    ) -> list[list[int]]:
        """Return for each of several cuts how many of each segment's tokens it keeps, so that this budget is what the
        decoder's layers spend on average; for one prompt.

        cuts: (layer, relative) of each, in order; counts are in proportion to `relative`, which does not rise, but at
        least 1 and at most all. counts: tokens of each segment in the layers before the first cut. shape, text_tokens:
        see `resolve`.

        `keep` counts as an average over the layers here, like `average_tokens`: a share, or a number of tokens. Raises
        BudgetError where the layers before the first cut alone spend it.
        """
        cuts = tuple(cuts)
        kept: Iterable[tuple[int, ...]]
        if self.flops_share is not None:
            kept = _kept_for_flops(self, cuts, tuple(counts), shape, text_tokens)
        else:
            kept = zip(*(_kept_on_average(self, cuts, count, shape) for count in counts), strict=True)
        return [list(of_cut) for of_cut in kept]


def joint_share(budgets: Sequence[Budget], tokens: int | None = None) -> float | None:
    """Return the share of an image's visual tokens that is left when one budget after the other is applied.

    tokens: how many the image has; each budget then leaves a whole number of them. None where that is not known: a
    budget that is a number of tokens, or a target averaged over the layers, has no share then, and the result is None.
    """
    share, left = 1.0, tokens
    for budget in budgets:
        if budget.keep is None or (left is None and budget.tokens is not None):
            return None
        if left is None:
            share *= budget.keep
        else:
            left = budget.resolve_keep(left)
    return share if left is None or tokens is None else left / tokens


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_json(keep: Any) -> Any:
    """Return a checked `keep` as JSON that is read as the same: a share is a float, one token `{"tokens": 1}`."""
    return {"tokens": 1} if isinstance(keep, int) and keep == 1 else keep


@lru_cache(maxsize=4096)
def _kept_on_average(
    budget: Budget, cuts: tuple[tuple[int, float], ...], count: int, shape: DecoderShape
) -> tuple[int, ...]:
    """Return the number of a segment's `count` tokens that each cut keeps; see `Budget.solve`."""
    sizes = [1] * shape.layers if budget.kv_share is None else shape.kv_widths
    ends = [layer for layer, _ in cuts[1:]] + [shape.layers]
    weights = [sum(sizes[layer:end]) for (layer, _), end in zip(cuts, ends, strict=True)]
    before, whole = sum(sizes[: cuts[0][0]]), sum(sizes)
    tokens = budget.average_tokens or budget.tokens or 0
    share = min(1.0, float(tokens) / count if budget.share is None else budget.share)
    if before and before >= share * whole * (1 - 1e-12) and share < 1:
        raise BudgetError(
            f"{budget} cannot be reached by a cut at layer {cuts[0][0]} of {shape.layers}: the layers before it alone "
            f"spend {before / whole:.3f} of the visual tokens; cut earlier or ask for more"
        )

    def spent(scale: float) -> float:
        kept = _kept(cuts, count, scale)
        return before * count + sum(weight * number for weight, number in zip(weights, kept, strict=True))

    return tuple(map(round, _kept(cuts, count, _largest(spent, share * whole * count, cuts))))


@lru_cache(maxsize=1024)
def _kept_for_flops(
    budget: Budget, cuts: tuple[tuple[int, float], ...], counts: tuple[int, ...], shape: DecoderShape, text: int
) -> tuple[tuple[int, ...], ...]:
    """For each cut, how many of each segment's `counts` tokens it keeps; see `Budget.solve`."""
    target, visual, first = budget.flops_share, sum(counts), cuts[0][0]
    assert target is not None  # `Budget.solve` looks
    ends = [layer for layer, _ in cuts[1:]] + [shape.layers]
    spans = [end - layer for (layer, _), end in zip(cuts, ends, strict=True)]

    def flops(kept: Sequence[float]) -> float:
        behind = [text + number for number, span in zip(kept, spans, strict=True) for _ in range(span)]
        return shape.prefill_flops([text + visual] * first + behind)

    full, least = flops([visual] * len(cuts)), flops([0] * len(cuts))
    if least >= target * full:
        raise BudgetError(
            f"{budget} cannot be reached by a cut at layer {first}: text and the layers before it alone cost "
            f"{least / full:.3f} of the prefill; cut earlier or ask for more"
        )

    def spent(scale: float) -> float:
        return flops([sum(of_cut) for of_cut in zip(*(_kept(cuts, count, scale) for count in counts), strict=True)])

    scale = _largest(spent, target * full, cuts)
    return tuple(zip(*(map(round, _kept(cuts, count, scale)) for count in counts), strict=True))


def _kept(cuts: tuple[tuple[int, float], ...], count: int, scale: float) -> list[float]:
    return [max(1.0, min(count, scale * relative * count)) for _, relative in cuts]


def _largest(spent: Callable[[float], float], target: float, cuts: tuple[tuple[int, float], ...]) -> float:
    """Return the largest scale that does not spend more than `target`, by bisection: the cost grows with the scale."""
    low, high = 0.0, 1 / min(relative for _, relative in cuts)  # at which every cut keeps all
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) > target else (middle, high)
    return low
