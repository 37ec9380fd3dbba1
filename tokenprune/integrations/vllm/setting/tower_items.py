# SPDX-License-Identifier: Apache-2.0
"""Images and videos of a prompt for a method that traces visual tokens to patches of the tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenprune.abilities import AFTER_THE_TOWER
from tokenprune.base import Method
from tokenprune.errors import OptionError
from tokenprune.families import SERVED, family_of_config
from tokenprune.integrations.vllm.setting.towers import merges_in_tower
from tokenprune.view.registry import compares_frames


def check_items(method: Method, setting_of: Callable[[str, int], Any], items: Any, info: Any) -> None:
    """Raise OptionError if an item's tokens cannot be traced to patches, or if fewer would be kept than a method that
    traces them needs.

    setting_of: the `ServedSetting` of an item, by modality and index. items: vLLM's `MultiModalDataItems`. info: its
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
            f"{method.name}: the video features of {served.name!r} do not tell which patches of the "
            f"vision tower they were made of; {AFTER_THE_TOWER}",
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
            setting = setting_of(modality, index)
            keep = setting.count(tokens)
            _check(
                keep == tokens or keep > newlines,
                f"keep={setting.whole_keep} leaves {keep} tokens of this {modality} of {tokens}, of which {newlines} "
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
        f"{method.name}: this image has so many tiles that the model interpolates its features, so that none of them "
        f"is a patch of the tower; send a smaller image, or {AFTER_THE_TOWER}",
    )
    return found[1]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)
