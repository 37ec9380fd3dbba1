# SPDX-License-Identifier: Apache-2.0
"""Token budgets of tiles, for models that crop tiles and add newlines after the tower (LLaVA-NeXT, LLaVA-OneVision)."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encoding
from tokenprune.integrations.hf.towers.base import ThreadKey
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures, build_feature_ids, build_newline_id
from tokenprune.integrations.shared.towers.tile_goals import Goal, compute_tile_goals
from tokenprune.selection.sites.encoder import EncoderMethod, Tower


class TileGoals:
    """Computes the number of patches that each tile keeps, so that each image meets its budget.

    Attributes:
        exact: False if the method chooses the number of kept tokens, so that tiles have no goals.
    """

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget, shape: Tower) -> None:
        self.adapter, self.method, self.budget, self.shape = adapter, method, budget, shape
        self.exact = method.inexact is None
        self.key = ThreadKey()

    def prepare(self, encoding: Encoding) -> None:
        """Compute the goals of an encoder call and store them for this thread.

        Raises:
            BudgetError: If a tile would keep only newlines.
        """
        get_thread_states().pop(self.key, None)
        if encoding.modality != "image" or not self.exact or encoding.on_host.get("image_sizes") is None:
            return
        counts, packed = pack_feature_indices(self.adapter, encoding.on_host, self.shape.patches)
        get_thread_states()[self.key] = [
            goal
            for count, image in zip(counts, packed.images, strict=True)
            for goal in self._compute_goals(packed, image, count)
        ]

    def take(self, rows: int) -> list[Goal] | None:
        """Pop the stored goals of `rows` tiles. Return None if none are stored."""
        goals = get_thread_states().pop(self.key, None)
        return None if goals is None or len(goals) != rows else goals

    def _compute_goals(self, packed: PackedFeatures, image: Tensor, tiles: int) -> list[Goal]:
        num_kept, description = (
            self.budget.resolve_keep(len(image)),
            f"{self.method.name}: {self.budget.format_short()}",
        )
        return compute_tile_goals(packed, image, tiles, num_kept, self.shape.blocks_read, description)


def pack_feature_indices(adapter: Adapter, arguments: dict[str, Any], tokens: int) -> tuple[list[int], PackedFeatures]:
    """Run the model's `pack_image_features` on feature indices instead of features.

    Args:
        adapter: Adapter of the model.
        arguments: Arguments of `get_image_features`.
        tokens: Number of features per tile.

    Returns:
        The number of tiles per image, and the packed indices.
    """
    base, sizes = adapter.base, torch.as_tensor(arguments["image_sizes"], device="cpu")
    indices, start, counts = [], 0, count_tiles(adapter, arguments, sizes)
    for tiles in counts:
        indices.append(build_feature_ids(tiles, tokens, torch.device("cpu"), start))
        start += tiles * tokens
    kwargs = {"image_features": indices, "image_sizes": sizes, "image_newline": None}
    if base.image_newline is not None:
        kwargs["image_newline"] = build_newline_id(indices[0].device)
    for name in ("vision_feature_select_strategy", "vision_aspect_ratio"):
        if hasattr(adapter.config, name):
            value = arguments.get(name)
            kwargs[name] = getattr(adapter.config, name) if value is None else value
    pack = type(base).pack_image_features
    parameters = inspect.signature(pack).parameters
    kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    return counts, PackedFeatures(list(pack(base, **kwargs)[0]), tokens)


def count_tiles(adapter: Adapter, arguments: dict[str, Any], sizes: Tensor) -> list[int]:
    """Return the number of tiles of each image. `sizes`: long `[images, 2]` on the host."""
    config = adapter.config
    images_per_row = arguments.get("batch_num_images")
    # LLaVA-OneVision cuts an image into tiles only if it is the single image of its prompt.
    if images_per_row is None:
        images_per_row = [1] * len(sizes)
    else:
        images_per_row = torch.as_tensor(images_per_row, device="cpu").tolist()
    is_tiled = [count == 1 for count in images_per_row for _ in range(count)]
    # Search the base classes, because wrappers such as FSDP derive a class in another module.
    modules = (sys.modules.get(cls.__module__) for cls in type(adapter.base).__mro__)
    count_patches = next(filter(None, (getattr(module, "image_size_to_num_patches", None) for module in modules)))
    side = config.vision_config.image_size
    return [
        count_patches(size, config.image_grid_pinpoints, side) if tiled else 1
        for size, tiled in zip(sizes.tolist(), is_tiled, strict=True)
    ]
