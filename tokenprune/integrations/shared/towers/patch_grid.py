# SPDX-License-Identifier: Apache-2.0
"""Trace visual tokens to the patches of the vision tower: the patches of each token, and its cell in the grid."""

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
    """A model whose visual tokens are traced to patches.

    Args:
        base: Module that joins the features of images and the embeddings of text.
        config: Config of the model.

    Attributes:
        family: Row of the model type in the family table.
    """

    def __init__(self, base: nn.Module, config: Any) -> None:
        self.base, self.config, self.family = base, config, get_config_family(config)

    def grids(self, modality: str, arguments: dict[str, Any]) -> list[tuple[int, int, int]] | None:
        """Return (frames, height, width) in tokens of each image, or None if the arguments do not contain them.

        Args:
            arguments: Arguments of `get_image_features` or `get_video_features`.
        """
        sizes = arguments.get(f"{modality}_grid_thw")
        if sizes is None:
            return None
        vision = self.config.vision_config
        merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", 1)
        return [(t, h // merge, w // merge) for t, h, w in torch.as_tensor(sizes, device="cpu").tolist()]


def find_image_grid(row: Family, count: int, config: Any, whole_image: bool = False) -> tuple[int, int, int] | None:
    """Return (1, height, width) of an image without grid data, or None if it is not known.

    Args:
        whole_image: See `Family.is_square`.
    """
    return square_grid(count) if row.is_square(count, config, whole_image) else None


def count_patches(vision: Any) -> int:
    """Return the number of patches of an image of the size in the tower's config."""
    sizes = (vision.image_size, vision.patch_size)
    image, patch = ((size, size) if isinstance(size, int) else tuple(size) for size in sizes)
    return math.prod(pixels // side for pixels, side in zip(image, patch, strict=True))


@dataclass(frozen=True)
class TracedTokens:
    """Visual tokens of all images of a call, traced to their patches.

    Attributes:
        scores: Mean scores of each token's patches, shape (tokens, channels), 0 for tokens without a patch.
        cells: Cell of each token, shape (tokens, 6), int64: tile or frame, row, column, height, width and size (see
            `Patches`). Tiles of all images are numbered consecutively; -1 for tokens without a patch.
        key: All values that determine `cells`, or None if they are not known.
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
    """Average scores of patches over the visual tokens.

    Args:
        arguments: Arguments of `get_image_features` or `get_video_features`.
        total: Number of features that this function returned.
        layers: Scores of each layer that was read, shape (rows of the tower, patches, channels); they are joined along
            the channels. In the layout "runs" a layer may have one score per visual token instead: the output of a
            tower that merges patches itself, such as GLM-4V.
        packed: Order of the features after `pack_image_features`.

    Raises:
        UnsupportedSetupError: If the scores do not fit the visual tokens.
    """
    layout = source.family.patches
    scores = torch.cat(list(layers), dim=-1) if len({layer.shape[:-1] for layer in layers}) == 1 else None
    if layout == "runs":
        traced = _trace_runs(source, source.grids(modality, arguments), [layer.flatten(0, 1) for layer in layers])
    elif scores is None:
        traced = None
    elif modality == "video":
        traced = _trace_pooled(source, arguments, scores)
    elif layout == "sized":
        traced = _trace_sized(source, arguments, scores.flatten(0, 1))
    elif layout == "packed":
        traced = _trace_packed(source, arguments, scores, packed)
    else:
        traced = _trace_tiles(source, arguments, total, scores)
    if traced is None:
        raise UnsupportedSetupError(
            f"The {modality} features of this {source.config.model_type!r} cannot be traced to patches of the vision "
            "tower. Leave them out of the prompt, or use a method that acts after the tower."
        )
    return traced


_CELLS = FIFOCache()


def _build_grid_cells(tiles: int, height: int, width: int, size: int, device: torch.device, first: int = 0) -> Tensor:
    """Return the location of each visual token in its tile, shape (tiles * height * width, 6), int64.

    The columns are tile, row, column, height, width, size. The tensor is cached for images of the same size.

    Args:
        tiles: Number of tiles.
        height: Rows of tokens in a tile.
        width: Columns of tokens in a tile.
        size: Number of patches of a token.
        device: Device of the tensor.
        first: Index of the first tile.
    """

    def make() -> Tensor:
        sides = ((first, first + tiles), (0, height), (0, width))
        axes = [torch.arange(*side, device=device) for side in sides]
        cells = torch.cartesian_prod(*axes).view(-1, 3)
        return torch.cat([cells, to_device([height, width, size], device).expand(len(cells), 3)], dim=1)

    return _CELLS.get((tiles, height, width, size, device, first), make)


def _build_empty_cell(cells: Tensor) -> Tensor:
    """Return the cell of a token without a patch, shape (1, 6), int64, in the style of `cells`."""
    return torch.cat([cells.new_full((1, 1), -1), torch.zeros_like(cells[:1, 1:3]), cells[:1, 3:]], dim=1)


def _patch_grid(source: PatchSource, arguments: dict[str, Any], patches: int) -> tuple[int, int] | None:
    """Return (height, width) of the tower's grid. If pixels may have any size, it follows from the pixels."""
    pixels, patch = arguments.get("pixel_values"), source.config.vision_config.patch_size
    sides = (patch, patch) if isinstance(patch, int) else tuple(patch)
    if isinstance(pixels, torch.Tensor) and pixels.ndim >= 4:
        height, width = (length // side for length, side in zip(pixels.shape[-2:], sides, strict=True))
        if height * width == patches:
            return height, width
    side = math.isqrt(patches)
    return (side, side) if side * side == patches else None


def _trace_tiles(
    source: PatchSource, arguments: dict[str, Any], total: int | None, scores: Tensor
) -> TracedTokens | None:
    rows, patches, channels = scores.shape
    grid = _patch_grid(source, arguments, patches)
    if not total or total % rows or grid is None:
        return None
    tokens = total // rows
    leading = int(tokens == patches + 1)  # the class token is also a feature
    side = math.isqrt(patches // (tokens - leading)) if tokens > leading else 0
    if not side or side * side * (tokens - leading) != patches or grid[0] % side or grid[1] % side:
        return None
    height, width = grid[0] // side, grid[1] // side
    mean = scores
    if side > 1:
        mean = scores.view(rows, height, side, width, side, channels).mean((2, 4)).view(rows, -1, channels)
    cells = _build_grid_cells(rows, height, width, side * side, scores.device).view(rows, -1, 6)
    if leading:
        mean = torch.nn.functional.pad(mean, (0, 0, 1, 0))
        cells = torch.cat([_build_empty_cell(cells[0]).expand(rows, 1, 6), cells], dim=1)
    return TracedTokens(mean.flatten(0, 1), cells.flatten(0, 1), rows, (rows, height, width, side, leading))


def _trace_packed(
    source: PatchSource, arguments: dict[str, Any], scores: Tensor, packed: PackedFeatures | None
) -> TracedTokens | None:
    tiles, patches, channels = scores.shape
    grid = _patch_grid(source, arguments, patches)
    if packed is None or packed.tokens_per_tile != patches or grid is None:
        return None
    cells = _build_grid_cells(tiles, *grid, 1, scores.device)
    ids = to_device(packed.get_feature_ids(torch.cat(packed.images)), scores.device)
    newline = (ids < 0).unsqueeze(-1)
    ids = ids.clamp(min=0)
    flat = scores.reshape(-1, channels)[ids].masked_fill(newline, 0)
    return TracedTokens(flat, torch.where(newline, _build_empty_cell(cells), cells[ids]), tiles)


def _trace_runs(
    source: PatchSource, grids: list[tuple[int, int, int]] | None, layers: Sequence[Tensor]
) -> TracedTokens | None:
    """Trace the tokens of packed towers.

    Args:
        grids: (frames, height, width) in tokens of each image.
        layers: Scores of each layer, shape (patches or visual tokens, channels).
    """
    vision = source.config.vision_config
    size = vision.spatial_merge_size**2
    total = 0 if grids is None else sum(map(math.prod, grids))
    if grids is None or any(len(layer) not in (total, total * size) for layer in layers):
        return None
    tokens = torch.cat([layer.view(total, -1, layer.shape[-1]).mean(1) for layer in layers], dim=-1)
    of_images, start = [], 0
    for frames, height, width in grids:
        # Frames of all images are numbered consecutively.
        of_images.append(_build_grid_cells(frames, height, width, size, tokens.device, start))
        start += frames
    cells = torch.cat(of_images)
    window = getattr(vision, "window_size", None)
    if window and getattr(vision, "fullatt_block_indexes", None) is not None:
        # The tower processes tokens window by window. Windows, and the tokens of a window, are in raster order.
        side = window // vision.spatial_merge_size // vision.patch_size
        keys = [cells[:, 2], cells[:, 1], cells[:, 2] // side, cells[:, 1] // side, cells[:, 0]]
        order = torch.arange(len(cells), device=cells.device)
        for key in keys:
            order = order[key[order].argsort(stable=True)]
        tokens = torch.empty_like(tokens).index_copy(0, order, tokens)
    return TracedTokens(tokens, cells, start)


def _trace_sized(source: PatchSource, arguments: dict[str, Any], scores: Tensor) -> TracedTokens | None:
    side = getattr(source.config, "spatial_merge_size", source.family.get_unit_side(source.config))
    grids = arguments.get("image_grid_hws")
    if grids is None:
        patch = source.config.vision_config.patch_size
        grids = [(height // patch, width // patch) for height, width in image_sizes(arguments)]
    if sum(map(math.prod, grids)) != len(scores):
        return None
    means, cells = [], []
    pairs = zip(grids, scores.split(list(map(math.prod, grids))), strict=True)
    for index, ((height, width), patches) in enumerate(pairs):
        rows, columns = height // side, width // side
        cropped = patches.view(height, width, -1)[: rows * side, : columns * side]
        means.append(cropped.reshape(rows, side, columns, side, -1).mean((1, 3)).flatten(0, 1))
        cells.append(_build_grid_cells(1, rows, columns, side * side, scores.device, index))
    return TracedTokens(torch.cat(means), torch.cat(cells), len(grids))


def image_sizes(arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (height, width) in pixels of each image, from the arguments of `get_image_features` or of a tower."""
    sizes, pixels = arguments.get("image_sizes"), arguments["pixel_values"]
    return [tuple(pixels.shape[-2:])] * len(pixels) if sizes is None else torch.as_tensor(sizes, device="cpu").tolist()


def _trace_pooled(source: PatchSource, arguments: dict[str, Any], scores: Tensor) -> TracedTokens | None:
    """Trace the tokens of videos whose frames are pooled.

    LLaVA-NeXT-Video pools before the projector. LLaVA-OneVision pools features like images and appends a newline to
    each video.
    """
    pool, stride = getattr(source.base, "apply_pooling", None), getattr(source.config, "spatial_pool_stride", None)
    videos, side = arguments.get("pixel_values_videos"), math.isqrt(scores.shape[1])
    if videos is None or len(scores) % len(videos) or side * side != scores.shape[1]:
        return None
    if stride is not None:
        mean = _average_squares(scores, side, stride)
        height = side // stride
        return TracedTokens(mean, _build_grid_cells(len(scores), height, height, stride**2, scores.device), len(scores))
    if pool is None:
        return None
    pooled = pool(scores)
    side, frames = math.isqrt(pooled.shape[1]), len(scores) // len(videos)
    if side * side != pooled.shape[1]:
        return None
    cells = _build_grid_cells(len(scores), side, side, 4, scores.device).view(len(videos), -1, 6)
    newline = _build_empty_cell(cells[0]).expand(len(videos), 1, 6)
    flat = torch.nn.functional.pad(pooled.reshape(len(videos), frames * side * side, -1), (0, 0, 0, 1))
    return TracedTokens(flat.flatten(0, 1), torch.cat([cells, newline], dim=1).flatten(0, 1), len(scores))


def _average_squares(scores: Tensor, side: int, stride: int) -> Tensor:
    """Average over squares of `stride` patches of square frames. Incomplete squares are dropped, as by pooling."""
    cropped_side, count = side // stride * stride, side // stride
    grid = scores.view(len(scores), side, side, -1)[:, :cropped_side, :cropped_side]
    return grid.reshape(len(scores), count, stride, count, stride, -1).mean((2, 4)).flatten(0, 2)
