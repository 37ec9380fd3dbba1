# SPDX-License-Identifier: Apache-2.0
"""Worker: split the arguments of `embed_multimodal` by item, and group equal items."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.worker.tower_treatments import TowerResult

# Fields of an item that the models read to compute positions.
_SHAPES = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
# Arguments with the number of tiles of each image.
_TILES = ("num_patches", "image_num_patches")


def slice_argument(value: Any, kwargs: Mapping[str, Any], modality: str, start: int, end: int) -> Any:
    """Return the part of an argument of `embed_multimodal` for the items `start` to `end` (exclusive)."""
    if isinstance(value, Tensor) and not value.ndim:
        return value  # shared by all items
    sizes = next((kwargs[name] for name in (f"{modality}_grid_thw", *_TILES) if kwargs.get(name) is not None), None)
    if sizes is not None and len(value) != len(sizes):  # rows for the patches or tiles of all items, concatenated
        counts = (math.prod(torch.as_tensor(size, device="cpu").flatten().tolist()) for size in sizes)
        ends = [0, *itertools.accumulate(counts)]
        return value[ends[start] : ends[end]]
    return value[start:end]


def get_item_shapes(kwargs: Mapping[str, Any], index: int) -> MultiModalKwargsItem:
    """Return the shapes of one item of a batch."""
    field = MultiModalBatchedField()
    present = [key for key in _SHAPES if kwargs.get(key) is not None]
    return MultiModalKwargsItem({key: MultiModalFieldElem(data=kwargs[key][index], field=field) for key in present})


def get_group_key(
    entry: tuple[int, Plan, Tensor, Mapping[str, Any], TowerResult, Any],
) -> tuple[int, str, int | None]:
    """Return a key that is equal for items that a method processes together.

    Args:
        entry: Index, plan, features, shapes, result of the tower, and request of an item.
    """
    index, plan, _, item, result, _ = entry
    is_plain = result.kept is None and result.encoded is None
    return id(plan), repr([element.data.tolist() for element in item.values()]), None if is_plain else index
