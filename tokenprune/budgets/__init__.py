# SPDX-License-Identifier: Apache-2.0
"""Budgets: `keep` resolved into a number of visual tokens for each image."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, cast

from tokenprune.budgets.by_age import Tiers, aged, checked_tiers
from tokenprune.budgets.of_videos import OPTIONS, Clip, check_rate, checked_frames, checked_weights, of_videos
from tokenprune.budgets.over_layers import solve
from tokenprune.errors import BudgetError
from tokenprune.models.decoder_shape import DecoderShape

logger = logging.getLogger("tokenprune")

_PERCENTAGES = range(5, 100, 5)
_SCOPES = ("image", "frame", "prompt")
TARGETS = ("keep", "tokens", "average_tokens", "average_share", "kv_share", "flops_share", "per_second", "frames")
AGES = ("age", "step")
_SHARES = ("keep", "average_share", "kv_share", "flops_share")
_OF_IMAGES = ("keep", "tokens")
_OF_VIDEOS = ("per_second", "frames")


def _amount_of(*targets: str) -> Any:
    """Return a property: the amount of a budget that has one of these targets, None of others."""
    return property(lambda budget: budget.amount if budget.target in targets else None)


@dataclass(frozen=True, init=False, repr=False)
class Budget:
    """The number of visual tokens to keep; exactly one of the first eight arguments is given, and held as `target`, its
    name, and `amount`; an int for `keep` is held as `tokens`. Each argument is an attribute too, None if not given.

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
                     (`tokenprune.budgets.of_videos.spread`).

    Budgets of videos (`per_second`, `frames`, `frame_weights`) go with methods that cut once, at the decoder. A frame
    is such as the decoder sees it; with the last two `per` is "frame".
    All but `keep` are solved for the layer at which the method cuts, from closed forms; of a method that cuts several
    times all of them are averages over the layers.
    Raises BudgetError for anything else, and, when solved, for a target that this layer cannot reach.
    """

    target: str
    amount: Any
    per: str
    age: Tiers | None
    step: int
    fps: float | None
    frame_weights: tuple[float, ...] | None

    def __init__(
        self,
        keep: float | int | None = None,
        tokens: int | None = None,
        average_tokens: float | None = None,
        average_share: float | None = None,
        kv_share: float | None = None,
        flops_share: float | None = None,
        per_second: float | None = None,
        frames: Sequence[float | int] | None = None,
        per: str = "image",
        age: Sequence[Sequence[float | int]] | None = None,
        step: int = 1,
        fps: float | None = None,
        frame_weights: Sequence[float] | None = None,
        *,
        target: str | None = None,  # these two are for `dataclasses.replace`
        amount: Any = None,
    ) -> None:
        spelled = (keep, tokens, average_tokens, average_share, kv_share, flops_share, per_second, frames)
        given = {name: value for name, value in zip(TARGETS, spelled, strict=True) if value is not None}
        if not given and target in TARGETS:
            given = {target: amount}
        if len(given) != 1:
            raise BudgetError(
                f"a Budget needs exactly one of {', '.join(TARGETS)}; given: {', '.join(given) or 'none'}"
            )
        ((target, amount),) = given.items()
        if per not in _SCOPES:
            raise BudgetError(f"per={per!r} is not known; use one of {', '.join(map(repr, _SCOPES))}")
        if age is not None and (target not in _OF_IMAGES or per != "image"):
            raise BudgetError('age= goes with keep= or tokens=, and with per="image"')
        tiers = checked_tiers(age, step)
        check_rate(amount if target == "per_second" else None, fps)
        amount = checked_frames(amount) if target == "frames" else amount
        weights = checked_weights(frame_weights)
        if weights is not None and (target not in _OF_IMAGES or tiers is not None):
            raise BudgetError("frame_weights= goes with keep= or tokens= of a video, and without age=")
        if per == "prompt" and (target in _OF_VIDEOS or weights is not None):
            raise BudgetError('budgets of videos are for each video: leave out per="prompt"')
        if target != "frames":
            _check_number(target, amount)
        if target in _OF_IMAGES and isinstance(amount, numbers.Integral):
            target, amount = "tokens", int(amount)
        if target == "frames" or weights is not None:
            per = "frame"
        # Where tiers change nothing there is no step, so that what means the same is equal.
        step = 1 if tiers is None else step
        vars(self).update(target=target, amount=amount, per=per, age=tiers, step=step, fps=fps, frame_weights=weights)

    keep = _amount_of("keep", "tokens")
    tokens = _amount_of("tokens")
    average_tokens = _amount_of("average_tokens")
    average_share = _amount_of("average_share")
    kv_share = _amount_of("kv_share")
    flops_share = _amount_of("flops_share")
    per_second = _amount_of("per_second")
    frames = _amount_of("frames")

    def __repr__(self) -> str:
        counted = self.target == "tokens" and self.amount != 1
        given = [f"{'keep' if counted else self.target}={self.amount!r}"]
        given += [f"{name}={getattr(self, name)!r}" for name in OPTIONS if getattr(self, name) is not None]
        by_frame = self.frames is not None or self.frame_weights is not None  # and so is `per`
        given += [] if self.per == "image" or by_frame else [f"per={self.per!r}"]
        given += [] if self.age is None else [f"age={self.age!r}", f"step={self.step}"]
        return f"Budget({', '.join(given)})"

    def short(self) -> str:
        """Return the budget as one writes it after `keep=`: a number alone where that says it all."""
        plain = self.keep is not None and self.tokens != 1 and self.per == "image" and self.age is None
        return repr(self.keep) if plain else repr(self)

    def held(self) -> dict[str, Any]:
        """Return the fields by name, of which a subclass is made that resolves them in its own way."""
        return {one.name: getattr(self, one.name) for one in fields(Budget)}

    @classmethod
    def of(cls, keep: Any) -> Budget:
        """Return `keep` as a Budget: a number, or a Budget already."""
        if isinstance(keep, cls):
            return keep
        if isinstance(keep, int) and keep in _PERCENTAGES:
            _note_percentage(keep)
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
        return float(self.amount) if self.target in _SHARES else None

    @cached_property
    def of_videos(self) -> bool:
        """True if what a video keeps follows from its seconds or frames, not from its number of tokens alone."""
        return self.target in _OF_VIDEOS or self.frame_weights is not None

    def is_identity(self) -> bool:
        """Return True if this keeps every token of any image."""
        return self.target == "keep" and self.amount == 1 and self.age is None

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
        if self.target not in _OF_IMAGES:
            return self.solve([(layer, 1.0)], counts, shape=shape, text_tokens=text_tokens)[0]
        kept = [self.resolve_keep(count) for count in counts]
        return kept if self.age is None else aged(kept, self.age, self.step)

    def resolve_videos(self, counts: Sequence[int], clips: Sequence[Clip | None]) -> list[int]:
        """Return the same of a budget of videos. clips: what is known of each segment, None of an image."""
        return of_videos(self, counts, clips)

    def resolve_keep(self, count: int) -> int:
        """Return how many of `count` tokens a `keep` leaves of a new image, a share or a number."""
        if self.target == "tokens":
            return min(int(self.amount), count)
        assert self.target == "keep"  # of other budgets `solve` is asked
        return min(count, max(1, round(count * float(self.amount))))

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
        return solve(self, tuple(cuts), tuple(counts), shape, text_tokens)


@cache
def _note_percentage(tokens: int) -> None:
    """Log, once for each number, that a number that looks like a percentage counts tokens."""
    logger.warning(
        "tokenprune: keep=%d keeps %d tokens per image, not %d %%. Pass keep=%g for a share; Budget(tokens=%d) logs "
        "nothing.", tokens, tokens, tokens, tokens / 100, tokens,
    )  # fmt: skip


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
            share *= budget.amount
        else:
            left = budget.resolve_keep(left)
    return share if left is None or tokens is None else left / tokens


def _check_number(target: str, value: Any) -> None:
    """Raise BudgetError for an amount that is no number, or out of the range of its target."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or value != value:  # NaN
        raise BudgetError(f"{target} must be a number, not {value!r}")
    whole, value = isinstance(value, numbers.Integral), cast(Any, value)
    if target not in _OF_IMAGES:
        if not value > 0 or (target in _SHARES and value > 1) or value == math.inf:
            limit = ", and at most 1" if target in _SHARES else ""
            raise BudgetError(f"{target}={value!r} is out of range: it must be positive{limit}")
    elif target == "tokens" and not whole:
        raise BudgetError(f"tokens={value!r} is no number of tokens per image: use an int >= 1; keep= takes shares")
    elif whole and value < 1:
        raise BudgetError(
            f"{target}={value} keeps nothing: use an int >= 1 (tokens per image) or a float in (0, 1] (share)"
        )
    elif whole and target == "keep" and value == 1:
        raise BudgetError(
            "keep=1 could mean all tokens or a single one: use keep=1.0 for all of them, or Budget(tokens=1) for one "
            'of each image (in JSON 1.0 and {"tokens": 1})'
        )
    elif not whole and not 0 < value <= 1:
        raise BudgetError(
            f"keep={value!r} is no share: use a float in (0, 1], where 0.25 keeps a quarter of each image, or an int "
            "for tokens per image"
        )


def as_json(keep: Any) -> Any:
    """Return a checked `keep` as JSON that is read as the same: a share is a float, one token `{"tokens": 1}`."""
    return {"tokens": 1} if isinstance(keep, int) and keep == 1 else keep
