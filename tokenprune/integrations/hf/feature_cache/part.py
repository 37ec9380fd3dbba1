# SPDX-License-Identifier: Apache-2.0
"""Reuse the features of images that were encoded before: `patch(..., feature_cache=...)`.

The cache keeps the encoder's output, before any choice of tokens, with the observables that methods read in the tower.
So every method chooses as if the tower had run.
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
    asks_for_gradients,
    digest,
    learns,
    settings,
)
from tokenprune.integrations.hf.feature_cache.kept_output import OfImage, Whole, tensors_of
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part
from tokenprune.integrations.hf.towers.feature_hook import copy_sizes_to_host
from tokenprune.integrations.hf.towers.tiles import count_tiles
from tokenprune.statistics import Stats

# One image: the arguments that are its own, cut down to what the encoder looks at; and, of those of the call, its rows.
Image = tuple[dict[str, Tensor], dict[str, slice]]

# Arguments that ask for what is not kept.
_MORE = ("output_hidden_states", "output_attentions")
# Model types whose encoder handles each image independently, as rows of its arguments. Their encoded images are cached
# one by one. Other types cache the images of a call together.
ONE_BY_ONE = frozenset("gemma3 internvl llava llava_next llava_onevision qwen2_5_vl qwen2_vl qwen3_vl".split())
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


class FeatureReuse(Part):
    """Looks images up in a cache of `limit` bytes before `adapter`'s model encodes them.

    apart: whether images may be used again one by one; else calls of the encoder are, as a whole.
    Raises UnsupportedSetupError for models whose encoder is not asked for images by name, and for sharded ones.
    """

    def __init__(self, adapter: Adapter, limit: int, apart: bool) -> None:
        super().__init__()
        self.adapter, self.cache = adapter, FeatureCache(limit)
        self.apart = apart and adapter.config.model_type in ONE_BY_ONE
        family, base = adapter.config.model_type, adapter.base
        if not any(callable(getattr(base, f"get_{modality}_features", None)) for modality in adapter.placeholders):
            raise UnsupportedSetupError(
                f"feature_cache: {family!r} does not encode its images by get_image_features, where they could be "
                "found again: leave it out"
            )
        if any(cls.__name__ in _SHARDED for module in base.modules() for cls in type(module).__mro__):
            raise UnsupportedSetupError(
                "feature_cache: in a sharded model (FSDP) all processes run the tower together, and one that finds its "
                "images would leave the others waiting: leave it out"
            )

    def _attach(self) -> None:
        self.on_detach(self.cache.clear)

    def add_stats(self, stats: Stats) -> None:
        stats.feature_cache = self.cache.counts()

    @torch.compiler.disable
    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        modality, host_args = encoding.modality, encoding.on_host
        modules, embeddings = self._modules(), self.adapter.base.get_input_embeddings()
        if learns(modules) or asks_for_gradients(host_args.values()) or any(host_args.get(name) for name in _MORE):
            self.cache.pass_by()
            return encode(encoding)
        modules.append(embeddings)  # some encoders look words up for their images
        weights = Weights(modules)
        self.cache.renew(weights)
        images = self._images(modality, host_args) if self.apart else None
        try:
            learnt = asks_for_gradients(embeddings.parameters())
            about = (modality, learnt, settings(modules, self.adapter.config), _stream(modules))
            if images is None:
                keys = [digest(about, host_args)]
            else:
                shared = digest(about, {name: value for name, value in host_args.items() if name not in images[0][0]})
                keys = [digest(shared, own) for own, _ in images]
        except UnknownContentError:
            self.cache.pass_by()
            return encode(encoding)
        known = self.cache.find(keys)
        if images is None:
            return self._whole(weights, keys[0], known, partial(encode, encoding))
        return self._each(weights, keys, known, [rows for _, rows in images], encoding, encode)

    def _whole(self, weights: Weights, key: bytes, known: dict[bytes, Any], encode: Callable[[], Any]) -> Any:
        if key not in known:
            output = encode()
            if not _can_be_kept(output):
                self.cache.pass_by()
                return output
            known[key] = Whole.of(output)
            self.cache.keep(weights, key, known[key])
        return known[key].output()

    def _each(
        self,
        weights: Weights,
        keys: list[bytes],
        known: dict[bytes, Any],
        rows: list[dict[str, slice]],
        encoding: Encoding,
        encode: Encode,
    ) -> Any:
        missing = {key: index for index, key in reversed(list(enumerate(keys))) if key not in known}
        places = sorted(missing.values())
        if places:
            everything = len(places) == len(keys)
            output = encode(encoding if everything else self._some(encoding, [rows[place] for place in places]))
            made = OfImage.of(output, len(places)) if _can_be_kept(output) else None
            if made is None:
                self.cache.pass_by()
                return output if everything else encode(encoding)
            for place, one in zip(places, made, strict=True):
                known[keys[place]] = one
                self.cache.keep(weights, keys[place], one)
        return OfImage.joined([known[key] for key in keys])

    def _some(self, encoding: Encoding, images: Sequence[dict[str, slice]]) -> Encoding:
        """Return the encoding of some of its images alone. images: of each, its rows of the arguments."""
        given = encoding.arguments
        some = {name: torch.cat([given[name][rows[name]] for rows in images]) for name in images[0]}
        on_host = copy_sizes_to_host(encoding.modality, encoding.on_host | some)
        return Encoding(encoding.modality, given | some, on_host)

    def _modules(self) -> list[nn.Module]:
        """Return all modules outside of the decoder: images may pass through each of them."""
        base, decoder = self.adapter.base, self.adapter.decoder
        inside = set() if base is decoder else set(decoder.modules())
        return [one for one in base.modules() if one not in inside]

    def _images(self, modality: str, arguments: dict[str, Any]) -> list[Image] | None:
        """Return the images of a call; None where its arguments do not tell them apart."""
        of_images = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        name = "pixel_values_videos" if "pixel_values_videos" in of_images else "pixel_values"
        pixels, grids = of_images.get(name), of_images.get(f"{modality}_grid_thw")
        if pixels is None or pixels.ndim < 2:
            return None
        counts = [1] * len(pixels) if grids is None else grids.prod(1).tolist()
        if sum(counts) != len(pixels) or any(
            value.ndim == 0 or len(value) != len(counts) for other, value in of_images.items() if other != name
        ):
            return None
        in_row = of_images.get("batch_num_images")
        if in_row is not None and bool((in_row != 1).any()):
            return None  # of several images in a row each is encoded otherwise than alone
        images = []
        for index, span in enumerate(pairwise(accumulate(counts, initial=0))):
            rows = dict.fromkeys(of_images, slice(index, index + 1)) | {name: slice(*span)}
            images.append(({other: value[rows[other]] for other, value in of_images.items()}, rows))
        sizes = of_images.get("image_sizes")
        if sizes is not None and self.adapter.family.patches == "packed" and pixels.ndim == 5:
            tiles = count_tiles(self.adapter, arguments, sizes.cpu())
            for (own, _), count in zip(images, tiles, strict=True):
                own[name] = own[name][:, :count]  # after them there is padding, as the others of the call need it
        return images


def _can_be_kept(output: Any) -> bool:
    """Return True if `output` is an object, which can carry a record, and no gradients go through it."""
    return hasattr(output, "pooler_output") and not asks_for_gradients(tensors_of(output))


def _stream(modules: Sequence[nn.Module]) -> int:
    """Return the GPU stream of `modules`, part of the key: features made on one stream may not be ready on another."""
    device = next((one.device for module in modules for one in module._parameters.values() if one is not None), None)
    return torch.cuda.current_stream(device).cuda_stream if device is not None and device.type == "cuda" else 0
