# SPDX-License-Identifier: Apache-2.0
"""Images and videos of a prompt for methods that trace visual tokens to patches of the tower, or merge them there: what
is checked in the front end; and how a model packs the tiles of an image that it crops after the tower."""

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
from tokenprune.integrations.shared.towers.packed_features import PackedFeatures, newline_number, numbered
from tokenprune.integrations.shared.towers.tile_goals import Goal, goals_of, parts_of_tiles
from tokenprune.integrations.vllm.settings.items import count_kept, get_method
from tokenprune.integrations.vllm.settings.towers import merges_in_tower, served_tower
from tokenprune.models.families import SERVED, family_of_config
from tokenprune.selection.method import Method
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.settings import Setting

_HOST = torch.device("cpu")


def check_items(method: Method, settings: Mapping[str, Sequence[Setting]], items: Any, info: Any) -> None:
    """Raise OptionError if an item's tokens cannot be traced to patches, or if fewer would be kept than a method that
    traces them needs.

    settings: of each item, by modality. items: vLLM's `MultiModalDataItems`. info: its
    `ProcessingInfo`.
    """
    from vllm.multimodal.parse import EmbeddingItems, ImageProcessorItems

    served, merges = family_of_config(info.get_hf_config()), merges_in_tower(method)
    for modality, of_modality in items.items():
        if modality == "image" and compares_frames(method):
            continue  # it leaves them as they are
        if isinstance(of_modality, EmbeddingItems) or not len(of_modality):
            _check(not len(of_modality), f"{method.name} reads the vision tower: pass pixels, not embeddings")
            continue
        video = modality == "video"
        _check(
            not video or served.patches == "runs" or (served.patches == "packed" and not merges),
            f"{method.name}: the video features of {served.name!r} cannot be traced to patches of the vision tower. "
            f"{AFTER_THE_TOWER}",
        )
        if served.patches != "packed":
            continue
        for index in range(len(of_modality)):
            if of_modality.get(index) is None:
                continue  # named by its id alone: it is in the cache under the same setting
            if video:
                size = of_modality.get_frame_size(index)
                frames = of_modality.get_num_frames(index)
                tokens = info.get_num_video_tokens(image_width=size.width, image_height=size.height, num_frames=frames)
                newlines = SERVED[info.ctx.model_config.architecture].after_video
            elif isinstance(of_modality, ImageProcessorItems):
                size = of_modality.get_image_size(index)
                tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
                newlines = _newlines(info, size.height, size.width, method)
            setting = settings[modality][index]
            keep = count_kept(setting, tokens)
            _check(
                keep == tokens or keep > newlines,
                f"keep={setting.joint_keep} leaves {keep} tokens of this {modality} of {tokens}, of which {newlines} "
                f"are newlines; {method.name} needs one more at least",
            )


def _newlines(info: Any, height: int, width: int, method: Method) -> int:
    """Return how many newlines stand in the features of an image; OptionError if these are interpolated."""
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
    found = info._get_num_unpadded_features(**sizes)
    _check(
        found == LlavaNextProcessingInfo._get_num_unpadded_features(info, **sizes),
        f"{method.name}: this image has so many tiles that the model interpolates its features. Send a smaller image, "
        "or use a method that acts after the tower, such as divprune.",
    )
    return found[1]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


# -- tiles that the model sets apart by newlines: both the front end and the model ask what each is to be left with


def crops(config: Any) -> bool:
    """Return True for a model that crops its tiles after the tower."""
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


def goals_of_image(packed: PackedFeatures, tiles: int, left: int, setting: Setting, config: Any) -> list[Goal]:
    """Return the goal of each tile of an image of which `left` tokens are to be left. Raises BudgetError where the
    newlines leave a tile nothing."""
    method = get_method(setting)
    assert isinstance(method, EncoderMethod)
    asked = f"{method.name}: keep={json.dumps(setting.budget.keep)}"
    return goals_of(packed, packed.images[0], tiles, left, served_tower(method, config).read, asked)


def check_tiles(setting: Setting, info: Any, item: Any, left: int) -> None:
    """Raise BudgetError if merging in the tower cannot leave `left` tokens of an image. item: its fields."""
    model_config, method = info.ctx.model_config, get_method(setting)
    assert isinstance(method, EncoderMethod)
    config, tower = model_config.hf_config, served_tower(method, model_config.hf_config)
    # The model stands beside its processor.
    cls = getattr(sys.modules[type(info).__module__], model_config.architecture)
    tiles = len(item["pixel_values"].data)
    packed = pack(cls, config, item["image_sizes"].data, tiles, tower.patches)
    goals = goals_of_image(packed, tiles, left, setting, config)
    parts_of_tiles(goals, tower, partial(method.plan, setting.budget))
