# SPDX-License-Identifier: Apache-2.0
"""JPEG files that are decoded at the scale of their use: small for a model with a budget, and small for a drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

import tokenprune

Size = tuple[int, int]  # (width, height)
FindLargest = Callable[[Size], Size]  # size of an image -> largest size of its drawing


@dataclass(frozen=True)
class Photo:
    """A JPEG file that is not decoded completely.

    Attributes:
        path: The file.
        preview: A small image for drawings.
        size: (width, height) of the file, upright.
    """

    path: Path
    preview: Image.Image
    size: Size

    @classmethod
    def open(cls, path: Path, find_largest: FindLargest) -> Photo | None:
        """Return the photo of a JPEG file, or None for another format. Raises the errors of Pillow."""
        try:
            file = Image.open(path)
        except UnidentifiedImageError:
            return None
        with file as image:
            if not isinstance(image, JpegImageFile):
                return None
            is_turned = image.getexif().get(Image.ExifTags.Base.Orientation) in (5, 6, 7, 8)
            size = image.size[::-1] if is_turned else image.size
            largest = find_largest(size)
            # Makes the decoder use a smaller scale. The gap of 1.0 allows a scale just above the requested size.
            image.thumbnail(largest[::-1] if is_turned else largest, Image.Resampling.LANCZOS, reducing_gap=1.0)
            return cls(path, ImageOps.exif_transpose(image).convert("RGB"), size)

    def load(self, processor: Any) -> Image.Image:
        """Return the image with the pixels that a processor needs.

        Raises:
            TokenPruneError: If the budget of the processor's patch does not fit the image.
        """
        return tokenprune.load_image(self.path, processor=processor)


def get_preview(image: Image.Image | Photo) -> Image.Image:
    """Return the image to draw."""
    return image.preview if isinstance(image, Photo) else image


def load_for(image: Image.Image | Photo, processor: Any) -> Image.Image:
    """Return the image that a processor takes."""
    return image.load(processor) if isinstance(image, Photo) else image
