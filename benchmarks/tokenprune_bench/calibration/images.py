# SPDX-License-Identifier: Apache-2.0
"""The images of a calibration: read one by one, and made into what the vision tower takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune_bench.profiling import media

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class ImageFiles:
    """Iterate over images, PIL or tensors. total: how many, 0 if that is unknown.

    digest: tells one set of files from another, None if these are not files.
    """

    def __init__(self, images: str | Path | Iterable[Any]) -> None:
        self.digest: str | None = None
        self.items: Iterable[Any]
        if isinstance(images, (str, Path)):
            self.items = _files(Path(images))
        elif isinstance(images, Iterable):
            self.items = images
        else:
            raise OptionError(f"images={images!r} must be a folder, or paths, PIL images or tensors")
        self.total = len(self.items) if isinstance(self.items, Sized) else 0
        if isinstance(self.items, Sized) and not self.total:
            raise OptionError("images is empty: calibration takes images like those that the model will see")
        if isinstance(self.items, (list, tuple)) and all(isinstance(item, (str, Path)) for item in self.items):
            self.items = [Path(item) for item in self.items]
            names = [f"{path.name}:{path.stat().st_size if path.is_file() else None}" for path in self.items]
            self.digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise OptionError(f"images={str(folder)!r} is no folder: name one with images in it")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise OptionError(f"there are no images in {folder}: looked for {' '.join(SUFFIXES)}")
    return found


class Pixels:
    """Make of a batch of images the input of a tower: a float tensor `[tiles, 3, H, W]`."""

    def __init__(self, model: nn.Module, tower: nn.Module, processor: Any) -> None:
        self.model, self.weights = model, next(tower.parameters())
        self.processor = getattr(processor, "image_processor", processor)

    def __call__(self, batch: list[Any]) -> tuple[Tensor, ...]:
        tiles = [self._tiles(item) for item in batch]
        if len({tile.shape[1:] for tile in tiles}) > 1:
            raise OptionError(f"images of different sizes, {sorted({tuple(t.shape[2:]) for t in tiles})}: resize them")
        return (torch.cat(tiles).to(self.weights.device, self.weights.dtype),)

    def _tiles(self, item: Any) -> Tensor:
        if isinstance(item, (str, Path)):
            item = read_image(Path(item))
        if isinstance(item, Image.Image):
            item = self._process(item.convert("RGB"))
        if not isinstance(item, Tensor) or item.ndim not in (3, 4):
            what = f"a tensor of shape {tuple(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}"
            raise OptionError(f"images holds {what}: use paths, PIL images, or tensors [3, H, W] or [tiles, 3, H, W]")
        return item if item.ndim == 4 else item[None]

    def _process(self, image: Image.Image) -> Tensor:
        from tokenprune.integrations.timm import is_timm

        if is_timm(self.model):
            if self.processor is None:
                from timm.data import create_transform, resolve_model_data_config

                self.processor = create_transform(**resolve_model_data_config(self.model))
            return self.processor(image)
        if self.processor is None:
            raise OptionError("images need the model's processor to become pixels: pass processor=")
        # One by one: images of different shapes give different numbers of tiles.
        pixels = self.processor(images=[image], return_tensors="pt")["pixel_values"]
        return pixels.flatten(0, -4)


class PackedPixels(Pixels):
    """Make of a batch of images the input of a packed tower: patches of all of them, and each one's grid."""

    def __call__(self, batch: list[Any]) -> tuple[Tensor, ...]:
        """Return float `[patches, values]` and long `[images, 3]`."""
        opened = [read_image(Path(item)) if isinstance(item, (str, Path)) else item for item in batch]
        for item in opened:
            if not isinstance(item, Image.Image):
                raise OptionError(
                    f"images holds a {type(item).__name__}: this tower takes images of any size, so that only the "
                    "processor can make its patches: use paths or PIL images"
                )
        if self.processor is None:
            raise OptionError("images need the model's processor to become pixels: pass processor=")
        made = self.processor(images=[item.convert("RGB") for item in opened], return_tensors="pt")
        device = self.weights.device
        return made["pixel_values"].to(device, self.weights.dtype), made["image_grid_thw"].to(device)


def read_image(path: Path) -> Image.Image:
    """Return the image in a file; raises TokenPruneError for what is none."""
    try:
        return media.read_image(media.Source(str(path), 0, lambda: path))
    except media.RowError as error:
        raise TokenPruneError(f"{error}; repair it or take it away") from error
