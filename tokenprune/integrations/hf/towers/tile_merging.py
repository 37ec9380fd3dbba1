# SPDX-License-Identifier: Apache-2.0
"""Merging inside the towers of models that crop tiles after them, and set rows apart by newlines (LLaVA-NeXT,
LLaVA-OneVision): each tile has its goal, see `integrations.shared.tile_goals`."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.towers.base import ThreadKey
from tokenprune.integrations.hf.towers.merging import EncoderPatch
from tokenprune.integrations.shared.attachable import states
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures, newline_number, numbered
from tokenprune.integrations.shared.towers.parts import Plan
from tokenprune.integrations.shared.towers.tile_goals import Goal, goals_of, parts_of_tiles
from tokenprune.selection.sites.encoder import EncoderMethod


class TilePatch(EncoderPatch):
    """Merges in the tower so that each image, of however many tiles, is left with what the budget says.

    Raises what `EncoderPatch` does, and BudgetError where a budget leaves no patch of a tile beside the newlines.
    """

    shows = False  # newlines stand between its tokens, and tiles overlap

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        self.exact = method.inexact is None  # else how many tokens are left is the method's own affair
        super().__init__(adapter, method, budget)
        self.key = ThreadKey()  # of the goals of images

    @property
    def uneven(self) -> bool:
        return self.exact or super().uneven

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        states().pop(self.key, None)
        if encoding.modality == "image" and self.exact and encoding.on_host.get("image_sizes") is not None:
            tiles, packed = pack_numbers(self.adapter, encoding.on_host, self.shape.patches)
            states()[self.key] = [
                goal
                for count, image in zip(tiles, packed.images, strict=True)
                for goal in self._goals(packed, image, count)
            ]
        return super().around_encode(encode, encoding)

    def _goals(self, packed: PackedFeatures, image: Tensor, tiles: int) -> list[Goal]:
        left, asked = self.budget.resolve_keep(len(image)), f"{self.method.name}: {self.budget.short()}"
        return goals_of(packed, image, tiles, left, self.shape.read, asked)

    def plan_of(self, rows: int, count: int) -> Plan:
        goals = states().pop(self.key, None)
        if goals is None or len(goals) != rows or count != self.shape.tokens:
            return super().plan_of(rows, count)
        return parts_of_tiles(goals, self.shape, partial(self.method.plan, self.budget)).plan(len(self.blocks))


def pack_numbers(adapter: Adapter, arguments: dict[str, Any], tokens: int) -> tuple[list[int], PackedFeatures]:
    """Return how many tiles each image has that `get_image_features` is called with, and how the model will pack their
    features. tokens: features of a tile."""
    base, sizes = adapter.base, torch.as_tensor(arguments["image_sizes"], device="cpu")
    numbers, start, counts = [], 0, tiles_of(adapter, arguments, sizes)
    for tiles in counts:
        numbers.append(numbered(tiles, tokens, torch.device("cpu"), start))
        start += tiles * tokens
    given = {"image_features": numbers, "image_sizes": sizes, "image_newline": None}
    if base.image_newline is not None:
        given["image_newline"] = newline_number(numbers[0].device)
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
