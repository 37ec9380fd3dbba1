# SPDX-License-Identifier: Apache-2.0
"""Reuse encoder outputs of repeated images: `patch(..., feature_cache=...)`.

The cache stores the encoder output before any selection, with the observables that methods read in the tower. Every
method therefore selects the same tokens as if the tower had run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.feature_cache.cache import FeatureCache
from tokenprune.integrations.hf.feature_cache.content import (
    UnknownContentError,
    Weights,
    describe_settings,
    digest,
    is_training,
    needs_gradients,
)
from tokenprune.integrations.hf.feature_cache.kept_output import KeptCall, KeptImage, iter_tensors
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part
from tokenprune.integrations.hf.towers.feature_hook import copy_sizes_to_host
from tokenprune.integrations.hf.towers.tiles import count_tiles
from tokenprune.statistics import Stats

# One image: its own arguments without padding, and its rows of the arguments of the call.
Image = tuple[dict[str, Tensor], dict[str, slice]]

# Arguments that request outputs without a cache.
_UNCACHED_OUTPUTS = ("output_hidden_states", "output_attentions")
# Model types whose encoder handles each image independently, as rows of its arguments. Their encoded images are cached
# one by one. Other types cache the images of a call together.
ONE_BY_ONE = frozenset("gemma3 internvl llava llava_next llava_onevision qwen2_5_vl qwen2_vl qwen3_vl".split())
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


class FeatureReuse(Part):
    """Looks up images in a cache before the model encodes them.

    Args:
        adapter: Adapter of the model.
        limit: Size of the cache in bytes.
        per_image: Whether images are cached one by one. Otherwise encoder calls are cached.

    Raises:
        UnsupportedSetupError: If the model is sharded, or does not encode images with `get_image_features`.
    """

    def __init__(self, adapter: Adapter, limit: int, per_image: bool) -> None:
        super().__init__()
        self.adapter, self.cache = adapter, FeatureCache(limit)
        self.per_image = per_image and adapter.config.model_type in ONE_BY_ONE
        family, base = adapter.config.model_type, adapter.base
        if not any(callable(getattr(base, f"get_{modality}_features", None)) for modality in adapter.placeholders):
            raise UnsupportedSetupError(
                f"feature_cache: {family!r} does not encode images with get_image_features. Leave out feature_cache=."
            )
        if any(cls.__name__ in _SHARDED for module in base.modules() for cls in type(module).__mro__):
            raise UnsupportedSetupError(
                "feature_cache: sharded models (FSDP) run the tower in all processes together, so none can skip it. "
                "Leave out feature_cache=."
            )

    def _attach(self) -> None:
        self.on_detach(self.cache.clear)

    def add_stats(self, stats: Stats) -> None:
        stats.feature_cache = self.cache.counts()

    @torch.compiler.disable
    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        modality, host_args = encoding.modality, encoding.on_host
        modules, embeddings = self._modules(), self.adapter.base.get_input_embeddings()
        requests_more = any(host_args.get(name) for name in _UNCACHED_OUTPUTS)
        if is_training(modules) or needs_gradients(host_args.values()) or requests_more:
            self.cache.skip()
            return encode(encoding)
        modules.append(embeddings)  # some encoders also read text embeddings
        weights = Weights(modules)
        self.cache.renew(weights)
        images = self._split_images(modality, host_args) if self.per_image else None
        try:
            trains_embeddings = needs_gradients(embeddings.parameters())
            settings = describe_settings(modules, self.adapter.config)
            context = (modality, trains_embeddings, settings, _get_stream(modules))
            if images is None:
                keys = [digest(context, host_args)]
            else:
                shared_args = {name: value for name, value in host_args.items() if name not in images[0][0]}
                shared = digest(context, shared_args)
                keys = [digest(shared, image_args) for image_args, _ in images]
        except UnknownContentError:
            self.cache.skip()
            return encode(encoding)
        entries = self.cache.find(keys)
        if images is None:
            return self._reuse_call(weights, keys[0], entries, partial(encode, encoding))
        return self._reuse_images(weights, keys, entries, [rows for _, rows in images], encoding, encode)

    def _reuse_call(self, weights: Weights, key: bytes, entries: dict[bytes, Any], encode: Callable[[], Any]) -> Any:
        if key not in entries:
            output = encode()
            if not _is_cacheable(output):
                self.cache.skip()
                return output
            entries[key] = KeptCall.from_output(output)
            self.cache.keep(weights, key, entries[key])
        return entries[key].make_output()

    def _reuse_images(
        self,
        weights: Weights,
        keys: list[bytes],
        entries: dict[bytes, Any],
        rows: list[dict[str, slice]],
        encoding: Encoding,
        encode: Encode,
    ) -> Any:
        missing = {key: index for index, key in reversed(list(enumerate(keys))) if key not in entries}
        indices = sorted(missing.values())
        if indices:
            all_missing = len(indices) == len(keys)
            output = encode(encoding if all_missing else self._select(encoding, [rows[index] for index in indices]))
            images = KeptImage.from_output(output, len(indices)) if _is_cacheable(output) else None
            if images is None:
                self.cache.skip()
                return output if all_missing else encode(encoding)
            for index, image in zip(indices, images, strict=True):
                entries[keys[index]] = image
                self.cache.keep(weights, keys[index], image)
        return KeptImage.join([entries[key] for key in keys])

    def _select(self, encoding: Encoding, images: Sequence[dict[str, slice]]) -> Encoding:
        """Return the arguments of an encoder call for a part of its images, given their rows."""
        arguments = encoding.arguments
        selected = {name: torch.cat([arguments[name][rows[name]] for rows in images]) for name in images[0]}
        on_host = copy_sizes_to_host(encoding.modality, encoding.on_host | selected)
        return Encoding(encoding.modality, arguments | selected, on_host)

    def _modules(self) -> list[nn.Module]:
        """Return all modules outside of the decoder, because images may pass through any module."""
        base, decoder = self.adapter.base, self.adapter.decoder
        decoder_modules = set() if base is decoder else set(decoder.modules())
        return [module for module in base.modules() if module not in decoder_modules]

    def _split_images(self, modality: str, arguments: dict[str, Any]) -> list[Image] | None:
        """Return the images of a call, or None if its arguments cannot be split."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        name = "pixel_values_videos" if "pixel_values_videos" in tensors else "pixel_values"
        pixels, grids = tensors.get(name), tensors.get(f"{modality}_grid_thw")
        if pixels is None or pixels.ndim < 2:
            return None
        counts = [1] * len(pixels) if grids is None else grids.prod(1).tolist()
        if sum(counts) != len(pixels) or any(
            value.ndim == 0 or len(value) != len(counts) for other, value in tensors.items() if other != name
        ):
            return None
        images_per_row = tensors.get("batch_num_images")
        if images_per_row is not None and bool((images_per_row != 1).any()):
            return None  # the features of an image depend on the other images of its row
        images = []
        for index, span in enumerate(pairwise(accumulate(counts, initial=0))):
            rows = dict.fromkeys(tensors, slice(index, index + 1)) | {name: slice(*span)}
            images.append(({other: value[rows[other]] for other, value in tensors.items()}, rows))
        sizes = tensors.get("image_sizes")
        if sizes is not None and self.adapter.family.patches == "packed" and pixels.ndim == 5:
            tiles = count_tiles(self.adapter, arguments, sizes.cpu())
            for (image_args, _), count in zip(images, tiles, strict=True):
                image_args[name] = image_args[name][:, :count]  # remove the padding, which depends on other images
        return images


def _is_cacheable(output: Any) -> bool:
    """Return whether `output` can hold a record, and does not need gradients."""
    return hasattr(output, "pooler_output") and not needs_gradients(iter_tensors(output))


def _get_stream(modules: Sequence[nn.Module]) -> int:
    """Return the current GPU stream, a part of the key: features of one stream may not be ready on another stream."""
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    device = next((parameter.device for parameter in parameters if parameter is not None), None)
    return torch.cuda.current_stream(device).cuda_stream if device is not None and device.type == "cuda" else 0
