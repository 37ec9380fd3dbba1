# SPDX-License-Identifier: Apache-2.0
"""Merging inside the towers of LLaVA-NeXT and LLaVA-OneVision, which crop tiles after them: each tile has its goal, as
on the Hugging Face side (see `integrations.shared.tile_goals`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.shared.apart import Apart
from tokenprune.integrations.shared.block_merging import Merging
from tokenprune.integrations.shared.packed_features import PackedFeatures
from tokenprune.integrations.shared.tile_goals import Goal, apart_of
from tokenprune.integrations.vllm.setting.plan import Plan
from tokenprune.integrations.vllm.setting.tower_items import goals_of_image, pack
from tokenprune.integrations.vllm.worker.tower_merging import TowerMerger
from tokenprune.sites.encoder import EncoderMethod, Matcher


class TileTowerMerger(TowerMerger):
    """Merges so that each image, of however many tiles, is left with what its plan says.

    plans: of the images, with one setting. kwargs: arguments of `embed_multimodal`.
    """

    def __init__(self, model: Any, method: EncoderMethod, plans: Sequence[Plan], kwargs: Mapping[str, Any]) -> None:
        super().__init__(model, method, plans[0].setting.keep)
        self.goals: list[Goal] = []
        self.packed: list[tuple[int, PackedFeatures]] = []  # of each image, with its number of tiles
        for plan, tiles, size in zip(plans, kwargs["pixel_values"], kwargs["image_sizes"], strict=True):
            count, shape = len(tiles), torch.as_tensor(size, device="cpu")
            packed = pack(type(model), model.config, shape, count, self.shape.patches)
            self.packed.append((count, packed))
            self.goals += goals_of_image(packed, count, sum(plan.keep), plan.setting, model.config)
        self._apart: Apart | None = None

    def plan_of(self, rows: int, count: int) -> list[Matcher | None]:
        if rows != len(self.goals):
            raise PlaceholderMismatchError(f"the tower got {rows} tiles of images that have {len(self.goals)}")
        self._apart = apart_of(self.goals, self.shape, partial(self.method.plan, self.budget))
        return self._apart.plan(len(self.blocks))

    def _note_left(self, state: Merging, first: Tensor) -> None:
        assert self._apart is not None  # `plan_of` made it
        self.left = sum(count for (_, cropped), count in self._apart.left.items() if not cropped)
        kept, sizes = [], [count for count, _ in self.packed]
        for tiles, (_, packed) in zip(first.split(sizes), self.packed, strict=True):
            (image,) = packed.images
            found = packed.follow(tiles, image)
            kept.append(found == torch.arange(len(found), device=found.device))
            self.left += len(image) - int((packed.numbers(image) >= 0).sum())  # newlines stay
        self.kept = torch.cat(kept)
