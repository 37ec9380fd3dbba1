# SPDX-License-Identifier: Apache-2.0
"""Methods that act on pixels, in the front end.

Images are resized before the model's processor sees them, with the same code as for transformers. vLLM then counts,
hashes and positions the smaller images as usual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import BaseProcessingInfo

from tokenprune.errors import BudgetError, OptionError, PlaceholderMismatchError, TokenPruneError
from tokenprune.integrations.shared.decoding import FindNeed, Need, find_need
from tokenprune.integrations.shared.resizing import Resizer
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.models.processor_settings import SettingsReader
from tokenprune.models.token_counts import find_rule
from tokenprune.models.token_limits import NativeLimit
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.selection.sites.units import UnitDropper
from tokenprune.settings import Setting
from tokenprune.settings.keys import LIMIT


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

    def shrink(self, items: Any, original: Mapping[str, object]) -> Mapping[str, object]:
        """Replace `items["image"]`, and return arguments for the model's processor that prevent a second resize.

        Args:
            items: Items of the request.
            original: The request's `mm_processor_kwargs` before `limit_kwargs`.
        """
        self.check_videos(items)
        images = items.get("image")
        if images is None or not len(images) or isinstance(images, SmallerImages):
            return self.kwargs
        if self._limit is not None:
            self._check_has_pixels(images)
            before, after = dataclasses.replace(self, kwargs=original)._get_options(), self._get_options()
            for index in range(len(images)):
                self._check_count(images, after, index)
            full = [self._count(images, before, index) for index in range(len(images))]
            items["image"] = SmallerImages(images, images.get_all(), full)
            return self.kwargs
        kwargs, options, smaller, changed = self._changed(images, range(len(images)))
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
        if self._limit is not None:
            limited = dataclasses.replace(self, kwargs=self.limit_kwargs(images))
            return self._check_count(images, limited._get_options(), index)
        _, _, smaller, changed = self._changed(images, [index])
        return self._count(ImageProcessorItems(smaller), changed, 0)

    def limit_kwargs(self, images: Any) -> Mapping[str, object]:
        """Return the request's keyword arguments with the processor's setting that limits tokens, if it has one.

        They are unchanged if all images are within the limit. vLLM's cache keys contain them.
        """
        if self._limit is None or images is None:
            return self.kwargs
        self._check_has_pixels(images)
        options, limit = self._get_options(), self.setting.pixel_budget.tokens
        assert limit is not None
        has_all = all(images.get(index) is not None for index in range(len(images)))
        if has_all and all(self._count(images, options, index) <= limit for index in range(len(images))):
            return self.kwargs
        chosen = self._limit.choose(SettingsReader(self._processor, options), limit)
        scoped: Any = self.kwargs.get("images_kwargs") or {}
        return dict(self.kwargs) | {"images_kwargs": dict(scoped) | chosen}

    def make_find_need(self) -> FindNeed:
        """Return the function that finds the pixels that the model's processor needs of an image."""
        processor, options, limit = self._processor, self._get_options(), self._limit
        if limit is None:
            return partial(find_need, processor, self._patch(), options, True)
        rule, tokens, read = find_rule(processor), self.setting.pixel_budget.tokens, SettingsReader(processor, options)
        assert rule is not None and tokens is not None
        limited = options | limit.choose(read, tokens)

        def find(height: int, width: int) -> Need | None:
            is_within = rule.count(read, height, width, 1) <= tokens
            return find_need(processor, None, options if is_within else limited, True, height, width)

        return find

    def decodes_like(self, other: Shrinker) -> bool:
        """Return True if both need the same pixels of every image."""
        mine, others = ((one.setting.pixel_method, one.setting.pixel_budget) for one in (self, other))
        return mine == others and dict(self.kwargs) == dict(other.kwargs)

    def check_videos(self, items: Any) -> None:
        """Raise OptionError if there are videos and the method would resize them."""
        name = self._method.name
        if self._method.videos and items.get("video"):
            if self.setting.max_visual_tokens is not None:
                raise OptionError(
                    f"{LIMIT} limits the tokens of images, and this request has videos. Select a profile without it, "
                    'or switch it off with {"tokenprune": {"off": true}}'
                )
            raise OptionError(
                f"{name} also resizes videos, which vLLM does not support. Leave videos unchanged with "
                f'{{"method": "{name}", "videos": false}}, or use a method that acts on the features, such as uniform'
            )

    def _changed(self, images: Any, indices: Iterable[int]) -> tuple[Any, dict[str, Any], Any, dict[str, Any]]:
        """Resize images.

        Args:
            images: All images of the request.
            indices: Indices of the images to resize.

        Returns:
            The processor's keyword arguments, their image options, the resized images, and the image options with
            which the processor does not resize them again.
        """
        self._check_has_pixels(images)
        # The arguments of the processor's call: the server's merged with the request's, by modality.
        kwargs = self.info._merge_and_resolve_mm_processor_kwargs(self.kwargs)
        options = dict(kwargs.get("images_kwargs") or {})
        sizes = [getattr(images.get_item_for_hash(index), "full_size", None) for index in indices]
        smaller, changed = self._patch().resize([images.get(index) for index in indices], options, sizes=sizes)
        return kwargs, options, smaller, changed

    def _check_has_pixels(self, images: Any) -> None:
        if not isinstance(images, ImageProcessorItems):
            raise OptionError(
                f"{self._method.name} acts on pixels, and this request contains embeddings. Switch it off for the "
                'request with {"tokenprune": {"off": true}}'
            )

    def _get_options(self) -> dict[str, Any]:
        """Return the processor's image options: the server's merged with the request's."""
        return dict(self.info._merge_and_resolve_mm_processor_kwargs(self.kwargs).get("images_kwargs") or {})

    def _check_count(self, images: Any, options: dict[str, Any], index: int) -> int:
        """Return the number of tokens of an image under the limit; raise BudgetError if its shape needs more."""
        tokens, limit = self._count(images, options, index), self.setting.pixel_budget.tokens
        assert limit is not None
        if tokens > limit:
            raise BudgetError(f"keep={limit} is too small for image {index}. It has at least {tokens} tokens.")
        return tokens

    def _count(self, images: ImageProcessorItems, options: dict[str, Any], index: int) -> int:
        """Return the number of visual tokens that the model's processor makes of an image."""
        size = images.get_image_size(index)
        height, width = getattr(images.get_item_for_hash(index), "full_size", None) or (size.height, size.width)
        rule = find_rule(self._processor)
        assert rule is not None  # `_patch` refuses processors without one
        return rule.count(SettingsReader(self._processor, options), height, width, 1)

    @property
    def _processor(self) -> Any:
        return self.info.get_hf_processor(**self.kwargs)

    @property
    def _limit(self) -> NativeLimit | None:
        """The processor's setting that limits tokens, if the budget is a number and the processor has one."""
        rule = None if self.setting.pixel_budget.tokens is None else find_rule(self._processor)
        return None if rule is None else rule.limit

    def check(self) -> None:
        """Raise OptionError or BudgetError if the model does not support the setting."""
        self._patch()

    @property
    def _method(self) -> ResizeMethod:
        assert self.setting.pixel_method is not None
        return self.setting.pixel_method

    def _patch(self) -> Resizer:
        method, processor = self._method, self._processor
        rule = find_rule(processor)
        if rule is None or (rule.resizing != "input" and self._limit is None):
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


def make_shrinker(setting: Setting, info: BaseProcessingInfo, kwargs: Mapping[str, Any]) -> Shrinker | None:
    """Return the `Shrinker` of a request, or None if its setting does not shrink images."""
    return None if setting.off or setting.pixel_method is None else Shrinker(setting, info, kwargs)


def decode_for(images: Any, shrinker: Shrinker | None) -> Any:
    """Return the images of a request. Images that media.py decoded for another setting are decoded again."""
    data = images.data if isinstance(images, ImageProcessorItems) else ()
    if not any(hasattr(item, "decode_for") for item in data):
        return images
    return ImageProcessorItems([item.decode_for(shrinker) if hasattr(item, "decode_for") else item for item in data])


def find_missing_images(items: Any, is_cached: Mapping[str, Sequence[bool]]) -> ImageProcessorItems | None:
    """Return the images of a request that are not in vLLM's cache, or None if there are none.

    vLLM passes these images on without the size of their files, which `ScaledMedia` has.

    Args:
        items: Items of the request.
        is_cached: For each modality, whether each item is in the cache.
    """
    images = items.get("image")
    if not isinstance(images, ImageProcessorItems):
        return None
    indices = [index for index, cached in enumerate(is_cached["image"]) if not cached]
    return ImageProcessorItems([images.get_item_for_hash(index) for index in indices]) if indices else None


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
    colours = _compute_colours(pixels.data, modality, info, kwargs)
    with torch.no_grad():
        kept = method.keep_units(colours.reshape(*grid, -1), _count_kept(setting, count)).flatten()
    if len(kept) != count:
        raise PlaceholderMismatchError(f"{method.name} returned {len(kept)} units for an item of {count} tokens")
    return tuple(kept.tolist())


def _count_kept(setting: Setting, count: int) -> int:
    return max(1, setting.budget.resolve_keep(count))


def _compute_colours(pixels: Tensor, modality: str, info: BaseProcessingInfo, kwargs: Mapping[str, object]) -> Tensor:
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
