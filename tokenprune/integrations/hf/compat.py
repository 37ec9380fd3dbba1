# SPDX-License-Identifier: Apache-2.0
"""Differences between the supported versions of transformers, from 5.0 to `NEWEST`, all in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import cache_utils, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VERSION = Version(transformers.__version__)
# The newest release tested; the requirement in pyproject.toml ends with it.
NEWEST = "5.24"

# Names of kinds of cache layers that some versions lack: layers that carry a state (5.4), and one in the place of a
# decoder layer that keeps nothing, since it attends to the keys of an earlier one, or not at all (5.20).
LINEAR_LAYER: type | None = getattr(cache_utils, "LinearAttentionLayer", None)
EMPTY_LAYER: type | None = getattr(cache_utils, "DummyLayer", None)
# Later versions have quantized layers that keep no last tokens in full beside.
QUANTIZED_LAYERS = (
    cache_utils.QuantizedLayer, getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer),
)  # fmt: skip

_OF_MASK = inspect.signature(masking_utils.create_causal_mask).parameters
# Names of the key/value cache among a model's arguments and in its outputs, this version's first: "cache" from 5.24 on,
# which takes the earlier name too, and models with code of their own may go by that alone.
CACHE_NAMES = ("cache", "past_key_values") if "cache" in _OF_MASK else ("past_key_values",)
CACHE, EARLIER_CACHE = CACHE_NAMES[0], CACHE_NAMES[-1]
_EMBEDS = "inputs_embeds" if "inputs_embeds" in _OF_MASK else "input_embeds"
# Whether a decoder is handed where its tokens go in the cache (up to 5.3): masks are made of that, and static layers
# store by it. Later versions count for themselves.
NEEDS_CACHE_POSITION = "cache_position" in _OF_MASK and _OF_MASK["cache_position"].default is inspect.Parameter.empty
# Whether a mask is written for a number of queries, or (early versions) for their places.
_LENGTHS = "q_length" in inspect.signature(masking_utils.sdpa_mask).parameters
# Whether `crop` of a cache takes how many tokens to remove (from 5.14), as a number below 0, or a length to keep. The
# latter takes numbers below 0 for the same, but 0 for nothing to keep.
CROP_TAKES_REMOVED_COUNT = "tokens_to_remove" in inspect.signature(cache_utils.Cache.crop).parameters

# Whether an emptied dynamic cache is empty (from 5.18); before, it keeps as many slots, of zeros.
RESET_EMPTIES = "reset" in vars(cache_utils.DynamicLayer)


def get_attention_function(name: str, eager: Any) -> Callable:
    """Return the attention function of an implementation's name; `eager` is the model's own, None if it has none."""
    if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]  # 5.0


def get_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the key/value cache among a model's arguments, or None; of two, that of this version's name."""
    return arguments.get(CACHE, arguments.get(EARLIER_CACHE))


def get_query_length(given: int | Tensor) -> int:
    """Return the number of new tokens, of what `get_mask_sizes` of a cache is handed."""
    return given if isinstance(given, int) else given.shape[0]


def create_masks(config: Any, embeds: Tensor, mask: Tensor | None, cache: Any) -> Any:
    """Return the masks that a decoder makes for its layers, by kind of layer where there are several."""
    return masking_utils.create_masks_for_generate(**_about(config, embeds, mask, cache))


def create_mask(kind: str, config: Any, embeds: Tensor, mask: Tensor | None, cache: Any) -> Any:
    """Return the mask that transformers' `create_{kind}` makes."""
    return getattr(masking_utils, f"create_{kind}")(**_about(config, embeds, mask, cache))


def write_mask(q_length: int, q_offset: int, device: Any, **places: Any) -> Tensor | None:
    """Return what transformers' function for masks of "sdpa" writes."""
    given = dict(q_length=q_length, q_offset=q_offset, device=device)
    if not _LENGTHS:
        given = dict(cache_position=q_offset + torch.arange(q_length, device=device))
    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**places | given)


def get_window_order(tower: Any, grids: Tensor) -> Tensor:
    """Return long `[N]`, the units of all images in the order in which a tower of windows lines them up."""
    if hasattr(tower, "get_window_index"):  # up to 5.9
        return tower.get_window_index(grids)[0]
    from transformers.vision_utils import get_vision_window_index

    return get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)[0]


def _about(config: Any, embeds: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Any]:
    about = dict(config=config, attention_mask=mask) | {_EMBEDS: embeds, CACHE: cache}
    if NEEDS_CACHE_POSITION:
        past = 0 if cache is None else cache.get_seq_length()
        about["cache_position"] = torch.arange(past, past + embeds.shape[1], device=embeds.device)
    return about


def reruns_layers(decoder: Any) -> bool:
    """Return True if the backward pass runs the decoder layers again (gradient checkpointing)."""
    return decoder.training and getattr(decoder, "gradient_checkpointing", False)


def reruns_hooks(decoder: Any) -> bool:
    """Return True if the backward pass also runs the hooks of the decoder layers again.

    Versions of transformers after 5.19 checkpoint the `forward` of a layer, without its hooks.
    """
    inside = "__call__" in GradientCheckpointingLayer.__dict__
    return reruns_layers(decoder) and (
        inside or not all(isinstance(layer, GradientCheckpointingLayer) for layer in decoder.layers)
    )


def is_older_than(since: str) -> bool:
    """Return True if this version of transformers is older than `since`."""
    return Version(since) > VERSION
