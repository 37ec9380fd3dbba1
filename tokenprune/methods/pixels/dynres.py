# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from tokenprune.errors import BudgetError
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.pixels import ResizeMethod

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.selection.images import InputImage

# log10 of the variance of the Laplacian (of grey values in 0..1, mean of the 8 differences) that count as no detail and
# as all detail. Photographs lie around the middle; scans of text above the upper end.
_LEAST, _MOST = -4.2, -2.0
# A cell of a page: sharp edges between few grey levels. A noisy or grassy cell is as sharp, with more levels.
_CELL, _SHARP, _FLAT, _LEVELS = 32, 5e-3, 1e-4, 6.0
_TEXT_SHARE = 0.4
# Questions about what is written, or drawn fine.
_FINE = re.compile(
    r"\b(?:read|reads|reading|text|texts|words?|letters?|numbers?|digits?|charts?|graphs?|documents?|signs?|labels?"
    r"|captions?|titles?|written|writing|spell|spelled|ocr)\b"
)


@register("dynres", site=Site.PRE_ENCODER, paper="none (statistics of arXiv 2510.18091)")
@dataclass(frozen=True)
class DynRes(ResizeMethod):
    """Choose each image's resolution by its detail: smooth images shrink more than busy ones, text stays whole.

    `keep` is the share of visual tokens that an image of middling detail gets, and the average over images like
    photographs; the detail of an image moves its own share up or down by the same amount. An image's share depends
    on that image alone. With `Budget(keep=0.25, per="prompt")` the images of one call (of each inner list, where
    they come as lists of lists) share the budget instead, weighted by their tokens: the average then holds for them.

    min_scale:  the smallest factor for the sides of an image; `keep` must be at least its square.
    text_guard: leave images of text, diagrams and screens at their full size. They are spent on top of `keep`, unless
                the budget is shared and the other images can make up for them.
    question_guard: do the same where the question (the text after the prompt's last image) has a word of reading,
                text, numbers or charts. It needs the whole processor, and the choice then depends on the question.

    On models whose processor makes every image one size (LLaVA), all images of a call get the mean of their
    shares, or the full size if one of them is text.

    Source: training-free, our decision. Statistics: variance of the Laplacian, and the entropy of the grey values in
    cells, both used to choose patch sizes by the Adaptive Patch Transformer (arXiv 2510.18091).

    Differs from the paper: that one trains a model with patches of several sizes; this one only resizes images.
    """

    by_content: ClassVar[bool] = True

    min_scale: Annotated[float, Gt(0), Le(1)] = 0.25
    text_guard: bool = True
    question_guard: bool = False

    @property
    def query_aware(self) -> bool:
        return self.question_guard

    @property
    def reads_question(self) -> bool:
        return self.question_guard

    def check_keep(self, keep: float) -> None:
        if keep < self.min_scale**2:
            raise BudgetError(
                f"{self.name}: keep={keep} is below what min_scale={self.min_scale} allows, {self.min_scale**2:.4g}: "
                "set a smaller min_scale"
            )

    def shares(self, images: Sequence[InputImage], keep: float, per: str) -> list[float]:
        looks = [measure_detail(image.grey) for image in images]
        whole = [
            (self.text_guard and text) or (self.question_guard and asks_for_detail(image.question))
            for image, (_, text) in zip(images, looks, strict=True)
        ]
        details = [detail for detail, _ in looks]
        if per != "prompt":
            return [self._share(detail, kept, keep) for detail, kept in zip(details, whole, strict=True)]
        levels = {
            prompt: self._level(
                [
                    (one.tokens, detail, kept)
                    for one, detail, kept in zip(images, details, whole, strict=True)
                    if one.prompt == prompt
                ],
                keep,
            )
            for prompt in {image.prompt for image in images}
        }
        return [
            self._share(detail, kept, levels[image.prompt])
            for image, detail, kept in zip(images, details, whole, strict=True)
        ]

    def _share(self, detail: float, whole: bool, level: float) -> float:
        """Return the value at `detail` of a straight line through (0.5, level), as steep as `min_scale` and the full
        size allow."""
        if whole:
            return 1.0
        slope = min(level - self.min_scale**2, 1 - level)
        return level + slope * (2 * detail - 1)

    def _level(self, members: list[tuple[int, float, bool]], keep: float) -> float:
        """Return the level at which the members (tokens, detail, whole) keep the share `keep` of their tokens together,
        by bisection: shares rise with the level."""
        total = sum(tokens for tokens, _, _ in members)
        low, high = self.min_scale**2, 1.0
        for _ in range(40):
            level = (low + high) / 2
            spent = sum(tokens * self._share(detail, whole, level) for tokens, detail, whole in members)
            low, high = (low, level) if spent > keep * total else (level, high)
        return low


def asks_for_detail(question: str) -> bool:
    """Return whether a question has a word of reading, text, numbers or charts."""
    return _FINE.search(question.lower()) is not None


def measure_detail(grey: Tensor) -> tuple[float, bool]:
    """Return how much detail an image has, in 0..1, and whether it looks like text. grey: float `[H, W]` in 0..1."""
    # The mean difference to the eight neighbours.
    padded = torch.nn.functional.pad(grey[None, None], (1, 1, 1, 1), mode="replicate")
    laplacian = (torch.nn.functional.avg_pool2d(padded, 3, 1)[0, 0] - grey) * 9 / 8
    variance = float(laplacian.var(correction=0))
    detail = (math.log10(max(variance, 1e-12)) - _LEAST) / (_MOST - _LEAST)
    return min(1.0, max(0.0, detail)), _looks_like_text(grey, laplacian)


def _looks_like_text(grey: Tensor, laplacian: Tensor) -> bool:
    side = min(_CELL, *grey.shape)
    edges = _cells(laplacian, side).var(dim=1, correction=0)
    levels = (_cells(grey, side) * 255).round().long().clamp(0, 255)
    counts = torch.zeros(len(levels), 256, dtype=torch.float32, device="cpu")
    histogram = counts.scatter_add_(1, levels, torch.ones_like(levels, dtype=torch.float32)) / side**2
    entropy = torch.special.entr(histogram).sum(1) / math.log(2)
    busy = int((edges > _FLAT).sum())
    return busy > 0 and int(((edges > _SHARP) & (entropy < _LEVELS)).sum()) >= _TEXT_SHARE * busy


def _cells(values: Tensor, side: int) -> Tensor:
    """`[H, W]` -> `[cells, side * side]`, incomplete cells at the border left out."""
    high, wide = values.shape[0] // side, values.shape[1] // side
    cells = values[: high * side, : wide * side].reshape(high, side, wide, side)
    return cells.transpose(1, 2).reshape(high * wide, side * side)
