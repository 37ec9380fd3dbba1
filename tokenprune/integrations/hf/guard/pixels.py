# SPDX-License-Identifier: Apache-2.0
"""Measure text in the pixel inputs of `get_image_features`, and assign the values to visual segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.guard.images import SIDE, compute_text_shares, split_blocks
from tokenprune.integrations.hf.sequence.record import align_per_image, get_record
from tokenprune.integrations.hf.sequence.segments import count_features, find_pieces
from tokenprune.kernels.transfer import AsyncValues, to_device

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call

# Maximum number of frames of a video that are measured, evenly spaced.
_MAX_FRAMES = 8
# Smallest side of a block of patches, in pixels. Smaller blocks are too small for text.
_MIN_SIDE = 16


@torch.no_grad()
def measure_text(adapter: Adapter, modality: str, arguments: dict[str, Any]) -> AsyncValues | None:
    """Measure how much each image, tile or video looks like text.

    Args:
        adapter: Adapter of the model.
        modality: "image" or "video".
        arguments: Arguments of `get_image_features` or `get_video_features`, with grids on the host.

    Returns:
        The text shares, on their way to the host, or None for pixels of an unknown form.
    """
    pixels = arguments.get("pixel_values_videos") if modality == "video" else None
    pixels = arguments.get("pixel_values") if pixels is None else pixels
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
        return None
    if pixels.ndim == 5:
        if modality == "video":
            pixels = pixels[:, :: -(-pixels.shape[1] // _MAX_FRAMES)]
        planes, num_images = pixels.flatten(0, 1), len(pixels)
    elif pixels.ndim == 4:
        planes, num_images = pixels, len(pixels)
    elif pixels.ndim == 2 and adapter.family.patches == "runs":
        return _measure_patches(adapter, pixels, arguments.get(f"{modality}_grid_thw"))
    else:
        return None
    if not num_images or planes.shape[1] not in (1, 3) or min(planes.shape[-2:]) < SIDE:
        return None
    blocks = split_blocks(planes)
    blocks = blocks.flatten(0, 1)
    owner = torch.arange(len(blocks), device=pixels.device) // (len(blocks) // num_images)
    return AsyncValues(compute_text_shares(blocks, owner, num_images))


def _measure_patches(adapter: Adapter, pixels: Tensor, grids: Any) -> AsyncValues | None:
    """Measure flattened patches as in Qwen-VL, where the patches of one token are adjacent."""
    vision = adapter.config.vision_config
    patch, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    channels = pixels.shape[1] // (frames * patch**2)
    if grids is None or merge * patch < _MIN_SIDE or channels * frames * patch**2 != pixels.shape[1]:
        return None
    counts = torch.as_tensor(grids, device="cpu").prod(1) // merge**2
    if int(counts.sum()) * merge**2 != len(pixels):
        return None
    squares = pixels.view(-1, merge, merge, channels, frames, patch, patch).mean((3, 4))
    blocks = squares.transpose(2, 3).reshape(-1, merge * patch, merge * patch)
    owner = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    return AsyncValues(compute_text_shares(blocks, to_device(owner, pixels.device), len(counts)))


@dataclass(frozen=True)
class SegmentLooks:
    """Text shares of the images of each segment.

    Attributes:
        parts: For each segment and each of its pieces of an image: the text shares of an encoder call, and the indices
            that belong to the piece.
    """

    parts: list[list[tuple[AsyncValues, Sequence[int]]]]

    def is_ready(self) -> bool:
        return all(
            looks.is_ready() for looks in {id(part[0]): part[0] for parts in self.parts for part in parts}.values()
        )

    def read(self) -> list[float | None]:
        """Return the largest text share of each segment, or None. Waits for the device."""
        values = {id(looks): looks.read() for parts in self.parts for looks, _ in parts}
        shares = [
            [_mean([values[id(looks)][index] for index in indices]) for looks, indices in parts] for parts in self.parts
        ]
        return [max(segment_shares, default=None) for segment_shares in shares]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def match_segments(call: Call, adapter: Adapter) -> SegmentLooks:
    """Assign the text shares of a call's images to its segments."""
    # (row, first position, text shares and indices)
    pieces: list[tuple[int, int, list[tuple[AsyncValues, Sequence[int]]]]] = []
    for modality, output in call.outputs.items():
        mask, looks = call.prompt.placeholders[modality], get_record(output).looks
        features = output if adapter.family.features_per_image else None
        step = adapter.family.step_within_image
        for row, columns, indices in _match_pieces(modality, mask, output, features, looks, step):
            pieces.append((row, int(columns[0]), [] if indices is None or looks is None else [(looks, indices)]))
    pieces.sort(key=lambda piece: piece[:2])
    rows = call.state.segments.row
    if [piece[0] for piece in pieces] == rows:
        return SegmentLooks([piece[2] for piece in pieces])
    # A segment is a frame or a row, not an image: each segment gets the values of its row.
    return SegmentLooks([[part for piece in pieces if piece[0] == row for part in piece[2]] for row in rows])


def _match_pieces(
    modality: str, mask: Tensor, output: Any, features: Any, looks: AsyncValues | None, step: int
) -> list[tuple]:
    """Return (row, columns, indices into `looks` or None) of each piece of a modality."""
    rows, columns = mask.nonzero(as_tuple=True)
    if not len(rows):
        return []
    pieces = find_pieces(modality, rows, columns, features, step)
    piece_rows, lengths = [piece[0] for piece in pieces], [len(piece[1]) for piece in pieces]
    indices: Sequence[Any] = [None] * len(pieces)
    if looks is not None:
        indices = align_per_image([[index] for index in range(looks.count)], piece_rows)
        if None in indices:
            indices = _match_tiles(piece_rows, lengths, looks.count, count_features(output))
        if None in indices and looks.count == len(mask):  # Idefics: one value per row
            indices = [[row] for row in piece_rows]
    return [(row, piece[1], index) for row, piece, index in zip(piece_rows, pieces, indices, strict=True)]


def _match_tiles(rows: list[int], lengths: list[int], count: int, total: int | None) -> Sequence[Any]:
    """Return the tile indices of each piece, if every tile has the same number of tokens."""
    if not total or total % count or sum(lengths) % total:
        return [None] * len(rows)
    size, copies, start, groups = total // count, sum(lengths) // total, 0, []
    for row, length in zip(rows, lengths, strict=True):
        if row % copies == 0:
            groups.append(list(range(start, start + length // size)))
            start += length // size
    fits = start == count and all(length % size == 0 for length in lengths)
    return align_per_image(groups, rows) if fits else [None] * len(rows)
