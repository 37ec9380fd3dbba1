# SPDX-License-Identifier: Apache-2.0
"""Goals of tiles, for models that crop tiles after the tower and add newline tokens (LLaVA-NeXT, LLaVA-OneVision)."""

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
    """Computes how many patches each tile keeps, so that each image keeps the tokens of its budget.

    Attributes:
        exact: False if the method decides the number of kept tokens; there are no goals then.
    """

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget, shape: Tower) -> None:
        self.adapter, self.method, self.budget, self.shape = adapter, method, budget, shape
        self.exact = method.inexact is None
        self.key = ThreadKey()

    def note(self, encoding: Encoding) -> None:
        """Compute the goals of an encoder call and keep them for this thread.

        Raises:
            BudgetError: If a tile would keep no patch beside the newlines.
        """
        get_thread_states().pop(self.key, None)
        if encoding.modality != "image" or not self.exact or encoding.on_host.get("image_sizes") is None:
            return
        counts, packed = pack_numbers(self.adapter, encoding.on_host, self.shape.patches)
        get_thread_states()[self.key] = [
            goal
            for count, image in zip(counts, packed.images, strict=True)
            for goal in self._goals(packed, image, count)
        ]

    def take(self, rows: int) -> list[Goal] | None:
        """Return the goals of `rows` tiles and forget them; None if there are none."""
        goals = get_thread_states().pop(self.key, None)
        return None if goals is None or len(goals) != rows else goals

    def _goals(self, packed: PackedFeatures, image: Tensor, tiles: int) -> list[Goal]:
        left, asked = self.budget.resolve_keep(len(image)), f"{self.method.name}: {self.budget.format_short()}"
        return compute_tile_goals(packed, image, tiles, left, self.shape.blocks_read, asked)


def pack_numbers(adapter: Adapter, arguments: dict[str, Any], tokens: int) -> tuple[list[int], PackedFeatures]:
    """Return how many tiles each image has that `get_image_features` is called with, and how the model will pack their
    features. tokens: features of a tile."""
    base, sizes = adapter.base, torch.as_tensor(arguments["image_sizes"], device="cpu")
    numbers, start, counts = [], 0, tiles_of(adapter, arguments, sizes)
    for tiles in counts:
        numbers.append(build_feature_ids(tiles, tokens, torch.device("cpu"), start))
        start += tiles * tokens
    given = {"image_features": numbers, "image_sizes": sizes, "image_newline": None}
    if base.image_newline is not None:
        given["image_newline"] = build_newline_id(numbers[0].device)
    for name in ("vision_feature_select_strategy", "vision_aspect_ratio"):
        if hasattr(adapter.config, name):
            asked = arguments.get(name)
            given[name] = getattr(adapter.config, name) if asked is None else asked
    pack = type(base).pack_image_features
    known = inspect.signature(pack).parameters
    given = {name: value for name, value in given.items() if name in known}
    return counts, PackedFeatures(list(pack(base, **given)[0]), tokens)


def tiles_of(adapter: Adapter, arguments: dict[str, Any], sizes: Tensor) -> list[int]:
    """Return how many tiles each image is cut into, of sizes long `[images, 2]` on the host."""
    config = adapter.config
    in_row = arguments.get("batch_num_images")
    # LLaVA-OneVision cuts an image into tiles only where it is the only one of its prompt.
    in_row = [1] * len(sizes) if in_row is None else torch.as_tensor(in_row, device="cpu").tolist()
    alone = [count == 1 for count in in_row for _ in range(count)]
    # The model's own function; FSDP and the like put classes of their own before the model's.
    modules = (sys.modules.get(cls.__module__) for cls in type(adapter.base).__mro__)
    number = next(filter(None, (getattr(module, "image_size_to_num_patches", None) for module in modules)))
    side = config.vision_config.image_size
    return [
        number(size, config.image_grid_pinpoints, side) if cut else 1
        for size, cut in zip(sizes.tolist(), alone, strict=True)
    ]
