# SPDX-License-Identifier: Apache-2.0
"""Shrink the images of a processor's call for methods that act on pixels."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.shared.pixel_counts import PixelCounts
from tokenprune.models.processor_settings import SettingsReader, get_image_processor
from tokenprune.models.token_counts import find_rule
from tokenprune.selection.images import InputImage, collect_images
from tokenprune.selection.sites.pixels import ResizeMethod

_MARK = "tokenprune"  # key in `info` of a PIL image
# `Rule.grid`.
Grid = Callable[[SettingsReader, int, int], tuple[int, int, int, int, int]]


class Resizer:
    """Shrinks the images of a processor's calls.

    How it does so depends on `Rule.resizing` (or `Adapter.resizing`, if the tokens of a processor cannot be counted):

    - "input": The processor keeps the size of an image, so the image is shrunk before the call.
    - "target": The processor resizes every image to one size, so this size is reduced. The tower interpolates its
      position embeddings.
    - None: Neither is possible.

    A number of tokens uses the processor's own setting instead, if it has one (`CountRule.limit`).

    Args:
        adapter: Adapter of the model that takes the pixels, or None if only the processor is known.

    Raises:
        OptionError: If the processor does not make pixels.
        BudgetError: If the budget is not a share, or not a number of tokens for a method that takes one.
        UnsupportedSetupError: If resizing is not possible.
    """

    def __init__(self, method: ResizeMethod, budget: Budget, processor: Any, adapter: Any = None) -> None:
        self.method, self.budget, self.adapter, self.processor = method, budget, adapter, processor
        self.image_processor = get_image_processor(processor)
        self.identity = budget.is_identity()
        self.counts = PixelCounts()
        if self.identity:
            return
        self.rule = find_rule(processor)
        self.resizing = self.rule.resizing if self.rule else adapter.family.resizing if adapter else None
        self.limit = self.rule.limit if self.rule and self.max_tokens is not None else None
        self._check()

    def _check(self) -> None:
        name, keep = self.method.name, self.budget.keep
        has_images = callable(getattr(self.image_processor, "preprocess", None))
        if self.limit is None and self.resizing is None and (self.rule or self.adapter):
            family = self.adapter.config.model_type if self.adapter else type(self.image_processor).__name__
            raise UnsupportedSetupError(
                f"{name} has no effect on {family!r}: small and large images get the same number of tokens. "
                "Use method='pool' for a baseline without fine detail."
            )
        if keep is None or (isinstance(keep, numbers.Integral) and not self.method.takes_tokens):
            raise BudgetError(f"{name} does not support {self.budget}. Set keep to a share (a float).")
        if self.max_tokens is None:
            self.method.check_keep(float(keep))
        elif self.limit is not None:
            self.limit.choose(SettingsReader(self.processor), self.max_tokens)  # raises if it is too small
            return
        if not has_images and self.processor is not None:
            raise OptionError(
                f"{name} acts on pixels, and a {type(self.processor).__name__} does not make any. Pass the model's "
                "full processor, AutoProcessor.from_pretrained(...), or its image processor."
            )
        if not has_images:
            raise OptionError(
                f"{name} acts on pixels. Pass the model's processor: tokenprune.patch(model, {name!r}, keep={keep}, "
                "processor=processor)."
            )
        if self.resizing is None:
            raise UnsupportedSetupError(
                f"{name} is not supported with {type(self.image_processor).__name__}, whose tokens cannot be counted. "
                "Use a method that acts on the model, such as 'pool'."
            )
        if self.rule is None and self.max_tokens is not None:
            raise UnsupportedSetupError(
                f"{name}: the tokens of {type(self.image_processor).__name__} cannot be counted. Set keep to a share."
            )
        if self.rule is None and self.resizing == "input" and "height" in SettingsReader(self.processor).size():
            raise UnsupportedSetupError(
                f"{name} has no effect with {type(self.image_processor).__name__}, which resizes every image to one "
                "size. Use a method that acts on the model, such as 'pool'."
            )
        if self.resizing == "target":
            self._check_tower()
        elif self.rule is not None:
            self.rule.count(
                SettingsReader(self.processor), 100, 100, 1
            )  # raises if an option of the processor is missing

    def _check_tower(self) -> None:
        if self.adapter is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: {type(self.image_processor).__name__} resizes every image to the size that the "
                "vision tower expects. Patch the model: tokenprune.patch(model, ..., processor=processor)."
            )
        tower = getattr(self.adapter.base, "vision_tower", None)
        if tower is None or "interpolate_pos_encoding" not in inspect.signature(tower.forward).parameters:
            raise UnsupportedSetupError(
                f"{self.method.name} is not supported for {type(tower).__name__}, which cannot interpolate its "
                "positions. Use a method that acts on the model, such as 'pool'."
            )

    def resize(
        self,
        images: Any,
        kwargs: dict[str, Any],
        questions: Iterable[str] = (),
        sizes: Iterable[tuple[int, int] | None] = (),
    ) -> tuple[Any, dict[str, Any]]:
        """Return the images and keyword arguments of a processor's call after resizing.

        Args:
            questions: The question of each image, for methods that read questions.
            sizes: (height, width) of the file of each image that was decoded at a smaller size, None for the others.
        """
        if self.identity:
            return images, kwargs
        read = SettingsReader(self.processor, kwargs)
        rule, remaining, full_sizes = self.rule, iter(questions), iter(sizes)

        def make(image: Any, prompt: int, companions: int) -> InputImage:
            count = None if rule is None else lambda height, width: rule.count(read, height, width, companions)
            channels, question = kwargs.get("input_data_format"), next(remaining, "")
            resized_from = self._find_resized(image)
            return InputImage(
                image, channels, prompt, companions, count, question, next(full_sizes, None), resized_from
            )

        inputs, rebuild = collect_images(self.image_processor.fetch_images(images), make)
        if not inputs:
            return images, kwargs
        new_sizes, kwargs = self.plan(inputs, kwargs)
        self._record(inputs, new_sizes, kwargs)
        return rebuild([image.resize(*size) for image, size in zip(inputs, new_sizes, strict=True)]), kwargs

    def mark_resized(self, image: Any, full_size: tuple[int, int]) -> None:
        """Mark a PIL image of this resizer's size, so that `resize` leaves it. Crops and resized copies lose the mark.

        Args:
            full_size: (height, width) of the file.
        """
        image.info[_MARK] = (image.size, full_size, self.method, self.budget)

    def _find_resized(self, image: Any) -> tuple[int, int] | None:
        """Return the size of the file of an image that `mark_resized` has marked, or None."""
        size, full_size, *choice = getattr(image, "info", {}).get(_MARK, (None, None))
        return full_size if size == getattr(image, "size", None) and choice == [self.method, self.budget] else None

    def plan(self, images: list[InputImage], kwargs: dict[str, Any]) -> tuple[list[tuple[int, int]], dict[str, Any]]:
        """Return the sizes to which the images are resized before the processor's call, and its keyword arguments."""
        read, rule = SettingsReader(self.processor, kwargs), self.rule
        sizes = [image.size for image in images]
        if self.limit is not None:
            assert self.max_tokens is not None
            if any(image.tokens > self.max_tokens for image in images):
                kwargs = kwargs | self.limit.choose(read, self.max_tokens)
                self._check_counts(images, kwargs)
            return sizes, kwargs
        shares = self._compute_shares(images)
        if self.resizing == "target":
            # The images of a call are stacked, so all get the same size.
            share = 1.0 if max(shares) >= 1 else sum(shares) / len(shares)
            return sizes, kwargs | self._reduce_target(read, share)
        if rule is not None and rule.grid is not None:
            sizes, size = _resize_on_grid(rule.grid, read, images, shares, self.max_tokens)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("min_pixels", "max_pixels")}
            kwargs |= {"size": size}
        else:
            sizes = [find_size(image, share, self.max_tokens) for image, share in zip(images, shares, strict=True)]
        return [image.size if image.resized_from else size for image, size in zip(images, sizes, strict=True)], kwargs

    def _check_counts(self, images: list[InputImage], kwargs: dict[str, Any]) -> None:
        """Raise BudgetError for an image whose shape needs more tokens, such as a very long one."""
        assert self.rule is not None and self.max_tokens is not None
        read = SettingsReader(self.processor, kwargs)
        for image in images:
            tokens = self.rule.count(read, *image.size, image.num_prompt_images)
            if tokens > self.max_tokens:
                raise _make_size_error(self.max_tokens, image, tokens)

    def _compute_shares(self, images: list[InputImage]) -> list[float]:
        if self.max_tokens is None:
            others = [image for image in images if image.resized_from is None]
            shares = iter(self.method.compute_shares(others, self.share, self.budget.per) if others else ())
            return [1.0 if image.resized_from else next(shares) for image in images]
        return [min(1.0, self.max_tokens / image.tokens) for image in images]

    def _record(self, images: list[InputImage], sizes: list[tuple[int, int]], kwargs: dict[str, Any]) -> None:
        """Record the number of tokens of `images`, resized to `sizes` and unpruned."""
        if self.rule is None:
            return
        rule, read = self.rule, SettingsReader(self.processor, kwargs)
        counts = [rule.count(read, *size, image.num_prompt_images) for image, size in zip(images, sizes, strict=True)]
        self.counts.record(sum(counts), sum(image.tokens for image in images))

    def _reduce_target(self, read: SettingsReader, share: float) -> dict[str, Any]:
        if read("do_resize") is False:
            raise UnsupportedSetupError(f"{self.method.name} has no effect with do_resize=False. Leave do_resize out.")
        changed: dict[str, Any] = {}
        for name in ("size", "crop_size"):
            for edge, value in read.size(name).items():
                num_patches = value // self._patch
                patches = _find_side(num_patches, share, self.max_tokens)
                # A size that keeps all patches need not be a multiple of the patch size, and is not changed.
                side = value if patches == num_patches else patches * self._patch
                changed.setdefault(name, {})[edge] = side
        return changed

    @property
    def _patch(self) -> int:
        return self.adapter.config.vision_config.patch_size

    @property
    def chooses_by_image(self) -> bool:
        """True if the method chooses the size of each image by the content of this image only."""
        if self.identity or self.rule is None or self.resizing != "input" or not self.method.depends_on_content:
            return False
        return self.max_tokens is None and self.budget.per != "prompt" and not self.method.reads_question

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens of an image, or None if the budget is a share."""
        return self.budget.tokens

    @property
    def share(self) -> float:
        """Share of the tokens to keep, for a budget that is a share."""
        assert self.budget.keep is not None  # see `_check`
        return float(self.budget.keep)

    def check_tower_pixels(self, height: int, width: int) -> bool:
        """Return whether the tower has to interpolate its positions for pixels of this size.

        Raises:
            UnsupportedSetupError: If the pixels have the full size although the budget requires a smaller one.
        """
        full_size = self.adapter.config.vision_config.image_size
        if (height, width) != (full_size, full_size):
            return True
        patches = full_size // self._patch
        share = self.share if self.max_tokens is None else min(1.0, self.max_tokens / patches**2)
        if not self.method.depends_on_content and _find_side(patches, share, self.max_tokens) < patches:
            raise UnsupportedSetupError(
                f"{self.method.name}: these pixels were not resized. Make them with the processor that was passed to "
                "patch()."
            )
        return False


def _resize_on_grid(
    grid: Grid, read: SettingsReader, images: list[InputImage], shares: list[float], tokens: int | None = None
) -> tuple[list[tuple[int, int]], dict]:
    """Return sizes that are multiples of a token, and the processor's option `size` that keeps them unchanged.

    Args:
        grid: Function of the processor's rule; see `Rule.grid`.
        shares: Share of the tokens to keep of each image.
        tokens: Maximum number of tokens of an image.
    """
    sizes = []
    for image, share in zip(images, shares, strict=True):
        height, width = image.size
        rows, columns, factor, min_pixels, max_pixels = grid(read, height, width)
        # The processor resizes an image of full size, except an image that it would enlarge to `min_pixels`. This
        # limit is lowered below for all images, and the size of an image must not depend on the other images.
        keeps_size = share >= 1 and round(height / factor) * round(width / factor) * factor**2 >= min_pixels
        small = find_token_grid(rows, columns, share, tokens)
        sizes.append(image.size if keeps_size else (small[0] * factor, small[1] * factor))
    return sizes, {"shortest_edge": min(min_pixels, factor**2), "longest_edge": max_pixels}


def find_token_grid(rows: int, columns: int, share: float, max_tokens: int | None = None) -> tuple[int, int]:
    """Return the (rows, columns) of a smaller grid with the same shape as a grid of tokens.

    The number of tokens is closest to `rows * columns * share` and at most `max_tokens`. The shorter side differs from
    the exact shape by less than one token.
    """
    if share >= 1:
        return rows, columns
    target, ideal = max(1.0, rows * columns * share), rows / columns
    short = max(1.0, min(rows, columns) * math.sqrt(share))
    grids = []
    for side in (math.floor(short), math.ceil(short)):
        for other in (math.floor(target / side), math.ceil(target / side)):
            other = min(max(1, other), max(rows, columns))
            grids.append((side, other) if rows <= columns else (other, side))
    # The grid with both sides rounded down is always within the limit.
    grids = [grid for grid in grids if max_tokens is None or grid[0] * grid[1] <= max_tokens]
    return min(grids, key=lambda grid: (abs(grid[0] * grid[1] - target), abs(math.log(grid[0] / grid[1] / ideal))))


def _find_side(side: int, share: float, max_tokens: int | None = None) -> int:
    """Return the side whose square is closest to `side**2 * share` and at most `max_tokens`."""
    target, last = side**2 * share, side if max_tokens is None else min(side, math.isqrt(max_tokens))
    return min(range(1, last + 1), key=lambda patches: abs(patches**2 - target))


def find_size(image: InputImage, share: float, max_tokens: int | None = None) -> tuple[int, int]:
    """Return the size of the same shape whose number of tokens is closest to the share and at most `max_tokens`.

    Of several such sizes, return the largest. Raise BudgetError if every size has more than `max_tokens` tokens.
    """
    height, width = image.size
    if share >= 1:
        return height, width

    def shrunk(factor: float) -> tuple[int, int]:
        return max(1, round(height * factor)), max(1, round(width * factor))

    count = image.count
    if count is None:
        return shrunk(math.sqrt(share))
    target = share * image.tokens

    def evaluate(power: float) -> tuple[float, float, tuple[int, int]]:
        size = shrunk(math.pow(2, -power))
        tokens = count(*size)
        return math.inf if max_tokens is not None and tokens > max_tokens else abs(tokens - target), power, size

    # The count is a step function and not quite monotone: search all octaves coarsely, then finely around the best.
    octaves = math.ceil(math.log2(max(height, width)))
    coarse = min(evaluate(step / 8) for step in range(8 * octaves + 1))
    fine = (evaluate(coarse[1] + step / 128) for step in range(-15, 16) if coarse[1] + step / 128 >= 0)
    distance, _, size = min(coarse, *fine)
    if distance == math.inf:
        assert max_tokens is not None
        raise _make_size_error(max_tokens, image, count(1, 1))
    return size


def _make_size_error(max_tokens: int, image: InputImage, tokens: int) -> BudgetError:
    height, width = image.size
    return BudgetError(
        f"keep={max_tokens} is too small for an image of {height} x {width} pixels. It has at least {tokens} tokens."
    )
