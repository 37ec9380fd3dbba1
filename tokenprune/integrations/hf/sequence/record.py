# SPDX-License-Identifier: Apache-2.0
"""Record of encoded images or videos, stored on the encoder's output.

`generate` encodes images before any forward, so the record reaches the forward together with the output. It is an item
of the output, because accelerate drops attributes when it moves outputs between devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from tokenprune.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from tokenprune.integrations.shared.towers.tower_scores import TowerValues
    from tokenprune.kernels.transfer import AsyncValues

T = TypeVar("T")

KEY = "tokenprune_record"


@dataclass
class EncoderRecord:
    """Values about one call of `get_image_features` or `get_video_features`.

    Each field has one writer, and is None if the writer is not part of the patch. `owners`, `kept` and `attention` are
    set at the end of the vision tower, the other fields later. Counts and grids are on the host.

    Attributes:
        grids: (frames, height, width) of each image or video, in tokens. Written by the engine.
        num_encoded: Number of encoded images or videos. `generate` may repeat their features later.
        frames: Number of decoder frames of each video. Written by the engine, or by adapters that merge images.
        owners: Merged token of each token that entered the tower, int64, shape (tiles, tokens), or a list with one
            tensor per packed image.
        block_tokens: Number of tokens that entered each block of the tower, over all images.
        groups: Index of the first feature of each feature's merged token, int64, one tensor per image.
        kept: Mask of features whose patches entered the tower, bool, on the host, one tensor per image. The other
            features are zeros.
        attention: Values of each observable and block, float32, in pieces of shape (rows, patches, channels).
        encoded: `attention` averaged over visual tokens.
        looks: How much each image resembles text.
    """

    grids: list[tuple[int, int, int]] | None = None
    num_encoded: int | None = None
    frames: list[int] | None = None
    owners: Tensor | list[Tensor] | None = None
    block_tokens: list[int] | None = None
    groups: list[Tensor] | None = None
    kept: list[Tensor] | None = None
    attention: dict[tuple[str, int], list[Tensor]] | None = None
    encoded: TowerValues | None = None
    looks: AsyncValues | None = None

    def to(self, device: Any, non_blocking: bool = False) -> EncoderRecord:
        """Return the record with `owners` and `groups` on `device`. accelerate calls it when it moves an output."""

        def move(tensors: Any) -> Any:
            if isinstance(tensors, Tensor):
                return tensors.to(device, non_blocking=non_blocking)
            return None if tensors is None else [move(tensor) for tensor in tensors]

        return replace(self, owners=move(self.owners), groups=move(self.groups))

    def take_attention(self) -> dict[tuple[str, int], list[Tensor]] | None:
        """Return `attention` and clear the field, which is large."""
        attention, self.attention = self.attention, None
        return attention


def get_record(output: Any) -> EncoderRecord:
    """Return the record of an encoder's output for reading. Return a new record if the output has none."""
    record = getattr(output, KEY, None)
    return EncoderRecord() if record is None else record


def open_record(output: Any) -> EncoderRecord:
    """Return the record of an encoder's output for writing, and create it if needed.

    Raises:
        UnsupportedSetupError: If the output is a tuple, which cannot store a record.
    """
    if isinstance(output, tuple):
        raise UnsupportedSetupError(
            "The encoder of a patched model must return an output object. Leave return_dict out."
        )
    record = getattr(output, KEY, None)
    if record is None:
        record = output[KEY] = EncoderRecord()
    return record


def start_record(output: Any, grids: list[tuple[int, int, int]] | None, frames: Sequence[int] | None) -> EncoderRecord:
    """Store the grids, frames and number of images on an encoder's output. See `EncoderRecord`."""
    record = open_record(output)
    record.grids, record.frames = grids, None if frames is None else list(frames)
    features = list_features(output)
    record.num_encoded = None if features is None else len(features)
    return record


def list_features(output: Any) -> list[Tensor] | None:
    """Return the features of each image as a list, or None if the encoder's output does not separate images."""
    features = getattr(output, "pooler_output", None)
    if features is None and (levels := getattr(output, "deepstack_features", None)):
        # Granite 4 Vision returns only pairs of a decoder layer and the features for it.
        features = levels[0][1] if isinstance(levels[0], tuple) else None
    return list(features) if isinstance(features, (list, tuple)) else None


def align_per_image(values: Sequence[T], rows: Sequence[int]) -> list[T | None]:
    """Return per-image values for each piece of a prompt, or a list of None if images and pieces do not match.

    Args:
        values: Values of each encoded image of a modality.
        rows: Row of each piece of this modality, in order.
    """
    copies, rest = divmod(len(rows), max(1, len(values)))
    if copies and not rest:
        remaining = iter(values)
        firsts = {row: list(islice(remaining, rows.count(row))) for row in dict.fromkeys(rows) if row % copies == 0}
        aligned: list[T | None] = [value for row in dict.fromkeys(rows) for value in firsts.get(row - row % copies, [])]
        if len(aligned) == len(rows):
            return aligned
    return [None] * len(rows)
