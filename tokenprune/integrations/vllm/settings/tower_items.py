# SPDX-License-Identifier: Apache-2.0
"""Checks of items for methods that trace visual tokens to patches of the tower, or merge them there.

It also packs the tiles of an image for models that crop tiles after the tower.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tokenprune.errors import OptionError
from tokenprune.integrations.shared.checks import AFTER_THE_TOWER
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures, build_feature_ids, build_newline_id
from tokenprune.integrations.shared.towers.tile_goals import Goal, build_tile_matcher, compute_tile_goals
from tokenprune.integrations.vllm.settings.items import count_kept, get_method
from tokenprune.integrations.vllm.settings.towers import merges_in_tower, served_tower
from tokenprune.models.families import SERVED, get_config_family
from tokenprune.selection.method import Method
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.settings import Setting

_HOST = torch.device("cpu")


def check_items(method: Method, settings: Mapping[str, Sequence[Setting]], items: Any, info: Any) -> None:
    """Raise OptionError if an item's tokens cannot be traced to patches, or if too few tokens would be kept.

    `items` and `info` are vLLM's `MultiModalDataItems` and `ProcessingInfo`.
    """
    from vllm.multimodal.parse import EmbeddingItems, ImageProcessorItems

    served, merges = get_config_family(info.get_hf_config()), merges_in_tower(method)
    for modality, modality_items in items.items():
        if modality == "image" and compares_frames(method):
            continue  # the method does not act on images
        if isinstance(modality_items, EmbeddingItems) or not len(modality_items):
            _check(not len(modality_items), f"{method.name} reads the vision tower: pass pixels, not embeddings")
            continue
        video = modality == "video"
        _check(
            not video or served.patches == "runs" or (served.patches == "packed" and not merges),
            f"{method.name}: the video features of {served.name!r} cannot be traced to patches of the vision tower. "
            f"{AFTER_THE_TOWER}",
        )
        if served.patches != "packed":
            continue
        for index in range(len(modality_items)):
            if modality_items.get(index) is None:
                continue  # sent by its id only: it is in the cache under the same setting
            if video:
                size = modality_items.get_frame_size(index)
                frames = modality_items.get_num_frames(index)
                tokens = info.get_num_video_tokens(image_width=size.width, image_height=size.height, num_frames=frames)
                newlines = SERVED[info.ctx.model_config.architecture].after_video
            elif isinstance(modality_items, ImageProcessorItems):
                size = modality_items.get_image_size(index)
                tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
                newlines = _count_newlines(info, size.height, size.width, method)
            setting = settings[modality][index]
            keep = count_kept(setting, tokens)
            _check(
                keep == tokens or keep > newlines,
                f"keep={setting.joint_keep} keeps {keep} of this {modality}'s {tokens} tokens, of which {newlines} are "
                f"newlines; {method.name} needs at least one more",
            )


def _count_newlines(info: Any, height: int, width: int, method: Method) -> int:
    """Return the number of newline features of an image; raise OptionError if the features are interpolated."""
    from vllm.model_executor.models.llava_next import LlavaNextProcessingInfo, get_anyres_image_grid_shape

    encoder = info.get_vision_encoder_info()
    down, across = get_anyres_image_grid_shape(
        image_size=(height, width),
        grid_pinpoints=info.get_hf_config().image_grid_pinpoints,
        patch_size=encoder.get_image_size(),
    )
    sizes = dict(
        original_height=height,
        original_width=width,
        npatches=encoder.get_patch_grid_length(),
        num_patch_height=down,
        num_patch_width=across,
    )
    features = info._get_num_unpadded_features(**sizes)
    _check(
        features == LlavaNextProcessingInfo._get_num_unpadded_features(info, **sizes),
        f"{method.name}: this image has so many tiles that the model interpolates its features. Send a smaller image, "
        "or use a method that acts after the tower, such as divprune.",
    )
    return features[1]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


# -- tiles that the model separates by newlines. The front end and the model both compute the goal of each tile


def crops(config: Any) -> bool:
    """Return True if the model crops tiles after the tower."""
    return get_config_family(config).patches == "packed"


def pack(cls: Any, config: Any, size: Any, tiles: int, tokens: int, device: torch.device = _HOST) -> PackedFeatures:
    """Return the order of an image's features after a model has packed them, as feature indices.

    `size` is the image's (height, width), `tiles` includes padding, and a tile has `tokens` features.
    """
    numbers, newline = build_feature_ids(tiles, tokens, device), build_newline_id(device)
    stand_in = SimpleNamespace(config=config, image_newline=newline)
    merge = cls._merge_image_patch_embeddings
    more = {"image_newline": newline} if "image_newline" in merge.__code__.co_varnames else {}
    return PackedFeatures([merge(stand_in, size, numbers, strategy="spatial_unpad", **more)], tokens)


def goals_of_image(packed: PackedFeatures, tiles: int, num_kept: int, setting: Setting, config: Any) -> list[Goal]:
    """Return the goal of each tile for `num_kept` tokens; raise BudgetError if newlines leave a tile no token."""
    method = get_method(setting)
    assert isinstance(method, EncoderMethod)
    request = f"{method.name}: keep={json.dumps(setting.budget.keep)}"
    return compute_tile_goals(
        packed, packed.images[0], tiles, num_kept, served_tower(method, config).blocks_read, request
    )


def check_tiles(setting: Setting, info: Any, item: Any, num_kept: int) -> None:
    """Raise BudgetError if merging in the tower cannot leave `num_kept` tokens of an image. item: its fields."""
    model_config, method = info.ctx.model_config, get_method(setting)
    assert isinstance(method, EncoderMethod)
    config, tower = model_config.hf_config, served_tower(method, model_config.hf_config)
    # vLLM defines the model in the module of its processor.
    cls = getattr(sys.modules[type(info).__module__], model_config.architecture)
    tiles = len(item["pixel_values"].data)
    packed = pack(cls, config, item["image_sizes"].data, tiles, tower.patches)
    goals = goals_of_image(packed, tiles, num_kept, setting, config)
    build_tile_matcher(goals, tower, partial(method.plan, setting.budget))
