# SPDX-License-Identifier: Apache-2.0
"""Images in the forms that a processor accepts: PIL images, arrays and tensors, single or in (nested) lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers.image_utils import ChannelDimension, infer_channel_dimension_format

MAX_SIDE = 1024  # `InputImage.grey` is downscaled to this many pixels along the longer side


@dataclass(frozen=True, eq=False)
class InputImage:
    """One image of a processor call.

    Args:
        image: PIL image, array or tensor that the caller passed.
        channels: Channel dimension of an array, "first" or "last". None: infer it.
        prompt: Index of the inner list that contains the image. 0 if the lists are not nested.
        num_prompt_images: Number of images in that list.
        count: Function from (height, width) to the number of visual tokens. None if the processor is not supported.
        question: Question of the prompt if the method sets `reads_question`, else an empty string.
        full_size: (height, width) of the file, if the image was decoded at a smaller size.
        resized_from: (height, width) of the file, if `tokenprune.load_image` has resized the image already.

    Examples:
        >>> InputImage(image).size
        (512, 512)
    """

    image: Any
    channels: str | None = None
    prompt: int = 0
    num_prompt_images: int = 1
    count: Callable[[int, int], int] | None = None
    question: str = ""
    full_size: tuple[int, int] | None = None
    resized_from: tuple[int, int] | None = None

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        if self.full_size is not None:
            return self.full_size
        if isinstance(self.image, Image.Image):
            return self.image.height, self.image.width
        height, width = self._planes.shape[-2:]
        return height, width

    @cached_property
    def tokens(self) -> int:
        """Number of visual tokens without resizing. Number of pixels if tokens cannot be counted."""
        height, width = self.resized_from or self.size
        return height * width if self.count is None else self.count(height, width)

    @cached_property
    def grey(self) -> Tensor:
        """Grey values in [0, 1], shape (H, W), float32, with a longer side of at most `MAX_SIDE`."""
        if isinstance(self.image, Image.Image):
            planes = torch.from_numpy(np.array(self.image.convert("RGB"))).permute(2, 0, 1)
        else:
            planes = self._planes
        is_byte_range = not planes.is_floating_point() or bool(planes.max() > 1)
        planes = planes.float() / 255 if is_byte_range else planes.float()
        if planes.shape[0] >= 3:
            weight = torch.tensor([0.2989, 0.5870, 0.1140], dtype=torch.float32, device="cpu")
            grey = torch.einsum("chw,c->hw", planes[:3].cpu(), weight)
        else:
            grey = planes[0].cpu()
        scale = MAX_SIDE / max(grey.shape)
        if scale < 1:
            size = [max(1, round(side * scale)) for side in grey.shape]
            grey = nn.functional.interpolate(grey[None, None], size=size, mode="bilinear", antialias=True)[0, 0]
        return grey

    @cached_property
    def _planes(self) -> Tensor:
        """Array or tensor as (C, H, W)."""
        values = self.image if isinstance(self.image, Tensor) else torch.from_numpy(np.array(self.image))
        if values.ndim == 2:
            return values[None]
        return values.permute(2, 0, 1) if self._channels_last else values

    @cached_property
    def _channels_last(self) -> bool:
        if self.image.ndim == 2:
            return False
        channels = self.channels or infer_channel_dimension_format(self.image)
        return bool(ChannelDimension(channels) == ChannelDimension.LAST)

    def resize(self, height: int, width: int) -> Any:
        """Return the image in a new size, as the same type. Return the same object if the size is unchanged."""
        if (height, width) == self.size:
            return self.image
        if isinstance(self.image, Image.Image):
            image = self.image
            if image.mode not in ("RGB", "RGBA", "L"):  # palette and 1-bit images cannot be interpolated
                image = image.convert("RGBA" if "transparency" in image.info else "RGB")
            return image.resize((width, height), Image.Resampling.BICUBIC)
        planes = self._planes
        resized = nn.functional.interpolate(
            planes[None].float(), size=(height, width), mode="bicubic", antialias=True, align_corners=False
        )[0]
        if planes.is_floating_point():
            # Bicubic interpolation overshoots at edges. Processors would take values above 1 for a range of 0..255.
            resized = resized.clamp(planes.min(), planes.max()).to(planes.dtype)
        else:
            resized = resized.round().clamp(0, 255).to(planes.dtype)
        if self.image.ndim == 2:
            resized = resized[0]
        elif self._channels_last:
            resized = resized.permute(1, 2, 0)
        return resized.contiguous() if isinstance(self.image, Tensor) else resized.contiguous().numpy()


def collect_images(
    images: Any, make: Callable[[Any, int, int], InputImage]
) -> tuple[list[InputImage], Callable[[list[Any]], Any]]:
    """Extract the images of a processor call and return a function that replaces them.

    Args:
        images: An image, or (nested) lists of images.
        make: Function from (image, index of its inner list, number of images in that list) to an `InputImage`.

    Returns:
        The images in order, and a function from a list of new images to the structure of `images`.
    """
    collected: list[InputImage] = []

    def walk(value: Any, prompt: int, num_images: int) -> Callable[[list[Any]], Any]:
        if isinstance(value, (list, tuple)):
            is_nested = any(isinstance(item, (list, tuple)) for item in value)
            parts = [
                walk(item, i if is_nested else prompt, len(item) if isinstance(item, (list, tuple)) else num_images)
                for i, item in enumerate(value)
            ]
            return lambda new: [part(new) for part in parts]
        if getattr(value, "ndim", 0) == 4:
            return walk(list(value), prompt, num_images)
        index = len(collected)
        collected.append(make(value, prompt, num_images))
        return lambda new: new[index]

    return collected, walk(images, 0, 1)
