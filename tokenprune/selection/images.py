# SPDX-License-Identifier: Apache-2.0
"""Images as callers hand them to a processor: PIL images, arrays and tensors, alone, in lists or lists of lists."""

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

# Statistics are taken of at most this many pixels along the longer side.
LONGEST = 1024


@dataclass(frozen=True, eq=False)
class InputImage:
    """One image of a processor's call.

    image:       what the caller gave. channels: "first" or "last", None to find out.
    prompt:      number of the (inner) list it stands in, 0 if the lists are not nested. companions: images in it.
    count:       (height, width) -> visual tokens, None where the processor's tokens cannot be counted.
    question:    of its prompt, for a method that `reads_question`; else empty.
    """

    image: Any
    channels: str | None = None
    prompt: int = 0
    num_prompt_images: int = 1
    count: Callable[[int, int], int] | None = None
    question: str = ""

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        if isinstance(self.image, Image.Image):
            return self.image.height, self.image.width
        height, width = self._planes.shape[-2:]
        return height, width

    @cached_property
    def tokens(self) -> int:
        """Visual tokens at full size; pixels, where tokens cannot be counted."""
        height, width = self.size
        return height * width if self.count is None else self.count(height, width)

    @cached_property
    def grey(self) -> Tensor:
        """float32 `[H, W]` in 0..1, the longer side at most `LONGEST`."""
        if isinstance(self.image, Image.Image):
            planes = torch.from_numpy(np.array(self.image.convert("RGB"))).permute(2, 0, 1)
        else:
            planes = self._planes
        whole = not planes.is_floating_point() or bool(planes.max() > 1)
        planes = planes.float() / 255 if whole else planes.float()
        if planes.shape[0] >= 3:
            weight = torch.tensor([0.2989, 0.5870, 0.1140], dtype=torch.float32, device="cpu")
            grey = torch.einsum("chw,c->hw", planes[:3].cpu(), weight)
        else:
            grey = planes[0].cpu()
        share = LONGEST / max(grey.shape)
        if share < 1:
            size = [max(1, round(side * share)) for side in grey.shape]
            grey = nn.functional.interpolate(grey[None, None], size=size, mode="bilinear", antialias=True)[0, 0]
        return grey

    @cached_property
    def _planes(self) -> Tensor:
        """`[C, H, W]` of an array or tensor."""
        values = self.image if isinstance(self.image, Tensor) else torch.from_numpy(np.array(self.image))
        if values.ndim == 2:
            return values[None]
        return values.permute(2, 0, 1) if self._channels_last else values

    @cached_property
    def _channels_last(self) -> bool:
        if self.image.ndim == 2:
            return False
        found = self.channels or infer_channel_dimension_format(self.image)
        return bool(ChannelDimension(found) == ChannelDimension.LAST)

    def resize(self, height: int, width: int) -> Any:
        """Return the image in another size, as the same kind of object; itself, if it has that size."""
        if (height, width) == self.size:
            return self.image
        if isinstance(self.image, Image.Image):
            image = self.image
            if image.mode not in ("RGB", "RGBA", "L"):  # palettes and bits cannot be interpolated
                image = image.convert("RGBA" if "transparency" in image.info else "RGB")
            return image.resize((width, height), Image.Resampling.BICUBIC)
        planes = self._planes
        small = nn.functional.interpolate(
            planes[None].float(), size=(height, width), mode="bicubic", antialias=True, align_corners=False
        )[0]
        if planes.is_floating_point():
            # Bicubic overshoots at edges; processors take what lies outside the range for something else.
            small = small.clamp(planes.min(), planes.max()).to(planes.dtype)
        else:
            small = small.round().clamp(0, 255).to(planes.dtype)
        small = small[0] if self.image.ndim == 2 else small.permute(1, 2, 0) if self._channels_last else small
        return small.contiguous() if isinstance(self.image, Tensor) else small.contiguous().numpy()


def collect_images(
    images: Any, make: Callable[[Any, int, int], InputImage]
) -> tuple[list[InputImage], Callable[[list[Any]], Any]]:
    """Return the images of a call, and a function that puts other images in their places.

    make: (image, number of its inner list, images in that list) -> Image.
    """
    found: list[InputImage] = []

    def walk(value: Any, prompt: int, companions: int) -> Callable[[list[Any]], Any]:
        if isinstance(value, (list, tuple)):
            nested = any(isinstance(item, (list, tuple)) for item in value)
            parts = [
                walk(item, number if nested else prompt, len(item) if isinstance(item, (list, tuple)) else companions)
                for number, item in enumerate(value)
            ]
            return lambda new: [part(new) for part in parts]
        if getattr(value, "ndim", 0) == 4:
            return walk(list(value), prompt, companions)
        index = len(found)
        found.append(make(value, prompt, companions))
        return lambda new: new[index]

    return found, walk(images, 0, 1)
