# SPDX-License-Identifier: Apache-2.0
"""Make smaller images of those that a processor gets, by what a method that acts on pixels says of them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.shared.pixel_counts import PixelCounts
from tokenprune.models.token_counts import SettingsReader, find_rule, get_image_processor, list_countable_processors
from tokenprune.selection.images import InputImage, collect_images
from tokenprune.selection.sites.pixels import ResizeMethod

# `Rule.grid`.
Grid = Callable[[SettingsReader, int, int], tuple[int, int, int, int, int]]


class Resizer:
    """Makes images of a processor's call smaller.

    How depends on the processor (`Rule.resizing`, or `Adapter.resizing` for one whose tokens cannot be counted):
    "input": it follows the image's size, so the image is shrunk before it; "target": it makes every image one
    size, so that size is shrunk, and the tower interpolates its positions; None: neither is possible.

    adapter: of the model that takes the pixels (`resizing`, `base`, `config`); None if only the processor is at hand.
    Raises OptionError without a processor, BudgetError for a budget that is no share, UnsupportedSetupError for None.
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
        self._check()

    def _check(self) -> None:
        name, keep = self.method.name, self.budget.keep
        given = callable(getattr(self.image_processor, "preprocess", None))
        if self.resizing is None and (self.rule or self.adapter):
            family = self.adapter.config.model_type if self.adapter else type(self.image_processor).__name__
            raise UnsupportedSetupError(
                f"{name}: the processor of {family!r} makes as many tokens of a small image as of a large one; "
                "use method='pool' for a baseline without fine detail"
            )
        if keep is None or (isinstance(keep, numbers.Integral) and not self.method.takes_tokens):
            raise BudgetError(f"{name} takes keep as a share (a float), not {self.budget}")
        if self.max_tokens is None:
            self.method.check_keep(float(keep))
        if not given and self.processor is not None:
            raise OptionError(
                f"{name} acts on pixels: a {type(self.processor).__name__} makes none; give the model's whole "
                "processor, AutoProcessor.from_pretrained(...), or its image processor"
            )
        if not given:
            raise OptionError(
                f"{name} acts on pixels: pass the model's processor, tokenprune.patch(model, {name!r}, keep={keep}, "
                "processor=processor)"
            )
        if self.resizing is None:
            raise UnsupportedSetupError(
                f"{name}: how {type(self.image_processor).__name__} makes tokens is not known; known are "
                f"{', '.join(list_countable_processors())}; "
                "use a method that acts on the model, such as 'pool', instead"
            )
        if self.rule is None and self.max_tokens is not None:
            raise UnsupportedSetupError(
                f"{name}: the tokens of {type(self.image_processor).__name__} cannot be counted; give keep as a share"
            )
        if self.rule is None and self.resizing == "input" and "height" in SettingsReader(self.processor).size():
            raise UnsupportedSetupError(
                f"{name}: {type(self.image_processor).__name__} makes every image one size, so a smaller one would "
                "lose detail and save nothing"
            )
        if self.resizing == "target":
            self._check_tower()
        elif self.rule is not None:
            self.rule.count(SettingsReader(self.processor), 100, 100, 1)  # raises if the processor does not tell enough

    def _check_tower(self) -> None:
        if self.adapter is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: {type(self.image_processor).__name__} makes every image one size, which the "
                "vision tower expects: patch the model, tokenprune.patch(model, ..., processor=processor)"
            )
        tower = getattr(self.adapter.base, "vision_tower", None)
        if tower is None or "interpolate_pos_encoding" not in inspect.signature(tower.forward).parameters:
            raise UnsupportedSetupError(
                f"{self.method.name}: {type(tower).__name__} cannot interpolate its positions, so it takes no other "
                "size of image"
            )

    def resize(self, images: Any, kwargs: dict[str, Any], questions: Iterable[str] = ()) -> tuple[Any, dict[str, Any]]:
        """Return the images and settings of a processor's call as they have to be.

        questions: of each one, for a method that reads them.
        """
        if self.identity:
            return images, kwargs
        read = SettingsReader(self.processor, kwargs)
        rule, left = self.rule, iter(questions)

        def make(image: Any, prompt: int, companions: int) -> InputImage:
            count = None if rule is None else lambda height, width: rule.count(read, height, width, companions)
            return InputImage(image, kwargs.get("input_data_format"), prompt, companions, count, next(left, ""))

        found, rebuild = collect_images(self.image_processor.fetch_images(images), make)
        if not found:
            return images, kwargs
        shares = self._shares(found)
        if self.resizing == "target":
            # Images of a call are stacked, so they have one size.
            share = 1.0 if max(shares) >= 1 else sum(shares) / len(shares)
            kwargs = kwargs | self._target(read, share)
            self._note(found, [one.size for one in found], kwargs)
            return images, kwargs
        if rule is not None and rule.grid is not None:
            sizes, size = _on_grid(rule.grid, read, found, shares, self.max_tokens)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("min_pixels", "max_pixels")}
            kwargs["size"] = size
        else:
            sizes = [_scaled(one, share, self.max_tokens) for one, share in zip(found, shares, strict=True)]
        self._note(found, sizes, kwargs)
        return rebuild([one.resize(*size) for one, size in zip(found, sizes, strict=True)]), kwargs

    def _shares(self, images: list[InputImage]) -> list[float]:
        if self.max_tokens is None:
            return self.method.compute_shares(images, self.share, self.budget.per)
        return [min(1.0, self.max_tokens / image.tokens) for image in images]

    def _note(self, images: list[InputImage], sizes: list[tuple[int, int]], kwargs: dict[str, Any]) -> None:
        """Remember how many tokens `images` make with `sizes` and settings `kwargs`, and would have made."""
        if self.rule is None:
            return
        rule, read = self.rule, SettingsReader(self.processor, kwargs)
        made = [rule.count(read, *size, one.num_prompt_images) for one, size in zip(images, sizes, strict=True)]
        self.counts.record(sum(made), sum(image.tokens for image in images))

    def _target(self, read: SettingsReader, share: float) -> dict[str, Any]:
        if read("do_resize") is False:
            raise UnsupportedSetupError(f"{self.method.name}: do_resize=False leaves nothing to shrink")
        changed: dict[str, Any] = {}
        for name in ("size", "crop_size"):
            for edge, value in read.size(name).items():
                full = value // self._patch
                patches = _patches(full, share, self.max_tokens)
                # Left as it is where the share rounds to everything: it need not be a multiple of the patch.
                side = value if patches == full else patches * self._patch
                changed.setdefault(name, {})[edge] = side
        return changed

    @property
    def _patch(self) -> int:
        return self.adapter.config.vision_config.patch_size

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of an image; None where the budget is a share."""
        return self.budget.tokens

    @property
    def share(self) -> float:
        """The share of the tokens to keep, of a budget that is one."""
        assert self.budget.keep is not None  # see `_check`
        return float(self.budget.keep)

    def check_tower_pixels(self, height: int, width: int) -> bool:
        """Return whether the tower has to interpolate its positions for pixels of this size; raises
        UnsupportedSetupError for pixels of full size that ought to be smaller."""
        full = self.adapter.config.vision_config.image_size
        if (height, width) != (full, full):
            return True
        patches = full // self._patch
        share = self.share if self.max_tokens is None else min(1.0, self.max_tokens / patches**2)
        if not self.method.depends_on_content and _patches(patches, share, self.max_tokens) < patches:
            raise UnsupportedSetupError(
                f"{self.method.name}: these pixels have the full size: make them with the processor that was given to "
                "patch()"
            )
        return False


def _on_grid(
    grid: Grid, read: SettingsReader, images: list[InputImage], shares: list[float], tokens: int | None = None
) -> tuple[list[tuple[int, int]], dict]:
    """Return sizes in whole tokens, which the processor then leaves alone, and its setting `size` for them. tokens: the
    most of an image."""
    sizes = []
    for image, share in zip(images, shares, strict=True):
        height, width = image.size
        rows, columns, factor, least, most = grid(read, height, width)
        # An image of full size is left to the processor, unless it is only made that large by the lower limit,
        # which has to go: what becomes of an image must not depend on the others in the call.
        left = share >= 1 and round(height / factor) * round(width / factor) * factor**2 >= least
        small = find_token_grid(rows, columns, share, tokens)
        sizes.append(image.size if left else (small[0] * factor, small[1] * factor))
    return sizes, {"shortest_edge": min(least, factor**2), "longest_edge": most}


def find_token_grid(rows: int, columns: int, share: float, most: int | None = None) -> tuple[int, int]:
    """Return the grid whose tokens are closest to the share of `rows * columns`, and at most `most`, its shape off by
    less than a token on the shorter side."""
    if share >= 1:
        return rows, columns
    wanted, ideal = max(1.0, rows * columns * share), rows / columns
    short = max(1.0, min(rows, columns) * math.sqrt(share))
    grids = []
    for side in (math.floor(short), math.ceil(short)):
        for other in (math.floor(wanted / side), math.ceil(wanted / side)):
            other = min(max(1, other), max(rows, columns))
            grids.append((side, other) if rows <= columns else (other, side))
    grids = [grid for grid in grids if most is None or grid[0] * grid[1] <= most]  # those rounded down are
    return min(grids, key=lambda grid: (abs(grid[0] * grid[1] - wanted), abs(math.log(grid[0] / grid[1] / ideal))))


def _patches(side: int, share: float, most: int | None = None) -> int:
    """Return the number whose square is closest to the share of `side ** 2`, and at most `most`."""
    wanted, last = side**2 * share, side if most is None else min(side, math.isqrt(most))
    return min(range(1, last + 1), key=lambda patches: abs(patches**2 - wanted))


def _scaled(image: InputImage, share: float, most: int | None = None) -> tuple[int, int]:
    """Return the size with the same shape whose tokens are closest to the share, and at most `most`; the largest of
    several. Raises BudgetError where no size has so few tokens."""
    height, width = image.size
    if share >= 1:
        return height, width

    def shrunk(factor: float) -> tuple[int, int]:
        return max(1, round(height * factor)), max(1, round(width * factor))

    count = image.count
    if count is None:
        return shrunk(math.sqrt(share))
    wanted = share * image.tokens

    def at(power: float) -> tuple[float, float, tuple[int, int]]:
        size = shrunk(math.pow(2, -power))
        tokens = count(*size)
        return math.inf if most is not None and tokens > most else abs(tokens - wanted), power, size

    # Counts go in steps, which are not quite monotone: look at all octaves coarsely, then finely around the best.
    octaves = math.ceil(math.log2(max(height, width)))
    coarse = min(at(step / 8) for step in range(8 * octaves + 1))
    fine = (at(coarse[1] + step / 128) for step in range(-15, 16) if coarse[1] + step / 128 >= 0)
    distance, _, size = min(coarse, *fine)
    if distance == math.inf:
        raise BudgetError(f"keep={most}: an image of {height} x {width} pixels makes {count(1, 1)} tokens or more here")
    return size
