# SPDX-License-Identifier: Apache-2.0
"""Methods that act on pixels, in the front end.

Images are resized before the model's processor sees them, with the same code as for transformers. vLLM then counts,
hashes and positions the smaller images as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import BaseProcessingInfo

from tokenprune.errors import BudgetError, OptionError, PlaceholderMismatchError, TokenPruneError
from tokenprune.integrations.shared.resizing import Resizer
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.models.token_counts import SettingsReader, find_rule
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.selection.sites.units import UnitDropper
from tokenprune.settings import Setting


class SmallerImages(ImageProcessorItems):
    """Images after resizing. full: visual tokens of each image at its original size."""

    def __init__(self, originals: ImageProcessorItems, smaller: list[Any], full: list[int]) -> None:
        super().__init__(smaller)
        self.originals, self.full = originals, full

    def get_item_for_hash(self, index: int) -> Any:
        return self.originals.get_item_for_hash(index)


@dataclass(frozen=True)
class Shrinker:
    """Resizes the images of one request.

    Args:
        setting: Setting with a `pixel_method`.
        info: vLLM's `ProcessingInfo` of the model.
        kwargs: The request's `mm_processor_kwargs` without `KEY`.

    Methods raise OptionError if the model or an image does not support the method.
    """

    setting: Setting
    info: BaseProcessingInfo
    kwargs: Mapping[str, object]

    def shrink(self, items: Any) -> Mapping[str, object]:
        """Replace `items["image"]`, and return arguments for the model's processor that prevent a second resize."""
        self.check_videos(items)
        images = items.get("image")
        if images is None or not len(images) or isinstance(images, SmallerImages):
            return self.kwargs
        kwargs, options, smaller, changed = self._changed(images, images.get_all)
        full = [self._count(images, options, index) for index in range(len(images))]
        items["image"] = SmallerImages(images, smaller, full)
        if changed == options:
            return self.kwargs
        # Set the older argument names too, if they were used: vLLM adds the server's own arguments once more.
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if name in options:
                changed[name] = changed["size"][edge]
        return kwargs | {"images_kwargs": changed}

    def count_tokens(self, images: Any, index: int) -> int:
        """Return the number of visual tokens of an image after resizing."""
        _, _, smaller, changed = self._changed(images, lambda: [images.get(index)])
        return self._count(ImageProcessorItems(smaller), changed, 0)

    def check_videos(self, items: Any) -> None:
        """Raise OptionError if there are videos and the method would resize them."""
        name = self._method.name
        if self._method.videos and items.get("video"):
            raise OptionError(
                f"{name} also resizes videos, which vLLM does not support. Leave videos unchanged with "
                f'{{"method": "{name}", "videos": false}}, or use a method that acts on the features, such as uniform'
            )

    def _changed(self, images: Any, chosen: Callable[[], list[Any]]) -> tuple[Any, dict[str, Any], Any, dict[str, Any]]:
        """Resize the images that `chosen` returns.

        Args:
            images: All images of the request.

        Returns:
            The processor's keyword arguments, their image options, the resized images, and the image options with
            which the processor does not resize them again.
        """
        if not isinstance(images, ImageProcessorItems):
            raise OptionError(
                f"{self._method.name} acts on pixels, and this request contains embeddings. Switch it off for the "
                'request with {"tokenprune": {"off": true}}'
            )
        # The arguments of the processor's call: the server's merged with the request's, by modality.
        kwargs = self.info._merge_and_resolve_mm_processor_kwargs(self.kwargs)
        options = dict(kwargs.get("images_kwargs") or {})
        smaller, changed = self._patch().resize(chosen(), options)
        return kwargs, options, smaller, changed

    def _count(self, images: ImageProcessorItems, options: dict[str, Any], index: int) -> int:
        """Return the number of visual tokens that the model's processor makes of an image."""
        processor, size = self.info.get_hf_processor(**self.kwargs), images.get_image_size(index)
        rule = find_rule(processor)
        assert rule is not None  # `_patch` refuses processors without one
        return rule.count(SettingsReader(processor, options), size.height, size.width, 1)

    def check(self) -> None:
        """Raise OptionError or BudgetError if the model does not support the setting."""
        self._patch()

    @property
    def _method(self) -> ResizeMethod:
        assert self.setting.pixel_method is not None
        return self.setting.pixel_method

    def _patch(self) -> Resizer:
        method, processor = self._method, self.info.get_hf_processor(**self.kwargs)
        rule = find_rule(processor)
        if rule is None or rule.resizing != "input":
            image_processor = type(processor.image_processor).__name__
            raise OptionError(
                f"{method.name} cannot be served with this model: {image_processor} makes the same number of tokens of "
                "small and large images. Use a method that acts after the tower, such as pool or divprune."
            )
        try:
            return Resizer(method, self.setting.pixel_budget, processor)
        except (OptionError, BudgetError):
            raise
        except TokenPruneError as error:
            raise OptionError(str(error)) from error


# -- methods that select units of patches by pixels; worker/tower_packed.py drops the other units

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def select_units(
    setting: Setting, item: Any, modality: str, info: BaseProcessingInfo, kwargs: Mapping[str, object], count: int
) -> tuple[bool, ...]:
    """Return for each of the `count` units of an item whether it is kept, in the order of its visual tokens.

    Raises OptionError if the request contains embeddings instead of pixels.
    """
    method, pixels = get_method(setting), item.get(_PIXELS[modality])
    assert isinstance(method, UnitDropper)
    if pixels is None or pixels.data is None:
        raise OptionError(
            f"{method.name} reads pixels, and this request contains embeddings. Pass images, or switch it off for the "
            'request with {"tokenprune": {"off": true}}'
        )
    side = info.get_hf_config().vision_config.spatial_merge_size
    frames, height, width = item[f"{modality}_grid_thw"].data.tolist()
    grid = (frames, height // side, width // side)
    colours = _colours(pixels.data, modality, info, kwargs)
    with torch.no_grad():
        kept = method.keep_units(colours.reshape(*grid, -1), _count_kept(setting, count)).flatten()
    if len(kept) != count:
        raise PlaceholderMismatchError(f"{method.name} returned {len(kept)} units for an item of {count} tokens")
    return tuple(kept.tolist())


def _count_kept(setting: Setting, count: int) -> int:
    return max(1, setting.budget.resolve_keep(count))


def _colours(pixels: Tensor, modality: str, info: BaseProcessingInfo, kwargs: Mapping[str, object]) -> Tensor:
    """Return the colours of the patches from 0 to 1, float32 (patches, values per patch).

    vLLM normalizes pixels on the device if the model supports it, and in the model's processor otherwise.
    """
    processor = info.get_hf_processor(**kwargs)
    item_processor = getattr(processor, f"{modality}_processor", None) or processor.image_processor
    if info.ctx.get_mm_config().mm_device_do_normalize:
        return pixels.float() * getattr(item_processor, "rescale_factor", 1 / 255)
    if not item_processor.do_normalize:
        return pixels.float()
    mean, std = torch.tensor([item_processor.image_mean, item_processor.image_std], dtype=torch.float32, device="cpu")
    channels = pixels.float().view(len(pixels), len(std), -1)
    return torch.addcmul(mean[:, None], channels, std[:, None]).flatten(1)
