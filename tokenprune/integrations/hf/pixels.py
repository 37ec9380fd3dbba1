# SPDX-License-Identifier: Apache-2.0
"""Methods that act on pixels: they change what a processor makes of a picture, and what the vision tower takes."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from tokenprune.base import ImageChooser, ResizeMethod
from tokenprune.budget import Budget
from tokenprune.errors import AlreadyPatchedError, BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.attachable import Attachable
from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.pictures import Picture, collect
from tokenprune.integrations.hf.pixel_counts import PixelCounts
from tokenprune.integrations.hf.prompts import PromptReader, intercepted
from tokenprune.token_counts import Reader, countable_processors, image_processor_of, rule_for

MARK = "_tokenprune_patch"
# The question of each picture of the processor's call that is under way, for methods that read it.
_QUESTIONS: ContextVar[list[str] | None] = ContextVar("tokenprune_questions", default=None)


class PixelPatch(Attachable):
    """Makes a processor hand out smaller pictures, and the vision tower take them.

    How depends on the processor (`Rule.resizing`, or `Adapter.resizing` for one whose tokens cannot be counted):
    "input": it follows the picture's size, so the picture is shrunk before it; "target": it makes every picture one
    size, so that size is shrunk, and the tower interpolates its positions; None: neither is possible.

    adapter: of the model that takes the pixels; None if only the processor is at hand.
    Raises OptionError without a processor, BudgetError for a budget that is no share, UnsupportedSetupError for None.
    """

    def __init__(self, method: ResizeMethod, budget: Budget, processor: Any, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.method, self.budget, self.adapter, self.processor = method, budget, adapter, processor
        self.image_processor = image_processor_of(processor)
        self.identity = budget.is_identity()
        self.counts = PixelCounts()
        if self.identity:
            return
        self.rule = rule_for(processor)
        self.resizing = self.rule.resizing if self.rule else adapter.resizing if adapter else None
        if adapter is not None and adapter.resizing is None:
            self.resizing = None
        self._check()
        self.prompts = PromptReader(processor, method.name) if method.reads_question else None

    def _check(self) -> None:
        name, keep = self.method.name, self.budget.keep
        given = callable(getattr(self.image_processor, "preprocess", None))
        if self.resizing is None and (self.rule or self.adapter):
            family = self.adapter.config.model_type if self.adapter else type(self.image_processor).__name__
            raise UnsupportedSetupError(
                f"{name}: the processor of {family!r} makes as many tokens of a small picture as of a large one; "
                "use method='pool' for a baseline without fine detail"
            )
        if keep is None or isinstance(keep, numbers.Integral):
            raise BudgetError(f"{name} takes keep as a share (a float), not {self.budget}")
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
                f"{', '.join(countable_processors())}; use a method that acts on the model, such as 'pool', instead"
            )
        if self.rule is None and self.resizing == "input" and "height" in Reader(self.processor).size():
            raise UnsupportedSetupError(
                f"{name}: {type(self.image_processor).__name__} makes every picture one size, so a smaller one would "
                "lose detail and save nothing"
            )
        if self.resizing == "target":
            self._check_tower()
        elif self.rule is not None:
            self.rule.count(Reader(self.processor), 100, 100, 1)  # raises if the processor does not tell enough

    def _check_tower(self) -> None:
        if self.adapter is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: {type(self.image_processor).__name__} makes every picture one size, which the "
                "vision tower expects: patch the model, tokenprune.patch(model, ..., processor=processor)"
            )
        tower = getattr(self.adapter.base, "vision_tower", None)
        if tower is None or "interpolate_pos_encoding" not in inspect.signature(tower.forward).parameters:
            raise UnsupportedSetupError(
                f"{self.method.name}: {type(tower).__name__} cannot interpolate its positions, so it takes no other "
                "size of picture"
            )

    # -- attaching

    def _attach(self) -> None:
        if self.image_processor is None:  # keep=1.0 needs none
            return
        before = type(self.image_processor)
        if present := patch_on(self.processor):
            raise AlreadyPatchedError(
                f"the processor is patched already with {present.describe()}: undo that first "
                "(tokenprune.unpatch, tokenprune.unpatch_processor), or use a processor of its own for each model"
            )
        patch = self

        @functools.wraps(before.preprocess)
        def preprocess(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
            images, kwargs = patch.change(images, kwargs)
            return before.preprocess(self, images, *args, **kwargs)

        # A subclass of the same name, not an attribute of the instance: that would end up in what it prints and saves.
        names = {"preprocess": preprocess, MARK: self, "__module__": before.__module__}
        self.swap_class(self.image_processor, type(before.__name__, (before,), names))
        if self.identity:
            return
        if self.prompts is not None:
            self.swap_class(self.processor, intercepted(self.processor, self._around, {}))
        if self.resizing == "target":
            tower = self.adapter.base.vision_tower
            self.hook(tower.register_forward_pre_hook(self._interpolate, with_kwargs=True))

    def describe(self) -> str:
        return f"{self.method.name} ({self.budget})"

    # -- in a call of the processor

    @contextmanager
    def _around(self, images: Any, text: Any) -> Iterator[tuple[Any, Any]]:
        prompts = self.prompts.prompts(text)
        rows = self.prompts.rows(images, prompts)
        questions = [self.prompts.question(prompt) for prompt, row in zip(prompts, rows, strict=True) for _ in row]
        token = _QUESTIONS.set(questions)
        try:
            yield images, text
        finally:
            _QUESTIONS.reset(token)

    def change(self, images: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the pictures and settings of a processor's call as they have to be."""
        if self.identity:
            return images, kwargs
        read = Reader(self.processor, kwargs)
        counted = self.rule.count if self.rule else None
        questions = iter(_QUESTIONS.get() or [])

        def make(image: Any, prompt: int, companions: int) -> Picture:
            count = counted and (lambda height, width: counted(read, height, width, companions))
            return Picture(image, kwargs.get("input_data_format"), prompt, companions, count, next(questions, ""))

        pictures, rebuild = collect(self.image_processor.fetch_images(images), make)
        if not pictures:
            return images, kwargs
        shares = self.method.shares(pictures, float(self.budget.keep), self.budget.per)
        if self.resizing == "target":
            # Pictures of a call are stacked, so they have one size.
            share = 1.0 if max(shares) >= 1 else sum(shares) / len(shares)
            kwargs = kwargs | self._target(read, share)
            self._note(pictures, [picture.size for picture in pictures], kwargs)
            return images, kwargs
        if self.rule is not None and self.rule.grid is not None:
            sizes, size = self._on_grid(read, pictures, shares)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("min_pixels", "max_pixels")}
            kwargs["size"] = size
        else:
            sizes = [_scaled(picture, share) for picture, share in zip(pictures, shares, strict=True)]
        self._note(pictures, sizes, kwargs)
        return rebuild([picture.resized(*size) for picture, size in zip(pictures, sizes, strict=True)]), kwargs

    def _note(self, pictures: list[Picture], sizes: list[tuple[int, int]], kwargs: dict[str, Any]) -> None:
        """Remember how many tokens `pictures` make with `sizes` and settings `kwargs`, and would have made."""
        if self.rule is None:
            return
        read = Reader(self.processor, kwargs)
        made = [self.rule.count(read, *size, one.companions) for one, size in zip(pictures, sizes, strict=True)]
        self.counts.note(sum(made), sum(picture.tokens for picture in pictures))

    def _on_grid(
        self, read: Reader, pictures: list[Picture], shares: list[float]
    ) -> tuple[list[tuple[int, int]], dict]:
        """Sizes in whole tokens, which the processor then leaves alone."""
        sizes = []
        for picture, share in zip(pictures, shares, strict=True):
            height, width = picture.size
            rows, columns, factor, least, most = self.rule.grid(read, height, width)
            # A picture of full size is left to the processor, unless it is only made that large by the lower limit,
            # which has to go: what becomes of a picture must not depend on the others in the call.
            left = share >= 1 and round(height / factor) * round(width / factor) * factor**2 >= least
            small = _grid(rows, columns, share)
            sizes.append(picture.size if left else (small[0] * factor, small[1] * factor))
        return sizes, {"shortest_edge": min(least, factor**2), "longest_edge": most}

    def _target(self, read: Reader, share: float) -> dict[str, Any]:
        if read("do_resize") is False:
            raise UnsupportedSetupError(f"{self.method.name}: do_resize=False leaves nothing to shrink")
        changed: dict[str, Any] = {}
        for name in ("size", "crop_size"):
            for edge, value in read.size(name).items():
                full = value // self._patch
                patches = _patches(full, share)
                # Left as it is where the share rounds to everything: it need not be a multiple of the patch.
                side = value if patches == full else patches * self._patch
                changed.setdefault(name, {})[edge] = side
        return changed

    @property
    def _patch(self) -> int:
        return self.adapter.config.vision_config.patch_size

    def _interpolate(self, tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        pixels = args[0] if args else kwargs["pixel_values"]
        full = self.adapter.config.vision_config.image_size
        if tuple(pixels.shape[-2:]) != (full, full):
            return args, kwargs | {"interpolate_pos_encoding": True}
        patches = full // self._patch
        if not self.method.by_content and _patches(patches, float(self.budget.keep)) < patches:
            raise UnsupportedSetupError(
                f"{self.method.name}: these pixels have the full size: make them with the processor that was given to "
                "patch()"
            )
        return args, kwargs


def patch_for(
    method: ResizeMethod | ImageChooser, budget: Budget, processor: Any, adapter: Adapter | None = None
) -> Any:
    """Return the part of a patch that makes `processor` do what `method` says; raises as `PixelPatch` and `ViewPatch`
    do."""
    from tokenprune.integrations.hf.views import ViewPatch

    return (ViewPatch if isinstance(method, ImageChooser) else PixelPatch)(method, budget, processor, adapter)


def patch_on(processor: Any) -> Any:
    """Return the patch that a processor, or its image processor, carries."""
    return getattr(type(image_processor_of(processor)), MARK, None) or getattr(type(processor), MARK, None)


def _grid(rows: int, columns: int, share: float) -> tuple[int, int]:
    """The grid whose tokens are closest to the share of `rows * columns`, its shape off by less than a token on the
    shorter side."""
    if share >= 1:
        return rows, columns
    wanted, ideal = max(1.0, rows * columns * share), rows / columns
    short = max(1.0, min(rows, columns) * math.sqrt(share))
    grids = []
    for side in (math.floor(short), math.ceil(short)):
        for other in (math.floor(wanted / side), math.ceil(wanted / side)):
            other = min(max(1, other), max(rows, columns))
            grids.append((side, other) if rows <= columns else (other, side))
    return min(grids, key=lambda grid: (abs(grid[0] * grid[1] - wanted), abs(math.log(grid[0] / grid[1] / ideal))))


def _patches(side: int, share: float) -> int:
    """The number whose square is closest to the share of `side ** 2`."""
    wanted = side**2 * share
    return min(range(1, side + 1), key=lambda patches: abs(patches**2 - wanted))


def _scaled(picture: Picture, share: float) -> tuple[int, int]:
    """The size with the same shape whose tokens are closest to the share; the largest of several."""
    height, width = picture.size
    if share >= 1:
        return height, width
    if picture.count is None:
        return tuple(max(1, round(side * math.sqrt(share))) for side in (height, width))
    wanted = share * picture.tokens

    def at(power: float) -> tuple[float, float, tuple[int, int]]:
        size = tuple(max(1, round(side * 2**-power)) for side in (height, width))
        return abs(picture.count(*size) - wanted), power, size

    # Counts go in steps, which are not quite monotone: look at all octaves coarsely, then finely around the best.
    octaves = math.ceil(math.log2(max(height, width)))
    coarse = min(at(step / 8) for step in range(8 * octaves + 1))
    fine = (at(coarse[1] + step / 128) for step in range(-15, 16) if coarse[1] + step / 128 >= 0)
    return min(coarse, *fine)[2]
