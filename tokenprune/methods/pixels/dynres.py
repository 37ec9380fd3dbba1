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

# log10 of the variance of the Laplacian (grey values in 0..1, mean of the 8 differences) for a detail of 0 and of 1.
# Photographs are around the middle, scans of text above the upper end.
_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE = -4.2, -2.0
# A cell of text has sharp edges and few grey levels. Noise and grass are as sharp but have more levels.
_CELL, _SHARP, _FLAT, _LEVELS = 32, 5e-3, 1e-4, 6.0
_TEXT_SHARE = 0.4
# Words of questions about text or fine drawings.
_FINE = re.compile(
    r"\b(?:read|reads|reading|text|texts|words?|letters?|numbers?|digits?|charts?|graphs?|documents?|signs?|labels?"
    r"|captions?|titles?|written|writing|spell|spelled|ocr)\b"
)


@register("dynres", site=Site.PRE_ENCODER, paper="none (statistics of arXiv 2510.18091)")
@dataclass(frozen=True)
class DynRes(ResizeMethod):
    """Choose the resolution of each image by its detail.

    Smooth images shrink more than detailed ones, and images of text keep their size. An image of medium detail gets the
    share `keep` of its visual tokens; more or less detail moves the share up or down symmetrically. So `keep` is the
    average over images like photographs, and the share of an image depends only on that image. With `Budget(keep=0.25,
    per="prompt")` the images of one call (of each inner list, for lists of lists) share the budget, weighted by tokens.

    Processors with a fixed image size (LLaVA) use the mean share for all images of a call, or the full size if an image
    is text.

    Args:
        min_scale: Minimum factor for the sides of an image. `keep` must be at least its square.
        text_guard: Keep images of text, diagrams and screens at full size. This exceeds `keep`, unless the budget is
            shared and the other images can compensate.
        question_guard: Also keep the full size if the question (the text after the prompt's last image) contains a word
            about reading, text, numbers or charts. Requires the complete processor and makes the selection depend on
            the question.

    Source:
        An addition of this library. The statistics, the variance of the Laplacian and the entropy of grey values in
        cells, are used by the Adaptive Patch Transformer (arXiv 2510.18091) to choose patch sizes.

    Differences from the paper:
        - The paper trains a model with several patch sizes. This method only resizes images.

    Examples:
        >>> model = tokenprune.patch(model, DynRes(text_guard=False), keep=0.5, processor=processor)
    """

    depends_on_content: ClassVar[bool] = True

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
                f"{self.name}: keep={keep} is below the minimum {self.min_scale**2:.4g} of min_scale={self.min_scale}. "
                "Pass a larger keep or a smaller min_scale."
            )

    def compute_shares(self, images: Sequence[InputImage], keep: float, per: str) -> list[float]:
        statistics = [measure_detail(image.grey) for image in images]
        is_full = [
            (self.text_guard and text) or (self.question_guard and asks_for_detail(image.question))
            for image, (_, text) in zip(images, statistics, strict=True)
        ]
        details = [detail for detail, _ in statistics]
        if per != "prompt":
            return [self._compute_share(detail, full, keep) for detail, full in zip(details, is_full, strict=True)]
        levels = {
            prompt: self._find_level(
                [
                    (image.tokens, detail, full)
                    for image, detail, full in zip(images, details, is_full, strict=True)
                    if image.prompt == prompt
                ],
                keep,
            )
            for prompt in {image.prompt for image in images}
        }
        return [
            self._compute_share(detail, full, levels[image.prompt])
            for image, detail, full in zip(images, details, is_full, strict=True)
        ]

    def _compute_share(self, detail: float, is_full: bool, level: float) -> float:
        """Return the share of an image: a line through (0.5, level), as steep as `min_scale` and full size allow."""
        if is_full:
            return 1.0
        slope = min(level - self.min_scale**2, 1 - level)
        return level + slope * (2 * detail - 1)

    def _find_level(self, members: list[tuple[int, float, bool]], keep: float) -> float:
        """Return the level at which the members (tokens, detail, is_full) keep the share `keep`, by bisection."""
        total = sum(tokens for tokens, _, _ in members)
        low, high = self.min_scale**2, 1.0
        for _ in range(40):
            level = (low + high) / 2
            spent = sum(tokens * self._compute_share(detail, is_full, level) for tokens, detail, is_full in members)
            low, high = (low, level) if spent > keep * total else (level, high)
        return low


def asks_for_detail(question: str) -> bool:
    """Return whether a question contains a word about reading, text, numbers or charts.

    Examples:
        >>> asks_for_detail("What does the sign say?")
        True
    """
    return _FINE.search(question.lower()) is not None


def measure_detail(grey: Tensor) -> tuple[float, bool]:
    """Return the detail of an image in [0, 1], and whether it looks like text.

    Args:
        grey: Grey values in [0, 1], shape (height, width).

    Examples:
        >>> measure_detail(torch.zeros(64, 64))
        (0.0, False)
    """
    # Mean difference to the eight neighbours.
    padded = torch.nn.functional.pad(grey[None, None], (1, 1, 1, 1), mode="replicate")
    laplacian = (torch.nn.functional.avg_pool2d(padded, 3, 1)[0, 0] - grey) * 9 / 8
    variance = float(laplacian.var(correction=0))
    detail = (math.log10(max(variance, 1e-12)) - _MIN_LOG_VARIANCE) / (_MAX_LOG_VARIANCE - _MIN_LOG_VARIANCE)
    return min(1.0, max(0.0, detail)), _looks_like_text(grey, laplacian)


def _looks_like_text(grey: Tensor, laplacian: Tensor) -> bool:
    side = min(_CELL, *grey.shape)
    edges = _split_cells(laplacian, side).var(dim=1, correction=0)
    levels = (_split_cells(grey, side) * 255).round().long().clamp(0, 255)
    counts = torch.zeros(len(levels), 256, dtype=torch.float32, device="cpu")
    histogram = counts.scatter_add_(1, levels, torch.ones_like(levels, dtype=torch.float32)) / side**2
    entropy = torch.special.entr(histogram).sum(1) / math.log(2)
    busy = int((edges > _FLAT).sum())
    return busy > 0 and int(((edges > _SHARP) & (entropy < _LEVELS)).sum()) >= _TEXT_SHARE * busy


def _split_cells(values: Tensor, side: int) -> Tensor:
    """Split (H, W) into square cells, shape (cells, side * side). Incomplete cells at the border are left out."""
    high, wide = values.shape[0] // side, values.shape[1] // side
    cells = values[: high * side, : wide * side].reshape(high, side, wide, side)
    return cells.transpose(1, 2).reshape(high * wide, side * side)
