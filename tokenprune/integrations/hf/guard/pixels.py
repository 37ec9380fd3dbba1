# SPDX-License-Identifier: Apache-2.0
"""Images as a model's `get_image_features` gets them, cut into blocks for the guard; and whose image is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.guard.images import SIDE, blocks_of, text_shares
from tokenprune.integrations.hf.sequence.record import align_per_image, get_record
from tokenprune.integrations.hf.sequence.segments import count_features, find_pieces
from tokenprune.kernels.transfer import AsyncValues, to_device

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call

# Of a video at most this many frames are looked at, at even distances.
_FRAMES = 8
# A block of patches that is smaller tells nothing.
_LEAST_SIDE = 16


@torch.no_grad()
def look(adapter: Adapter, modality: str, arguments: dict[str, Any]) -> AsyncValues | None:
    """Return how much each image (or tile, or video) looks like text; None for pixels in a form that is not known.

    arguments: of `get_image_features` or `get_video_features`, with grids on the host.
    """
    pixels = arguments.get("pixel_values_videos") if modality == "video" else None
    pixels = arguments.get("pixel_values") if pixels is None else pixels
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
        return None
    if pixels.ndim == 5:
        if modality == "video":
            pixels = pixels[:, :: -(-pixels.shape[1] // _FRAMES)]
        planes, images = pixels.flatten(0, 1), len(pixels)
    elif pixels.ndim == 4:
        planes, images = pixels, len(pixels)
    elif pixels.ndim == 2 and adapter.family.patches == "runs":
        return _of_patches(adapter, pixels, arguments.get(f"{modality}_grid_thw"))
    else:
        return None
    if not images or planes.shape[1] not in (1, 3) or min(planes.shape[-2:]) < SIDE:
        return None
    blocks = blocks_of(planes)
    blocks = blocks.flatten(0, 1)
    owner = torch.arange(len(blocks), device=pixels.device) // (len(blocks) // images)
    return AsyncValues(text_shares(blocks, owner, images))


def _of_patches(adapter: Adapter, pixels: Tensor, sizes: Any) -> AsyncValues | None:
    """Qwen-VL: flattened patches of all images, those that make one token side by side."""
    vision = adapter.config.vision_config
    patch, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    channels = pixels.shape[1] // (frames * patch**2)
    if sizes is None or merge * patch < _LEAST_SIDE or channels * frames * patch**2 != pixels.shape[1]:
        return None
    counts = torch.as_tensor(sizes, device="cpu").prod(1) // merge**2
    if int(counts.sum()) * merge**2 != len(pixels):
        return None
    squares = pixels.view(-1, merge, merge, channels, frames, patch, patch).mean((3, 4))
    blocks = squares.transpose(2, 3).reshape(-1, merge * patch, merge * patch)
    owner = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    return AsyncValues(text_shares(blocks, to_device(owner, pixels.device), len(counts)))


@dataclass(frozen=True)
class SegmentLooks:
    """The likeness of each segment's images to text.

    parts: (looks, indices of its values in them) for each piece of image, of each segment.
    """

    parts: list[list[tuple[AsyncValues, Sequence[int]]]]

    def is_ready(self) -> bool:
        return all(late.is_ready() for late in {id(one[0]): one[0] for parts in self.parts for one in parts}.values())

    def read(self) -> list[float | None]:
        """Return the largest value of each segment's pieces, None where it has none; wait for values on their way."""
        values = {id(late): late.read() for parts in self.parts for late, _ in parts}
        shares = [[_mean([values[id(late)][at] for at in which]) for late, which in parts] for parts in self.parts]
        return [max(of_segment, default=None) for of_segment in shares]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def looks_of_segments(call: Call, adapter: Adapter) -> SegmentLooks:
    """Match what was seen of a call's images with its segments."""
    pieces: list[tuple[int, int, list[tuple[AsyncValues, Sequence[int]]]]] = []  # (row, first position, its looks)
    for modality, output in call.outputs.items():
        mask, looks = call.prompt.placeholders[modality], get_record(output).looks
        known = output if adapter.family.features_per_image else None
        for row, columns, which in _matched(modality, mask, output, known, looks, adapter.family.step_within_image):
            pieces.append((row, int(columns[0]), [] if which is None or looks is None else [(looks, which)]))
    pieces.sort(key=lambda piece: piece[:2])
    rows = call.state.segments.row
    if [piece[0] for piece in pieces] == rows:
        return SegmentLooks([piece[2] for piece in pieces])
    # Frames apart, or a whole prompt at once: what is seen of a row holds for all of it.
    return SegmentLooks([[one for piece in pieces if piece[0] == row for one in piece[2]] for row in rows])


def _matched(modality: str, mask: Tensor, output: Any, known: Any, looks: AsyncValues | None, step: int) -> list[tuple]:
    """(row, columns, indices of its values in `looks` or None) of each piece of a modality."""
    rows, columns = mask.nonzero(as_tuple=True)
    if not len(rows):
        return []
    pieces = find_pieces(modality, rows, columns, known, step)
    of_rows, lengths = [piece[0] for piece in pieces], [len(piece[1]) for piece in pieces]
    which: Sequence[Any] = [None] * len(pieces)
    if looks is not None:
        which = align_per_image([[index] for index in range(looks.count)], of_rows)
        if None in which:
            which = _tiles(of_rows, lengths, looks.count, count_features(output))
        if None in which and looks.count == len(mask):  # Idefics: what belongs to a row stands in its row
            which = [[row] for row in of_rows]
    return [(row, piece[1], found) for row, piece, found in zip(of_rows, pieces, which, strict=True)]


def _tiles(rows: list[int], lengths: list[int], count: int, total: int | None) -> Sequence[Any]:
    """Values are of tiles, which all have as many tokens: a piece has those that its tokens are made of."""
    if not total or total % count or sum(lengths) % total:
        return [None] * len(rows)
    size, copies, at, groups = total // count, sum(lengths) // total, 0, []
    for row, length in zip(rows, lengths, strict=True):
        if row % copies == 0:
            groups.append(list(range(at, at + length // size)))
            at += length // size
    fits = at == count and all(length % size == 0 for length in lengths)
    return align_per_image(groups, rows) if fits else [None] * len(rows)
