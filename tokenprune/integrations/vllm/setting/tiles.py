# SPDX-License-Identifier: Apache-2.0
"""Tiles of an image that the model crops behind its tower, and sets apart by newlines: how it packs them, and what each
is to be left with where they merge in the tower. Both sides ask here: the front end whether it can be reached, the
model what to do."""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tokenprune.budget import Budget
from tokenprune.families import family_of_config
from tokenprune.integrations.shared.packed_features import PackedFeatures, newline_number, numbered
from tokenprune.integrations.shared.tile_goals import Goal, apart_of, goals_of
from tokenprune.integrations.vllm.setting.settings import ServedSetting
from tokenprune.integrations.vllm.setting.towers import served_tower
from tokenprune.sites.encoder import EncoderMethod

_HOST = torch.device("cpu")


def crops(config: Any) -> bool:
    """Return True for a model that crops its tiles behind the tower."""
    return family_of_config(config).patches == "packed"


def pack(cls: Any, config: Any, size: Any, tiles: int, tokens: int, device: torch.device = _HOST) -> PackedFeatures:
    """Return how a model packs the features of an image: it puts together numbers of features in place of features.

    cls: vLLM's class of the model. size: the image's (height, width), a tensor. tiles: how many it came with, padding
    included. tokens: features of a tile.
    """
    numbers, newline = numbered(tiles, tokens, device), newline_number(device)
    stand_in = SimpleNamespace(config=config, image_newline=newline)
    merge = cls._merge_image_patch_embeddings
    more = {"image_newline": newline} if "image_newline" in merge.__code__.co_varnames else {}
    return PackedFeatures([merge(stand_in, size, numbers, strategy="spatial_unpad", **more)], tokens)


def goals_of_image(packed: PackedFeatures, tiles: int, left: int, setting: ServedSetting, config: Any) -> list[Goal]:
    """Return the goal of each tile of an image of which `left` tokens are to be left. Raises BudgetError where the
    newlines leave a tile nothing."""
    method = setting.acting
    assert isinstance(method, EncoderMethod)
    asked = f"{method.name}: keep={json.dumps(setting.keep)}"
    return goals_of(packed, packed.images[0], tiles, left, served_tower(method, config).read, asked)


def check_tiles(setting: ServedSetting, info: Any, item: Any, left: int) -> None:
    """Raise BudgetError if merging in the tower cannot leave `left` tokens of an image. item: its fields."""
    model_config, method = info.ctx.model_config, setting.acting
    assert isinstance(method, EncoderMethod)
    config, tower = model_config.hf_config, served_tower(method, model_config.hf_config)
    # The model stands beside its processor.
    cls = getattr(sys.modules[type(info).__module__], model_config.architecture)
    tiles = len(item["pixel_values"].data)
    packed = pack(cls, config, item["image_sizes"].data, tiles, tower.patches)
    goals = goals_of_image(packed, tiles, left, setting, config)
    apart_of(goals, tower, partial(method.plan, Budget.of_checked(setting.keep)))
