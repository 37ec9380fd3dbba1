# SPDX-License-Identifier: Apache-2.0
"""`Budget`: the number of visual tokens to keep."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from tokenprune.budgets.by_age import Ages, apply_ages
from tokenprune.budgets.checks import IMAGE_TARGETS, SHARE_TARGETS, TARGETS, check_number, check_one_target
from tokenprune.budgets.format import format_budget
from tokenprune.budgets.from_json import read_arguments, write_object
from tokenprune.budgets.over_layers import CostShare, solve
from tokenprune.budgets.percentage import warn_about_percentage
from tokenprune.budgets.video import Clip, VideoBudget, resolve_videos
from tokenprune.errors import BudgetError
from tokenprune.models.decoder_shape import DecoderShape

_SCOPES = ("image", "frame", "prompt")


@dataclass(frozen=True, repr=False)
class Budget:
    """The number of visual tokens to keep.

    Pass exactly one of the first four arguments, or use a constructor: `from_kv_share`, `from_flops_share`,
    `per_second`, `by_frame`, `by_frame_weights` or `by_age`. All targets except `keep` and `tokens` are solved in
    closed form for the layer of the cut. If a method cuts several times, the target is an average over the layers.

    Args:
        keep: Float in (0, 1]: share of the visual tokens of each image. Int >= 2: tokens per image. The int 1 is
            rejected, because JSON and many programs write 1.0 as 1.
        tokens: Int >= 1: tokens per image. An int `keep` means the same, and sets both.
        average_tokens: Tokens per image, averaged over the decoder layers. Papers mean this by "192 tokens".
        average_share: Share of the visual tokens of each image, averaged over the decoder layers, in (0, 1].
        per: "image": the budget applies to each image, video or tile. "frame": to each frame of a video, as the decoder
            sees frames (Qwen's towers join two). "prompt": to all visual tokens of a prompt.
        cost: Share of the decoder's KV bytes or FLOPs. Set by `from_kv_share` and `from_flops_share`.
        video: Budget for seconds or frames of a video. Set by `per_second`, `by_frame` and `by_frame_weights`.
        ages: Tiers for older images of a prompt. Set by `by_age`.

    Attributes:
        target: Name of the target, one of `TARGETS`. "tokens" for an int `keep`.
        amount: Value of the target.

    Raises:
        BudgetError: If the arguments are invalid.

    Examples:
        >>> tokenprune.Budget(average_tokens=192)
        Budget(average_tokens=192)
        >>> tokenprune.Budget(keep=0.25).resolve_keep(576)
        144
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
            raise BudgetError(f"per={self.per!r} is invalid. Use one of {', '.join(map(repr, _SCOPES))}.")
        if self.ages is not None and (target not in IMAGE_TARGETS or self.per != "image"):
            raise BudgetError('age= requires keep= or tokens=, and per="image".')
        weighted = self.video is not None and self.video.frame_weights is not None
        if weighted and (target not in IMAGE_TARGETS or self.ages is not None):
            raise BudgetError("frame_weights= requires keep= or tokens=, and excludes age=.")
        if self.video is not None and self.per == "prompt":
            raise BudgetError('A video budget applies to each video. Leave out per="prompt".')
        if target not in ("per_second", "frames"):  # `VideoBudget` checks these
            check_number(target, amount)
        values = {"target": target, "amount": amount}
        if target in IMAGE_TARGETS and isinstance(amount, numbers.Integral):
            values = dict.fromkeys(("keep", "tokens", "amount"), int(amount)) | {"target": "tokens"}
        if target == "frames" or weighted:
            values["per"] = "frame"
        if self.ages is not None and self.ages.keeps_all:
            values["ages"] = None  # makes budgets with the same meaning equal
        vars(self).update(values)

    def _find_target(self) -> tuple[str, Any]:
        """Return the name and the value of the target. Raise BudgetError if there is not exactly one."""
        values = {name: getattr(self, name) for name in TARGETS[:4] if getattr(self, name) is not None}
        if self.tokens is not None and self.tokens == self.keep and isinstance(self.keep, int):
            del values["keep"]  # a copy by `dataclasses.replace` passes both
        if self.cost is not None:
            values[self.cost.target] = self.cost.share
        if self.video is not None and self.video.frame_weights is None:
            values[self.video.target] = self.video.amount
        check_one_target(values)
        return next(iter(values.items()))

    @classmethod
    def from_keep(cls, keep: Any) -> Budget:
        """Return the budget for an argument `keep`: a number or a `Budget`.

        Examples:
            >>> tokenprune.Budget.from_keep(0.5)
            Budget(keep=0.5)
        """
        if isinstance(keep, Budget):
            return keep
        if isinstance(keep, int):
            warn_about_percentage(keep)
        if keep is None:
            raise BudgetError("keep=None is invalid. Pass a float in (0, 1], an int >= 2 or a Budget.")
        return cls(keep=keep)

    @classmethod
    def from_number(cls, keep: float | int) -> Budget:
        """Return the budget for a checked number: a float is a share, an int (including 1) a number of tokens.

        Examples:
            >>> tokenprune.Budget.from_number(1)
            Budget(tokens=1)
        """
        return cls(tokens=keep) if isinstance(keep, int) else cls(keep=keep)

    @classmethod
    def from_kv_share(cls, share: float, per: str = "image") -> Budget:
        """Keep a share in (0, 1] of the KV bytes of the visual tokens.

        Examples:
            >>> tokenprune.Budget.from_kv_share(0.5)
            Budget.from_kv_share(0.5)
        """
        return cls(cost=CostShare("kv_share", share), per=per)

    @classmethod
    def from_flops_share(cls, share: float, per: str = "image") -> Budget:
        """Keep a share in (0, 1] of the decoder's prefill FLOPs, including text.

        Examples:
            >>> tokenprune.Budget.from_flops_share(0.5)
            Budget.from_flops_share(0.5)
        """
        return cls(cost=CostShare("flops_share", share), per=per)

    @classmethod
    def per_second(cls, tokens: float, fps: float | None = None, per: str = "image") -> Budget:
        """Keep a number of tokens for each second of a video, and all tokens of images.

        Args:
            tokens: Tokens per second.
            fps: Frames per second at which videos were sampled. Default: the value of the processor (Qwen2.5-VL).
            per: See `Budget`.

        Examples:
            >>> tokenprune.Budget.per_second(64, fps=2.0)
            Budget.per_second(64, fps=2.0)
        """
        return cls(video=VideoBudget(per_second=tokens, fps=fps), per=per)

    @classmethod
    def by_frame(cls, frames: Sequence[float | int]) -> Budget:
        """Keep an int >= 2 (tokens) or a share in (0, 1] of each video frame, and all tokens of images.

        Examples:
            >>> tokenprune.Budget.by_frame((1.0, 16, 0.25))
            Budget.by_frame((1.0, 16, 0.25))
        """
        return cls(video=VideoBudget(frames=cast(Any, frames)))

    @classmethod
    def by_frame_weights(cls, keep: float | int | Budget, weights: Sequence[float]) -> Budget:
        """Split the tokens that `keep` leaves of a video over its frames, in proportion to `weights`.

        Examples:
            >>> tokenprune.Budget.by_frame_weights(0.5, (1.0, 3.0))
            Budget.by_frame_weights(0.5, (1.0, 3.0))
        """
        return replace(cls.from_keep(keep), video=VideoBudget(frame_weights=cast(Any, weights)))

    @classmethod
    def by_age(cls, keep: float | int | Budget, age: Sequence[Sequence[float | int]], step: int = 1) -> Budget:
        """Keep fewer tokens of the older images of a prompt.

        Supported by PRE_LLM methods that do not read the question.

        Args:
            keep: Share or number of tokens of the newest image.
            age: Pairs (age, kept). An image followed by at least `age` images keeps this share of its budget, or this
                number of tokens. ((0, 1.0), (2, 0.5)) does not affect the last two images.
            step: Ages are recounted when the number of images is a multiple of it. In between, earlier images keep
                their tokens when the prompt grows, so a prefix cache stays valid.

        Examples:
            >>> tokenprune.Budget.by_age(0.5, ((0, 1.0), (2, 0.5)))
            Budget.by_age(0.5, ((0, 1.0), (2, 0.5)), step=1)
        """
        return replace(cls.from_keep(keep), ages=Ages(cast(Any, age), step))

    @classmethod
    def from_json(cls, value: Any, per: str = "image") -> Budget:
        """Read the `keep` of a file or a request: a number, or an object with one key of `TARGETS`.

        The object may also contain "age" and "step", "fps", or "frame_weights".

        Examples:
            >>> tokenprune.Budget.from_json({"average_tokens": 192})
            Budget(average_tokens=192)
        """
        if not isinstance(value, Mapping):
            return replace(cls.from_keep(value), per=per)
        return cls(per=per, **read_arguments(value))

    def to_json(self) -> Any:
        """Return the JSON value that `from_json` reads as this budget, without `per`."""
        if self.video is None and self.ages is None and self.keep is not None and self.tokens != 1:
            return self.keep
        return write_object(self)

    def init_values(self) -> dict[str, Any]:
        """Return the constructor arguments by name, for subclasses."""
        return {field.name: getattr(self, field.name) for field in fields(Budget) if field.init}

    def __repr__(self) -> str:
        return format_budget(self)

    def format_short(self) -> str:
        """Return a number if it means the same as this budget, else the repr, to format `keep=`."""
        plain = self.keep is not None and self.tokens != 1 and self.per == "image" and self.ages is None
        return repr(self.keep) if plain else repr(self)

    @property
    def share(self) -> float | None:
        """Requested share of tokens, bytes or FLOPs. None for a number of tokens."""
        return float(self.amount) if self.target in SHARE_TARGETS else None

    def is_identity(self) -> bool:
        """Return True if all tokens of all images are kept."""
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
        """Return the number of kept tokens per segment of one prompt, at least 1.

        Args:
            counts: Tokens of each segment before the cut.
            layer: Decoder layer at whose input the cut is made.
            shape: Sizes of the decoder.
            text_tokens: Number of text tokens of the prompt, for a share of the FLOPs.
            original: Tokens of each segment at the first cut of the method. Only `StageBudget` reads it.

        Raises:
            BudgetError: If this is a video budget (use `resolve_videos`), or the layer cannot reach the target.
        """
        if self.video is not None:
            raise BudgetError(f"{self} applies to videos, but the videos of this prompt are unknown. Pass keep=.")
        if self.target not in IMAGE_TARGETS:
            return self.solve([(layer, 1.0)], counts, shape=shape, text_tokens=text_tokens)[0]
        kept = [self.resolve_keep(count) for count in counts]
        return kept if self.ages is None else apply_ages(kept, self.ages.tiers, self.ages.step)

    def resolve_videos(self, counts: Sequence[int], clips: Sequence[Clip | None]) -> list[int]:
        """Return the number of kept tokens per segment for a video budget. See `tokenprune.budgets.video`."""
        return resolve_videos(self, counts, clips)

    def resolve_keep(self, count: int) -> int:
        """Return the number of kept tokens of an image with `count` tokens, for the targets `keep` and `tokens`."""
        if self.target == "tokens":
            return min(int(self.amount), count)
        assert self.target == "keep"  # `solve` resolves the other targets
        return min(count, max(1, round(count * float(self.amount))))

    def solve(
        self, cuts: Sequence[tuple[int, float]], counts: Sequence[int], *, shape: DecoderShape, text_tokens: int
    ) -> list[list[int]]:
        """Return the number of kept tokens per segment for each cut, so that layers meet this budget on average.

        `keep` is an average over the layers here, too.

        Args:
            cuts: (layer, relative) of each cut, in order. Cuts keep tokens in proportion to `relative`, which must not
                increase, and at least 1.
            counts: Tokens of each segment before the first cut.
            shape: Sizes of the decoder.
            text_tokens: Number of text tokens of the prompt.

        Raises:
            BudgetError: If the layers before the first cut spend the budget.
        """
        return solve(self, tuple(cuts), tuple(counts), shape, text_tokens)
