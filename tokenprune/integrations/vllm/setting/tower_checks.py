# SPDX-License-Identifier: Apache-2.0
"""What a config tells of a vision tower before anything runs: who may look into it, and at which images."""

from __future__ import annotations

import json
from typing import Any

from tokenprune.base import Method, Pruner
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.shared.patch_grid import PatchSource
from tokenprune.integrations.shared.tower_scores import block_index, read_block, without_tower
from tokenprune.integrations.vllm.families import FAMILIES
from tokenprune.view.observable import Where
from tokenprune.view.registry import compares_frames, observables_of

# By the model type of the vision config: how many class tokens stand before the patches.
CLASS_TOKENS = {
    "clip_vision_model": 1,
    "siglip_vision_model": 0,
    "internvl_vision": 1,
    "idefics3_vision": 0,
    "smolvlm_vision": 0,
    "qwen2_vl_vision": 0,
    "qwen2_5_vl_vision": 0,
    "qwen3_vl_vision": 0,
    "qwen3_vl_moe_vision": 0,
    "qwen3_5_vision": 0,
    "qwen3_5_moe_vision": 0,
    "glm4v_vision": 0,
    "glm4v_moe_vision": 0,
    "pixtral": 0,
}
INSTEAD = "use a method that acts behind the tower, such as divprune"


def reads_tower(method: Method | None) -> bool:
    """Return whether a method reads anything of the vision tower."""
    return method is not None and bool(observables_of(method.needs, Where.TOWER, Where.TOWER_BLOCK))


def check_method(method: Pruner, model_config: Any) -> None:
    """Raise if this model cannot give a method what it reads of the tower: UnsupportedSetupError for all such methods,
    OptionError for blocks that there are not."""
    config = model_config.hf_config
    if not is_known(config):
        raise UnsupportedSetupError(
            f"{method.name} looks into the vision tower, but of {config.model_type!r} with the tower "
            f"{kind_of(config)!r} it is not known how patches become visual tokens; {INSTEAD}{_less(method)}"
        )
    check_whole(method, model_config)
    depth = depth_of(config.vision_config)
    read = read_block(config, depth)
    for layer in method.encoder_layers:
        if block_index(method, layer, depth, config) > read:
            raise OptionError(
                f"{method.name}: the model reads the vision tower's blocks up to number {read}, and vLLM does not run "
                f"block {layer}"
            )


def check_whole(method: Method, model_config: Any) -> None:
    """Raise UnsupportedSetupError if a call's images are not all encoded on each device."""
    if model_config.multimodal_config.mm_encoder_tp_mode == "data":
        raise UnsupportedSetupError(
            f'{method.name} looks into the vision tower, whose images --mm-encoder-tp-mode "data" spreads over '
            f"devices; leave it at its default, or {INSTEAD}{_less(method)}"
        )


def _less(method: Method) -> str:
    options = without_tower(method, json.dumps)
    return f", or {method.name} with {options}" if options else ""


def is_known(config: Any) -> bool:
    """Whether it is known how patches of this model's tower become visual tokens."""
    return PatchSource(None, config).patch_layout is not None and kind_of(config) in CLASS_TOKENS


def kind_of(config: Any) -> str | None:
    # Of the class: checkpoints may say another in their config.
    return getattr(type(getattr(config, "vision_config", None)), "model_type", None)


def check_items(method: Method, setting: Any, items: Any, info: Any) -> None:
    """Raise OptionError for images and videos of a prompt whose tokens cannot be traced to patches, or of which less
    would be kept than a method that traces them has to keep.

    setting: the `Setting` that names the method. items: vLLM's `MultiModalDataItems`. info: its `ProcessingInfo`.
    """
    from vllm.multimodal.parse import EmbeddingItems, ImageProcessorItems

    served = PatchSource(None, info.get_hf_config())
    for modality, of_modality in items.items():
        if modality == "image" and compares_frames(method):
            continue  # it leaves them as they are
        if isinstance(of_modality, EmbeddingItems) or not len(of_modality):
            _check(not len(of_modality), f"{method.name} reads the vision tower: pass pixels, not embeddings")
            continue
        video = modality == "video"
        _check(
            not video or served.patch_layout in ("runs", "packed"),
            f"{method.name}: the video features of {served.config.model_type!r} do not tell which patches of the "
            f"vision tower they were made of; {INSTEAD}",
        )
        if served.patch_layout != "packed":
            continue
        for index in range(len(of_modality)):
            if of_modality.get(index) is None:
                continue  # named by its id alone: it is in the cache under the same setting
            if video:
                size = of_modality.get_frame_size(index)
                frames = of_modality.get_num_frames(index)
                tokens = info.get_num_video_tokens(image_width=size.width, image_height=size.height, num_frames=frames)
                newlines = FAMILIES[info.ctx.model_config.architecture].behind_video
            elif isinstance(of_modality, ImageProcessorItems):
                size = of_modality.get_image_size(index)
                tokens = info.get_num_image_tokens(image_width=size.width, image_height=size.height)
                newlines = _newlines(info, size.height, size.width, method)
            keep = setting.count(tokens)
            _check(
                keep == tokens or keep > newlines,
                f"keep={setting.keep} leaves {keep} tokens of this {modality} of {tokens}, of which {newlines} are "
                f"newlines; {method.name} needs one more at least",
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
        f"is a patch of the tower; send a smaller image, or {INSTEAD}",
    )
    return found[1]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


def depth_of(vision: Any) -> int:
    return getattr(vision, "num_hidden_layers", None) or vision.depth


def heads_of(vision: Any) -> int:
    return getattr(vision, "num_attention_heads", None) or vision.num_heads
