# SPDX-License-Identifier: Apache-2.0
"""Front end: let a method decide by the pixels of an image or video which units of patches enter the vision tower. So
their number is known when the prompt is written. The tower drops the others; see worker/packed.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.processing import BaseProcessingInfo

from tokenprune.budget import Budget
from tokenprune.errors import OptionError, PlaceholderMismatchError
from tokenprune.integrations.vllm.setting.settings import ServedSetting
from tokenprune.sites.units import UnitDropper

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def kept_units(
    setting: ServedSetting, item: Any, modality: str, info: BaseProcessingInfo, kwargs: Mapping[str, object], count: int
) -> tuple[bool, ...]:
    """Return which of the `count` units of an item stay, in the order of its visual tokens.

    item: what the model's processor made of it. kwargs: the request's `mm_processor_kwargs`, without ours.
    Raises OptionError for an item that brings embeddings.
    """
    method, found = setting.acting, item.get(_PIXELS[modality])
    assert isinstance(method, UnitDropper)
    if found is None or found.data is None:
        raise OptionError(
            f"{method.name} looks at pixels, and this request brings embeddings: pass images, or switch it off for the "
            'request, {"tokenprune": {"off": true}}'
        )
    side = info.get_hf_config().vision_config.spatial_merge_size
    frames, height, width = item[f"{modality}_grid_thw"].data.tolist()
    grid = (frames, height // side, width // side)
    colours = _colours(found.data, modality, info, kwargs)
    with torch.no_grad():
        kept = method.keep_units(colours.reshape(*grid, -1), _most(setting, count)).flatten()
    if len(kept) != count:
        raise PlaceholderMismatchError(f"{method.name} saw {len(kept)} units of an item that has {count} tokens")
    return tuple(kept.tolist())


def _most(setting: ServedSetting, count: int) -> int:
    return max(1, Budget.of_checked(setting.keep).resolve_keep(count))


def _colours(pixels: Tensor, modality: str, info: BaseProcessingInfo, kwargs: Mapping[str, object]) -> Tensor:
    """Return float32 `[patches, P]`, colours from 0 to 1: vLLM normalises them on the device, where the model can, and
    in the model's processor elsewhere."""
    processor = info.get_hf_processor(**kwargs)
    of = getattr(processor, f"{modality}_processor", None) or processor.image_processor
    if info.ctx.get_mm_config().mm_device_do_normalize:
        return pixels.float() * getattr(of, "rescale_factor", 1 / 255)
    if not of.do_normalize:
        return pixels.float()
    mean, std = torch.tensor([of.image_mean, of.image_std], dtype=torch.float32, device="cpu")
    channels = pixels.float().view(len(pixels), len(std), -1)
    return torch.addcmul(mean[:, None], channels, std[:, None]).flatten(1)
