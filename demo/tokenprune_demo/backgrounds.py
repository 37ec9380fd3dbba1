# SPDX-License-Identifier: Apache-2.0
"""Backgrounds of drawn images: plain colours, gradients, textures, and photographs of installed packages."""

from __future__ import annotations

import importlib
import math
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

SIZE = 224
BACKGROUNDS = ("plain", "gradient", "texture", "photo")
PHOTOS = {
    "train": (
        "skimage/data/chelsea.png",
        "skimage/data/astronaut.png",
        "skimage/data/hubble_deep_field.jpg",
        "skimage/data/grass.png",
        "skimage/data/gravel.png",
        "skimage/data/brick.png",
        "skimage/data/camera.png",
        "skimage/data/retina.jpg",
        "sklearn/datasets/images/china.jpg",
        "sklearn/datasets/images/flower.jpg",
    ),
    "heldout": (
        "skimage/data/coffee.png",
        "skimage/data/rocket.jpg",
        "matplotlib/mpl-data/sample_data/grace_hopper.jpg",
    ),
}


@cache
def load_photos(split: str = "train") -> tuple[Image.Image, ...]:
    """Return the photographs of a split. Photographs of packages that are not installed are left out."""
    photos = []
    for name in PHOTOS[split]:
        package, _, rest = name.partition("/")
        try:
            root = Path(importlib.import_module(package).__file__).parent
        except ImportError:
            continue
        if (root / rest).exists():
            photo = Image.open(root / rest).convert("RGB")
            scale = 448 / min(photo.size)
            photos.append(photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.BILINEAR))
    return tuple(photos)


def draw_background(rng: np.random.Generator, kind: str, photos: tuple[Image.Image, ...]) -> Image.Image:
    """Draw a background of a kind. Without photographs, "photo" falls back to "texture"."""
    first, second = rng.integers(20, 256, 3), rng.integers(20, 256, 3)
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    if kind == "plain":
        return Image.new("RGB", (SIZE, SIZE), tuple(int(v) for v in first))
    if kind == "photo" and photos:
        photo = photos[rng.integers(len(photos))]
        side = int(rng.integers(SIZE, min(photo.size) + 1))
        left, top = int(rng.integers(photo.width - side + 1)), int(rng.integers(photo.height - side + 1))
        crop = photo.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), Image.BILINEAR)
        if rng.random() < 0.5:
            crop = crop.transpose(Image.FLIP_LEFT_RIGHT)
        if rng.random() < 0.3:
            crop = crop.filter(ImageFilter.BoxBlur(1.5))
        shade = rng.uniform(0.5, 1.0)
        return crop.point([int(v * shade) for v in range(256)] * 3)
    if kind == "gradient":
        angle = rng.uniform(0, 2 * math.pi)
        t = (x - SIZE / 2) * math.cos(angle) + (y - SIZE / 2) * math.sin(angle)
        t = (t - t.min()) / (t.max() - t.min())
    else:
        second = np.clip(first + rng.integers(-70, 71, 3), 10, 255)
        style, period = rng.integers(3), int(rng.integers(8, 40))
        if style == 0:
            t = np.kron(rng.random((112, 112)), np.ones((2, 2)))
        elif style == 1:
            a, b = ((1, 0), (0, 1), (1, 1), (1, -1))[rng.integers(4)]
            t = ((a * x + b * y) // period) % 2
        else:
            t = (x // period + y // period) % 2
    pixels = first + (second - first) * np.asarray(t, dtype=np.float32)[..., None]
    return Image.fromarray(pixels.astype(np.uint8))
