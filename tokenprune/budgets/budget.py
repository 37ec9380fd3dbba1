# SPDX-License-Identifier: Apache-2.0
"""`Budget`: how many visual tokens to keep, and the functions that read one from a number or from JSON."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, cast

from tokenprune.budgets.by_age import Ages, apply_ages
from tokenprune.budgets.checks import IMAGE_TARGETS, SHARE_TARGETS, TARGETS, check_number, check_one_target
from tokenprune.budgets.over_layers import CostShare, solve
from tokenprune.budgets.video import Clip, VideoBudget, resolve_videos
from tokenprune.errors import BudgetError
from tokenprune.models.decoder_shape import DecoderShape

logger = logging.getLogger("tokenprune")

_JSON_KEYS = (*TARGETS, "age", "step", "fps", "frame_weights")
_SCOPES = ("image", "frame", "prompt")
_PERCENTAGES = range(5, 100, 5)


@dataclass(frozen=True, repr=False)
class Budget:
    """The number of visual tokens to keep.

    Pass exactly one of the first four arguments, or use one of the constructors: `from_kv_share`, `from_flops_share`,
    `per_second`, `by_frame`, `by_frame_weights`, `by_age`. All targets but `keep` and `tokens` are solved in closed
    form for the layer at which a method cuts. If a method cuts several times, the target is an average over the layers.

    Args:
        keep: Float in (0, 1]: share of the visual tokens of each image. Int >= 2: tokens per image. The int 1 is
            refused, because JSON and many programs write 1.0 as 1.
        tokens: Int >= 1: tokens per image. An int for `keep` means the same, and sets both.
        average_tokens: Tokens per image, averaged over the decoder's layers. Papers mean this by "192 tokens".
        average_share: Share of the visual tokens of each image, averaged over the decoder's layers, in (0, 1].
        per: "image": each image, video or tile has the budget for itself. "frame": each frame of a video has it, as
            the decoder sees frames (Qwen's towers join two). "prompt": all visual tokens of a prompt share it.
        cost: Share of the decoder's KV bytes or FLOPs. `from_kv_share` and `from_flops_share` set it.
        video: Budget for the seconds or frames of a video. `per_second`, `by_frame` and `by_frame_weights` set it.
        ages: Tiers for the older images of a prompt. `by_age` sets it.

    Attributes:
        target: Name of the target, one of `TARGETS`. It is "tokens" for an int `keep`.
        amount: Value of the target.

    Raises:
        BudgetError: If the arguments are invalid. `resolve` raises it if the layer cannot reach the target.
    """

    keep: float | int | None = None
    tokens: int | None = None
    average_tokens: float | None = None
    average_share: float | None = None
    per: str = "image"
    cost: CostShare | None = None
    video: VideoBudget | None = None
    ages: Ages | None = None
    target: str = field(init=False, compare=False)
    amount: Any = field(init=False, compare=False)

    def __post_init__(self) -> None:
        target, amount = self._find_target()
        if self.per not in _SCOPES:
            raise BudgetError(f"per={self.per!r} is not known; use one of {', '.join(map(repr, _SCOPES))}")
        if self.ages is not None and (target not in IMAGE_TARGETS or self.per != "image"):
            raise BudgetError('age= goes with keep= or tokens=, and with per="image"')
        weighted = self.video is not None and self.video.frame_weights is not None
        if weighted and (target not in IMAGE_TARGETS or self.ages is not None):
            raise BudgetError("frame_weights= goes with keep= or tokens= of a video, and without age=")
        if self.video is not None and self.per == "prompt":
            raise BudgetError('budgets of videos are for each video: leave out per="prompt"')
        if target not in ("per_second", "frames"):  # `VideoBudget` checks these
            check_number(target, amount)
        values = {"target": target, "amount": amount}
        if target in IMAGE_TARGETS and isinstance(amount, numbers.Integral):
            values = dict.fromkeys(("keep", "tokens", "amount"), int(amount)) | {"target": "tokens"}
        if target == "frames" or weighted:
            values["per"] = "frame"
        if self.ages is not None and self.ages.keeps_all:
            values["ages"] = None  # so that budgets with the same meaning are equal
        vars(self).update(values)

    def _find_target(self) -> tuple[str, Any]:
        """Return the name and the value of the only target; raises BudgetError for none or several."""
        values = {name: getattr(self, name) for name in TARGETS[:4] if getattr(self, name) is not None}
        if self.tokens is not None and self.tokens == self.keep and isinstance(self.keep, int):
            del values["keep"]  # a copy by `dataclasses.replace` passes both
        if self.cost is not None:
            values[self.cost.target] = self.cost.share
        if self.video is not None and self.video.frame_weights is None:
            values[self.video.target] = self.video.amount
        check_one_target(values)
        return next(iter(values.items()))

    # -- constructors

    @classmethod
    def from_keep(cls, keep: Any) -> Budget:
        """Return the budget for the `keep` of a user: a number, or a Budget already."""
        if isinstance(keep, Budget):
            return keep
        if isinstance(keep, int) and keep in _PERCENTAGES:
            _note_percentage(keep)
        if keep is None:
            raise BudgetError("keep=None keeps nothing: use a float in (0, 1], an int >= 2 or a Budget")
        return cls(keep=keep)

    @classmethod
    def from_number(cls, keep: float | int) -> Budget:
        """Return the budget for a checked number: a float is a share, an int (1 too) a number of tokens."""
        return cls(tokens=keep) if isinstance(keep, int) else cls(keep=keep)

    @classmethod
    def from_kv_share(cls, share: float, per: str = "image") -> Budget:
        """Keep this share of the visual tokens' KV bytes, in (0, 1]."""
        return cls(cost=CostShare("kv_share", share), per=per)

    @classmethod
    def from_flops_share(cls, share: float, per: str = "image") -> Budget:
        """Keep this share of the decoder's prefill FLOPs (text included), in (0, 1]."""
        return cls(cost=CostShare("flops_share", share), per=per)

    @classmethod
    def per_second(cls, tokens: float, fps: float | None = None, per: str = "image") -> Budget:
        """Keep a number of tokens for each second of a video, and all tokens of images.

        Args:
            tokens: Tokens per second.
            fps: Frames per second at which videos were sampled. None: the processor's value (Qwen2.5-VL has one).
        """
        return cls(video=VideoBudget(per_second=tokens, fps=fps), per=per)

    @classmethod
    def by_frame(cls, frames: Sequence[float | int]) -> Budget:
        """Keep in each frame of a video an int >= 2 (tokens) or a share in (0, 1], and all tokens of images."""
        return cls(video=VideoBudget(frames=cast(Any, frames)))

    @classmethod
    def by_frame_weights(cls, keep: float | int | Budget, weights: Sequence[float]) -> Budget:
        """Divide the tokens that `keep` leaves of a video among its frames in proportion to `weights`."""
        return replace(cls.from_keep(keep), video=VideoBudget(frame_weights=cast(Any, weights)))

    @classmethod
    def by_age(cls, keep: float | int | Budget, age: Sequence[Sequence[float | int]], step: int = 1) -> Budget:
        """Keep fewer tokens of the older images of a prompt.

        Only PRE_LLM methods that do not read the question support it.

        Args:
            keep: Share or number of tokens of the newest image.
            age: Pairs (age, kept). An image followed by that many images keeps this share of its budget, or this
                number of tokens. ((0, 1.0), (2, 0.5)) changes nothing for the last two images.
            step: Ages are recounted when the number of images is a multiple of it. In between, earlier images keep
                their tokens when the prompt grows, so a prefix cache stays valid.
        """
        return replace(cls.from_keep(keep), ages=Ages(cast(Any, age), step))

    @classmethod
    def from_json(cls, value: Any, per: str = "image") -> Budget:
        """Read the `keep` of a file or a request: a number, or an object with one key of `TARGETS`.

        "age" and "step", "fps" or "frame_weights" may stand beside the target.
        """
        if not isinstance(value, Mapping):
            return replace(cls.from_keep(value), per=per)
        if unknown := sorted(set(value) - {*_JSON_KEYS}):
            raise BudgetError(
                f"keep has no {', '.join(unknown)}: write a number alone, 4 for four tokens or 0.25 for a share, or an "
                f"object with one of {', '.join(TARGETS[1:])}"
            )
        given = {name: one for name, one in value.items() if one is not None or name == "step"}
        check_one_target([name for name in TARGETS if name in given])
        costs = [CostShare(name, given[name]) for name in ("kv_share", "flops_share") if name in given]
        video = {name: given[name] for name in ("per_second", "fps", "frames", "frame_weights") if name in given}
        return cls(
            **{name: given[name] for name in TARGETS[:4] if name in given},
            per=per,
            cost=costs[0] if costs else None,
            video=VideoBudget(**video) if video else None,
            ages=Ages(cast(Any, given.get("age")), given.get("step", 1)) if {"age", "step"} & given.keys() else None,
        )

    def to_json(self) -> Any:
        """Return the value that `from_json` reads as this budget; `per` is not part of it."""
        if self.video is None and self.ages is None and self.keep is not None and self.tokens != 1:
            return self.keep
        value = {self.target: list(self.amount) if self.target == "frames" else self.amount}
        if self.video is not None and self.video.fps is not None:
            value["fps"] = self.video.fps
        if self.video is not None and self.video.frame_weights is not None:
            value["frame_weights"] = list(self.video.frame_weights)
        if self.ages is not None:
            value |= {"age": [list(tier) for tier in self.ages.tiers], "step": self.ages.step}
        return value

    def init_values(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, for a subclass that resolves them in another way."""
        return {one.name: getattr(self, one.name) for one in fields(Budget) if one.init}

    # -- text

    def __repr__(self) -> str:
        keep = "Budget(tokens=1)" if self.tokens == 1 else repr(self.keep)
        per = "" if self.per == "image" else f", per={self.per!r}"
        if self.ages is not None:
            return f"Budget.by_age({keep}, {self.ages.tiers!r}, step={self.ages.step})"
        if self.video is not None:
            return f"Budget.{self.video.describe_constructor(keep, per)}"
        if self.cost is not None:
            return f"Budget.from_{self.target}({self.amount!r}{per})"
        name = "keep" if self.target == "tokens" and self.amount != 1 else self.target
        return f"Budget({name}={self.amount!r}{per})"

    def format_short(self) -> str:
        """Return the text to write after `keep=`: a number alone if it has the same meaning."""
        plain = self.keep is not None and self.tokens != 1 and self.per == "image" and self.ages is None
        return repr(self.keep) if plain else repr(self)

    # -- counts

    @property
    def share(self) -> float | None:
        """The requested share of the quantity that the target counts; None for a number of tokens."""
        return float(self.amount) if self.target in SHARE_TARGETS else None

    def is_identity(self) -> bool:
        """Return True if every token of any image is kept."""
        return self.target == "keep" and self.amount == 1 and self.ages is None

    def resolve(
        self,
        counts: Sequence[int],
        *,
        layer: int,
        shape: DecoderShape,
        text_tokens: int,
        original: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the number of tokens to keep in each segment of one prompt, from 1 to all.

        Args:
            counts: Tokens of each segment before the cut.
            layer: Decoder layer at whose input the cut is made.
            shape: Sizes of the decoder.
            text_tokens: Tokens of the prompt that are not visual, for a share of the FLOPs.
            original: Tokens of each segment at the first cut of the method. Only the budget of one of several cuts
                reads it.

        Raises:
            BudgetError: For a budget of videos (use `resolve_videos`), or if the layer cannot reach the target.
        """
        if self.video is not None:
            raise BudgetError(f"{self} is for the videos of a prompt, and nothing is known of any here: say keep=")
        if self.target not in IMAGE_TARGETS:
            return self.solve([(layer, 1.0)], counts, shape=shape, text_tokens=text_tokens)[0]
        kept = [self.resolve_keep(count) for count in counts]
        return kept if self.ages is None else apply_ages(kept, self.ages.tiers, self.ages.step)

    def resolve_videos(self, counts: Sequence[int], clips: Sequence[Clip | None]) -> list[int]:
        """Return the number of tokens to keep in each segment for a budget of videos. clips: None for an image."""
        return resolve_videos(self, counts, clips)

    def resolve_keep(self, count: int) -> int:
        """Return how many of the `count` tokens of a new image `keep` or `tokens` leaves."""
        if self.target == "tokens":
            return min(int(self.amount), count)
        assert self.target == "keep"  # `solve` resolves the other targets
        return min(count, max(1, round(count * float(self.amount))))

    def solve(
        self, cuts: Sequence[tuple[int, float]], counts: Sequence[int], *, shape: DecoderShape, text_tokens: int
    ) -> list[list[int]]:
        """Return for each of several cuts the number of kept tokens per segment, so that the decoder's layers spend
        this budget on average. `keep` is an average over the layers here too.

        Args:
            cuts: (layer, relative) of each cut, in order. Kept counts are in proportion to `relative`, which does not
                rise, but at least 1 and at most all.
            counts: Tokens of each segment in the layers before the first cut.

        Raises:
            BudgetError: If the layers before the first cut alone spend the budget.
        """
        return solve(self, tuple(cuts), tuple(counts), shape, text_tokens)


@cache
def _note_percentage(tokens: int) -> None:
    """Log, once for each number, that a number that looks like a percentage counts tokens."""
    logger.warning(
        "tokenprune: keep=%d keeps %d tokens per image, not %d %%. Pass keep=%g for a share; Budget(tokens=%d) logs "
        "nothing.", tokens, tokens, tokens, tokens / 100, tokens,
    )  # fmt: skip


def compute_joint_share(budgets: Sequence[Budget], tokens: int | None = None) -> float | None:
    """Return the share of an image's visual tokens that remains when the budgets are applied one after the other.

    Args:
        tokens: Number of tokens of the image; each budget then leaves a whole number of them. None if it is not known:
            the result is None for a budget that is a number of tokens, or a target averaged over the layers.
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
