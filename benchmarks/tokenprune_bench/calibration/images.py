# SPDX-License-Identifier: Apache-2.0
"""Images of a calibration, and their conversion to inputs of the vision tower."""

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
    """Iterable of images: paths, PIL images or tensors.

    Attributes:
        total: Number of images, 0 if unknown.
        digest: Hash of the file names and sizes. None if the images are not files.
    """

    def __init__(self, images: str | Path | Iterable[Any]) -> None:
        self.digest: str | None = None
        self.items: Iterable[Any]
        if isinstance(images, (str, Path)):
            self.items = _list_image_files(Path(images))
        elif isinstance(images, Iterable):
            self.items = images
        else:
            raise OptionError(f"images={images!r} is not valid. Pass a folder, paths, PIL images or tensors.")
        self.total = len(self.items) if isinstance(self.items, Sized) else 0
        if isinstance(self.items, Sized) and not self.total:
            raise OptionError("images is empty. Pass images like the model's real inputs.")
        if isinstance(self.items, (list, tuple)) and all(isinstance(item, (str, Path)) for item in self.items):
            self.items = [Path(item) for item in self.items]
            names = [f"{path.name}:{path.stat().st_size if path.is_file() else None}" for path in self.items]
            self.digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def _list_image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise OptionError(f"images={str(folder)!r} is not a folder. Pass a folder of images.")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise OptionError(f"{folder} has no images ({' '.join(SUFFIXES)}).")
    return files


class Pixels:
    """Convert a batch of images to the tower's input, a float tensor of shape (tiles, 3, height, width)."""

    def __init__(self, model: nn.Module, tower: nn.Module, processor: Any) -> None:
        self.model, self.weights = model, next(tower.parameters())
        self.processor = getattr(processor, "image_processor", processor)

    def __call__(self, batch: list[Any]) -> tuple[Tensor, ...]:
        tiles = [self._tiles(item) for item in batch]
        if len({tile.shape[1:] for tile in tiles}) > 1:
            raise OptionError(f"Images differ in size: {sorted({tuple(t.shape[2:]) for t in tiles})}. Resize them.")
        return (torch.cat(tiles).to(self.weights.device, self.weights.dtype),)

    def _tiles(self, item: Any) -> Tensor:
        if isinstance(item, (str, Path)):
            item = read_image(Path(item))
        if isinstance(item, Image.Image):
            item = self._process(item.convert("RGB"))
        if not isinstance(item, Tensor) or item.ndim not in (3, 4):
            kind = f"a tensor of shape {tuple(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}"
            raise OptionError(
                f"images contains {kind}. Use paths, PIL images, or tensors [3, H, W] or [tiles, 3, H, W]."
            )
        return item if item.ndim == 4 else item[None]

    def _process(self, image: Image.Image) -> Tensor:
        from tokenprune.integrations.timm import is_timm

        if is_timm(self.model):
            if self.processor is None:
                from timm.data import create_transform, resolve_model_data_config

                self.processor = create_transform(**resolve_model_data_config(self.model))
            return self.processor(image)
        if self.processor is None:
            raise OptionError("Images need the model's processor. Pass processor=...")
        # One image at a time: images of different shapes have different numbers of tiles.
        pixels = self.processor(images=[image], return_tensors="pt")["pixel_values"]
        return pixels.flatten(0, -4)


class PackedPixels(Pixels):
    """Convert a batch of images to the input of a packed tower: all patches, and the grid of each image."""

    def __call__(self, batch: list[Any]) -> tuple[Tensor, ...]:
        """Return the patches, float, shape (patches, values), and the grids, int64, shape (images, 3)."""
        opened = [read_image(Path(item)) if isinstance(item, (str, Path)) else item for item in batch]
        for item in opened:
            if not isinstance(item, Image.Image):
                raise OptionError(
                    f"images contains a {type(item).__name__}, but only the processor can make patches for this "
                    "tower. Use paths or PIL images."
                )
        if self.processor is None:
            raise OptionError("Images need the model's processor. Pass processor=...")
        inputs = self.processor(images=[item.convert("RGB") for item in opened], return_tensors="pt")
        device = self.weights.device
        return inputs["pixel_values"].to(device, self.weights.dtype), inputs["image_grid_thw"].to(device)


def read_image(path: Path) -> Image.Image:
    """Read an image file.

    Raises:
        TokenPruneError: If the file is not a readable image.
    """
    try:
        return media.read_image(media.Source(str(path), 0, lambda: path))
    except media.RowError as error:
        raise TokenPruneError(f"{error}; repair or remove the file") from error
