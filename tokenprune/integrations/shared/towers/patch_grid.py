# SPDX-License-Identifier: Apache-2.0
"""From patches of a vision tower to visual tokens: what a token is made of, and where on the grid it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures
from tokenprune.kernels.transfer import FIFOCache, to_device
from tokenprune.models.families import Family, get_config_family
from tokenprune.selection.segments import square_grid

if TYPE_CHECKING:
    from torch import Tensor, nn


class PatchSource:
    """A model, as far as it is asked how the patches of its vision tower become visual tokens.

    base: the module that joins images and text. config: the model's. family: the row of its type, as its config has it.
    """

    def __init__(self, base: nn.Module, config: Any) -> None:
        self.base, self.config, self.family = base, config, get_config_family(config)

    def grids(self, modality: str, arguments: dict[str, Any]) -> list[tuple[int, int, int]] | None:
        """Return (frames, height, width) in tokens of each image, from the arguments of `get_image_features` or
        `get_video_features`; None where they do not tell."""
        sizes = arguments.get(f"{modality}_grid_thw")
        if sizes is None:
            return None
        vision = self.config.vision_config
        merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", 1)
        return [(t, h // merge, w // merge) for t, h, w in torch.as_tensor(sizes, device="cpu").tolist()]


def find_image_grid(row: Family, count: int, config: Any, whole_image: bool = False) -> tuple[int, int, int] | None:
    """Return (1, height, width) of an image of `count` tokens whose data tells none; None where it is not known.

    config: of the model. whole_image: see `Family.is_square`.
    """
    return square_grid(count) if row.is_square(count, config, whole_image) else None


def count_patches(vision: Any) -> int:
    """Return the patches of an image of the size that a tower's config names."""
    image, patch = ((of, of) if isinstance(of, int) else tuple(of) for of in (vision.image_size, vision.patch_size))
    return math.prod(pixels // of for pixels, of in zip(image, patch, strict=True))


@dataclass(frozen=True)
class TracedTokens:
    """Visual tokens of all images of a call, end to end.

    scores: `[tokens, C]`, means over each token's patches, 0 for what is no patch.
    cells: long `[tokens, 6]`: tile or frame, row, column, height, width, size (see `Patches`); tiles are numbered
    through, -1 is no patch. tiles: how many there are. key: all that cells follow from, None where that is not known.
    """

    scores: Tensor
    cells: Tensor
    tiles: int
    key: tuple[int, ...] | None = None


def trace_tokens(
    source: PatchSource,
    modality: str,
    arguments: dict[str, Any],
    total: int | None,
    layers: Sequence[Tensor],
    packed: PackedFeatures | None,
) -> TracedTokens:
    """Average scores of patches over the visual tokens that the patches become.

    Args:
        modality: "image" or "video".
        arguments: Arguments of `get_image_features` or `get_video_features`.
        total: Number of features that this function returned.
        layers: Scores of each layer that was read, shape (rows of the tower, patches, channels); they are joined along
            the channels. In the layout "runs" a layer may have one score per visual token instead: the output of a
            tower that merges patches itself, such as GLM-4V's.
        packed: The reordering that `pack_image_features` did.

    Raises:
        UnsupportedSetupError: If the scores do not fit the visual tokens.
    """
    layout = source.family.patches
    scores = torch.cat(list(layers), dim=-1) if len({layer.shape[:-1] for layer in layers}) == 1 else None
    if layout == "runs":
        placed = _runs(source, source.grids(modality, arguments), [layer.flatten(0, 1) for layer in layers])
    elif scores is None:
        placed = None
    elif modality == "video":
        placed = _pooled(source, arguments, scores)
    elif layout == "sized":
        placed = _sized(source, arguments, scores.flatten(0, 1))
    elif layout == "packed":
        placed = _packed(source, arguments, scores, packed)
    else:
        placed = _tiles(source, arguments, total, scores)
    if placed is None:
        raise UnsupportedSetupError(
            f"The {modality} features of this {source.config.model_type!r} cannot be traced to patches of the vision "
            "tower. Leave them out of the prompt, or use a method that acts after the tower."
        )
    return placed


_CELLS = FIFOCache()


def _grid_cells(tiles: int, height: int, width: int, size: int, device: torch.device, first: int = 0) -> Tensor:
    """long `[tiles * height * width, 6]`, of tiles from number `first` on. Images of one size share it."""

    def make() -> Tensor:
        sides = ((first, first + tiles), (0, height), (0, width))
        axes = [torch.arange(*one, device=device) for one in sides]
        cells = torch.cartesian_prod(*axes).view(-1, 3)
        return torch.cat([cells, to_device([height, width, size], device).expand(len(cells), 3)], dim=1)

    return _CELLS.get((tiles, height, width, size, device, first), make)


def _no_patch(cells: Tensor) -> Tensor:
    """long `[1, 6]`: the cell of a token that is no patch, beside `cells`."""
    return torch.cat([cells.new_full((1, 1), -1), torch.zeros_like(cells[:1, 1:3]), cells[:1, 3:]], dim=1)


def _patch_grid(source: PatchSource, arguments: dict[str, Any], patches: int) -> tuple[int, int] | None:
    """Return (height, width) of the tower's grid: the pixels tell, where they may be of any size."""
    pixels, patch = arguments.get("pixel_values"), source.config.vision_config.patch_size
    sides = (patch, patch) if isinstance(patch, int) else tuple(patch)
    if isinstance(pixels, torch.Tensor) and pixels.ndim >= 4:
        height, width = (side // of for side, of in zip(pixels.shape[-2:], sides, strict=True))
        if height * width == patches:
            return height, width
    side = math.isqrt(patches)
    return (side, side) if side * side == patches else None


def _tiles(source: PatchSource, arguments: dict[str, Any], total: int | None, scores: Tensor) -> TracedTokens | None:
    rows, patches, channels = scores.shape
    grid = _patch_grid(source, arguments, patches)
    if not total or total % rows or grid is None:
        return None
    tokens = total // rows
    leading = int(tokens == patches + 1)  # the class token is a feature, too
    side = math.isqrt(patches // (tokens - leading)) if tokens > leading else 0
    if not side or side * side * (tokens - leading) != patches or grid[0] % side or grid[1] % side:
        return None
    height, width = grid[0] // side, grid[1] // side
    mean = scores.view(rows, height, side, width, side, channels).mean((2, 4)).view(rows, -1, channels)
    cells = _grid_cells(rows, height, width, side * side, scores.device).view(rows, -1, 6)
    if leading:
        mean = torch.nn.functional.pad(mean, (0, 0, 1, 0))
        cells = torch.cat([_no_patch(cells[0]).expand(rows, 1, 6), cells], dim=1)
    return TracedTokens(mean.flatten(0, 1), cells.flatten(0, 1), rows, (rows, height, width, side, leading))


def _packed(
    source: PatchSource, arguments: dict[str, Any], scores: Tensor, packed: PackedFeatures | None
) -> TracedTokens | None:
    tiles, patches, channels = scores.shape
    grid = _patch_grid(source, arguments, patches)
    if packed is None or packed.tokens_per_tile != patches or grid is None:
        return None
    cells = _grid_cells(tiles, *grid, 1, scores.device)
    ids = to_device(packed.get_feature_ids(torch.cat(packed.images)), scores.device)
    newline = (ids < 0).unsqueeze(-1)
    ids = ids.clamp(min=0)
    flat = scores.reshape(-1, channels)[ids].masked_fill(newline, 0)
    return TracedTokens(flat, torch.where(newline, _no_patch(cells), cells[ids]), tiles)


def _runs(
    source: PatchSource, grids: list[tuple[int, int, int]] | None, layers: Sequence[Tensor]
) -> TracedTokens | None:
    """layers: scores of each layer, shape (patches or visual tokens, channels)."""
    vision = source.config.vision_config
    size = vision.spatial_merge_size**2
    total = 0 if grids is None else sum(map(math.prod, grids))
    if grids is None or any(len(layer) not in (total, total * size) for layer in layers):
        return None
    tokens = torch.cat([layer.view(total, -1, layer.shape[-1]).mean(1) for layer in layers], dim=-1)
    of_images, start = [], 0
    for frames, height, width in grids:
        # Frames of all images are numbered through.
        of_images.append(_grid_cells(frames, height, width, size, tokens.device, start))
        start += frames
    cells = torch.cat(of_images)
    window = getattr(vision, "window_size", None)
    if window and getattr(vision, "fullatt_block_indexes", None) is not None:
        # Inside the tower tokens stand window by window; each window, and each token in it, in raster order.
        side = window // vision.spatial_merge_size // vision.patch_size
        keys = [cells[:, 2], cells[:, 1], cells[:, 2] // side, cells[:, 1] // side, cells[:, 0]]
        order = torch.arange(len(cells), device=cells.device)
        for key in keys:
            order = order[key[order].argsort(stable=True)]
        tokens = torch.empty_like(tokens).index_copy(0, order, tokens)
    return TracedTokens(tokens, cells, start)


def _sized(source: PatchSource, arguments: dict[str, Any], scores: Tensor) -> TracedTokens | None:
    side = getattr(source.config, "spatial_merge_size", source.family.get_unit_side(source.config))
    grids = arguments.get("image_grid_hws")
    if grids is None:
        patch = source.config.vision_config.patch_size
        grids = [(height // patch, width // patch) for height, width in image_sizes(arguments)]
    if sum(map(math.prod, grids)) != len(scores):
        return None
    means, cells = [], []
    for number, ((height, width), own) in enumerate(zip(grids, scores.split(list(map(math.prod, grids))), strict=True)):
        down, across = height // side, width // side
        whole = own.view(height, width, -1)[: down * side, : across * side]
        means.append(whole.reshape(down, side, across, side, -1).mean((1, 3)).flatten(0, 1))
        cells.append(_grid_cells(1, down, across, side * side, scores.device, number))
    return TracedTokens(torch.cat(means), torch.cat(cells), len(grids))


def image_sizes(arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (height, width) in pixels of each image, from the arguments of `get_image_features` or of a tower."""
    sizes, pixels = arguments.get("image_sizes"), arguments["pixel_values"]
    return [tuple(pixels.shape[-2:])] * len(pixels) if sizes is None else torch.as_tensor(sizes, device="cpu").tolist()


def _pooled(source: PatchSource, arguments: dict[str, Any], scores: Tensor) -> TracedTokens | None:
    """Videos, whose frames are pooled: of LLaVA-NeXT-Video ahead of the projector, of LLaVA-OneVision like images, and
    a newline follows each video there."""
    pool, stride = getattr(source.base, "apply_pooling", None), getattr(source.config, "spatial_pool_stride", None)
    videos, side = arguments.get("pixel_values_videos"), math.isqrt(scores.shape[1])
    if videos is None or len(scores) % len(videos) or side * side != scores.shape[1]:
        return None
    if stride is not None:
        mean = _squares(scores, side, stride)
        height = side // stride
        return TracedTokens(mean, _grid_cells(len(scores), height, height, stride**2, scores.device), len(scores))
    if pool is None:
        return None
    pooled = pool(scores)
    side, frames = math.isqrt(pooled.shape[1]), len(scores) // len(videos)
    if side * side != pooled.shape[1]:
        return None
    cells = _grid_cells(len(scores), side, side, 4, scores.device).view(len(videos), -1, 6)
    newline = _no_patch(cells[0]).expand(len(videos), 1, 6)
    flat = torch.nn.functional.pad(pooled.reshape(len(videos), frames * side * side, -1), (0, 0, 0, 1))
    return TracedTokens(flat.flatten(0, 1), torch.cat([cells, newline], dim=1).flatten(0, 1), len(scores))


def _squares(scores: Tensor, side: int, stride: int) -> Tensor:
    """Means over squares of `stride` patches of square frames; patches that fill none are left out, as by a pooling."""
    whole, count = side // stride * stride, side // stride
    grid = scores.view(len(scores), side, side, -1)[:, :whole, :whole]
    return grid.reshape(len(scores), count, stride, count, stride, -1).mean((2, 4)).flatten(0, 2)
