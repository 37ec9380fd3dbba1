# SPDX-License-Identifier: Apache-2.0
"""Record of a patch about encoded images or videos, on the encoder's output itself.

`generate` encodes images before any forward, so what is found out meanwhile travels with the output to the forward that
takes it. It is an item of the output: accelerate, which moves outputs between devices, loses attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tokenprune.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from tokenprune.integrations.shared.towers.tower_scores import TowerValues
    from tokenprune.kernels.transfer import AsyncValues

KEY = "tokenprune_record"


@dataclass
class EncoderRecord:
    """Everything that a patch leaves on the output of one `get_image_features` or `get_video_features`.

    Each field has one writer, and is None where that does not stand in the patch or could not tell. `owners`, `kept`
    and `attention` are set as the vision tower ends, the others after it; counts and grids on the host.

    grids: (frames, height, width) in tokens of each image or video. The engine writes it; segments.py reads it.
    num_encoded: number of images or videos that were encoded. `generate` may repeat their features later.
    frames: how many frames of each video reach the decoder. The engine, or an adapter that merges images itself, writes
        it by `start_record`; segments.py (a budget for each frame) and attention/blockwise.py read it.
    owners: the merged token that each token which entered the tower is part of: long `[T, N]` for T tiles of N tokens,
        or one long `[N]` for each image where these are packed.
    block_tokens: how many tokens entered each block of the tower, all images together.
    groups: for each image, for each of its features, the first that is the same merged token, long `[features]`.
    kept: for each image which of its features are of patches that entered the tower, bool `[features]` on the host; the
        others are zeros.
    attention: for each observable and block that was read, pieces of float32 `[rows, patches, C]`.
    encoded: the same brought to the visual tokens. looks: how much each image looks like text.
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
        """Return the record with what indexes features (owners, groups) on `device`, as accelerate asks for where it
        moves an output. Scores and looks stay: they are moved, if at all, where they are read."""

        def moved(tensors: Any) -> Any:
            if isinstance(tensors, Tensor):
                return tensors.to(device, non_blocking=non_blocking)
            return None if tensors is None else [moved(one) for one in tensors]

        return replace(self, owners=moved(self.owners), groups=moved(self.groups))

    def take_attention(self) -> dict[tuple[str, int], list[Tensor]] | None:
        """Return `attention`, and let go of it: it is large."""
        attention, self.attention = self.attention, None
        return attention


def record_of(output: Any) -> EncoderRecord:
    """Return the record that an encoder's output carries; an empty one, of which the output learns nothing, where there
    is none: it was encoded without a patch. To write to one, see `open_record`."""
    record = getattr(output, KEY, None)
    return EncoderRecord() if record is None else record


def open_record(output: Any) -> EncoderRecord:
    """Return the record that an encoder's output carries, to be written to; it gets one if it has none.

    Raises UnsupportedSetupError for a tuple, which carries nothing.
    """
    if isinstance(output, tuple):
        raise UnsupportedSetupError("the encoder must return an output object under a patch: leave out return_dict")
    record = getattr(output, KEY, None)
    if record is None:
        record = output[KEY] = EncoderRecord()
    return record


def start_record(output: Any, grids: list[tuple[int, int, int]] | None, frames: Sequence[int] | None) -> EncoderRecord:
    """Write what was encoded, whatever else is in the patch; see `EncoderRecord` for the fields."""
    record = open_record(output)
    record.grids, record.frames = grids, None if frames is None else list(frames)
    features = features_per_image(output)
    record.num_encoded = None if features is None else len(features)
    return record


def features_per_image(output: Any) -> list[Tensor] | None:
    """Return the features of each image as a list, or None if the encoder's output does not separate images."""
    features = getattr(output, "pooler_output", None)
    if features is None and (levels := getattr(output, "deepstack_features", None)):
        # Granite 4 Vision returns only pairs of a decoder layer and the features for it.
        features = levels[0][1] if isinstance(levels[0], tuple) else None
    return list(features) if isinstance(features, (list, tuple)) else None
