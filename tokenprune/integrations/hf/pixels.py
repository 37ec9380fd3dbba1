# SPDX-License-Identifier: Apache-2.0
"""Methods that act on pixels: they change what the model's processor makes of a picture."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import torch
from torch import nn

from tokenprune.base import Method
from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.adapters import Adapter


class PixelPatch:
    """Makes a processor hand out smaller pictures, and the vision tower take them.

    How depends on the family (`Adapter.resizing`): "input": the processor follows the picture's size, so the picture is
    shrunk before it; "target": the processor makes every picture one size, so that size is shrunk; None: neither is
    possible.
    Raises OptionError without a processor, BudgetError for a budget that is no share, UnsupportedSetupError for None.
    """

    def __init__(self, adapter: Adapter, method: Method, budget: Budget, processor: Any) -> None:
        self.adapter, self.identity = adapter, budget.is_identity()
        if self.identity:
            return
        family = adapter.config.model_type
        if adapter.resizing is None:
            raise UnsupportedSetupError(
                f"{method.name}: the processor of {family!r} makes as many tokens of a small picture as of a large "
                "one; use method='pool' for a baseline without fine detail"
            )
        if budget.keep is None or isinstance(budget.keep, numbers.Integral):
            raise BudgetError(f"{method.name} takes keep as a share of the pixels (a float), not {budget}")
        image_processor = getattr(processor, "image_processor", processor)
        if not callable(getattr(image_processor, "preprocess", None)):
            raise OptionError(
                f"{method.name} acts on pixels: pass the model's processor, tokenprune.patch(model, {method.name!r}, "
                f"keep={budget.keep}, processor=processor)"
            )
        self.image_processor, self.scale = image_processor, method.scale(budget.keep)
        self.name = method.name

    def attach(self) -> None:
        if self.identity:
            return
        original = self.image_processor.preprocess
        change = self._shrink_input if self.adapter.resizing == "input" else self._shrink_target

        @functools.wraps(original)
        def preprocess(images: Any, *args: Any, **kwargs: Any) -> Any:
            images, kwargs = change(images, kwargs)
            return original(images, *args, **kwargs)

        # On the instance, so that detaching is deleting it.
        self.image_processor.preprocess = preprocess
        self._hook = None
        if self.adapter.resizing == "target":
            tower = self.adapter.base.vision_tower
            self._hook = tower.register_forward_pre_hook(self._interpolate, with_kwargs=True)

    def detach(self) -> None:
        if self.identity:
            return
        del self.image_processor.preprocess
        if self._hook is not None:
            self._hook.remove()

    def _shrink_input(self, images: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return _map_images(images, self._resized), kwargs

    def _resized(self, image: Any) -> Any:
        if isinstance(image, torch.Tensor):
            height, width = image.shape[-2:]
            size = (self._side(height), self._side(width))
            small = nn.functional.interpolate(image[None].float(), size=size, mode="bicubic", antialias=True)[0]
            return (
                small.round().clamp(0, 255).to(image.dtype) if not image.is_floating_point() else small.to(image.dtype)
            )
        from PIL import Image
        from transformers.image_utils import load_image

        image = (
            Image.fromarray(image)
            if hasattr(image, "__array_interface__") and not isinstance(image, Image.Image)
            else image
        )
        image = load_image(image)
        return image.resize((self._side(image.width), self._side(image.height)), Image.Resampling.BICUBIC)

    def _side(self, side: int) -> int:
        return max(1, round(side * self.scale))

    def _shrink_target(self, images: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        patch = self.adapter.config.vision_config.patch_size
        changed = {}
        for name in ("size", "crop_size"):
            size = kwargs.get(name) or getattr(self.image_processor, name, None)
            if size is not None:
                # Down to whole patches, up where rounding says so: a picture of n x n patches becomes one of m x m.
                changed[name] = {
                    edge: patch * max(1, round(dict(size)[edge] / patch * self.scale))
                    for edge in dict(size)
                    if dict(size)[edge]
                }
        return images, kwargs | changed

    def _interpolate(self, tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        pixels = args[0] if args else kwargs["pixel_values"]
        if math.prod(pixels.shape[-2:]) == self.adapter.config.vision_config.image_size**2:
            raise UnsupportedSetupError(
                f"{self.name}: these pixels have the full size: make them with the processor that was given to patch()"
            )
        return args, kwargs | {"interpolate_pos_encoding": True}


def _map_images(images: Any, change: Any) -> Any:
    if isinstance(images, (list, tuple)):
        return [_map_images(image, change) for image in images]
    if getattr(images, "ndim", 0) == 4:  # a stack of pictures
        return [change(image) for image in images]
    return change(images)
