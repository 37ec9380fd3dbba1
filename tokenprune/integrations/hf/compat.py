# SPDX-License-Identifier: Apache-2.0
"""Differences between the supported versions of transformers, from 5.0 to `NEWEST`."""

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
# The newest tested release, and the upper bound of the requirement in pyproject.toml.
NEWEST = "5.24"

# Classes of cache layers that some versions lack: layers that carry a state (since 5.4), and empty cache layers of
# decoder layers without keys (since 5.20).
LINEAR_LAYER: type | None = getattr(cache_utils, "LinearAttentionLayer", None)
EMPTY_LAYER: type | None = getattr(cache_utils, "DummyLayer", None)
# Later versions add quantized layers without a full-precision buffer of the last tokens.
QUANTIZED_LAYERS = (
    cache_utils.QuantizedLayer, getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer),
)  # fmt: skip

_MASK_PARAMETERS = inspect.signature(masking_utils.create_causal_mask).parameters
# Names of the key/value cache in a model's arguments and outputs, this version's name first. Since 5.24 the name is
# "cache". The earlier name is still accepted, and models with remote code may accept only the earlier name.
CACHE_NAMES = ("cache", "past_key_values") if "cache" in _MASK_PARAMETERS else ("past_key_values",)
CACHE, EARLIER_CACHE = CACHE_NAMES[0], CACHE_NAMES[-1]
_EMBEDS = "inputs_embeds" if "inputs_embeds" in _MASK_PARAMETERS else "input_embeds"
# True if decoders take `cache_position` (up to 5.3). Masks and static cache layers depend on it. Later versions compute
# the cache positions themselves.
NEEDS_CACHE_POSITION = (
    "cache_position" in _MASK_PARAMETERS and _MASK_PARAMETERS["cache_position"].default is inspect.Parameter.empty
)
# True if mask functions take the number of queries. Early versions take the cache positions of the queries.
_TAKES_QUERY_LENGTH = "q_length" in inspect.signature(masking_utils.sdpa_mask).parameters
# True if `Cache.crop` takes the number of tokens to remove, as a negative int (since 5.14). Earlier versions take the
# length to keep. They also accept a negative int, but crop(0) empties the cache.
CROP_TAKES_REMOVED_COUNT = "tokens_to_remove" in inspect.signature(cache_utils.Cache.crop).parameters

# True if `reset` empties a dynamic cache (since 5.18). Earlier versions keep the slots and fill them with zeros.
RESET_EMPTIES = "reset" in vars(cache_utils.DynamicLayer)


def get_attention_function(name: str, eager: Any) -> Callable:
    """Return the attention function of an implementation. `eager` is the eager function of the model, or None."""
    if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]  # 5.0


def get_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the key/value cache in a model's arguments, or None. This version's name has priority."""
    return arguments.get(CACHE, arguments.get(EARLIER_CACHE))


def get_query_length(queries: int | Tensor) -> int:
    """Return the number of queries from the argument of `Cache.get_mask_sizes`, a count or cache positions."""
    return queries if isinstance(queries, int) else queries.shape[0]


def create_masks(config: Any, embeds: Tensor, mask: Tensor | None, cache: Any) -> Any:
    """Create the masks of a decoder: one mask, or a dict by kind of layer. See `create_masks_for_generate`."""
    return masking_utils.create_masks_for_generate(**_build_mask_arguments(config, embeds, mask, cache))


def create_mask(kind: str, config: Any, embeds: Tensor, mask: Tensor | None, cache: Any) -> Any:
    """Create a mask with transformers' function `create_{kind}`."""
    return getattr(masking_utils, f"create_{kind}")(**_build_mask_arguments(config, embeds, mask, cache))


def write_mask(q_length: int, q_offset: int, device: Any, **options: Any) -> Tensor | None:
    """Create a dense mask with transformers' mask function for sdpa."""
    queries = dict(q_length=q_length, q_offset=q_offset, device=device)
    if not _TAKES_QUERY_LENGTH:
        queries = dict(cache_position=q_offset + torch.arange(q_length, device=device))
    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**options | queries)


def get_window_order(tower: Any, grids: Tensor) -> Tensor:
    """Return the order in which a tower with window attention processes the units of all images, long `[units]`."""
    if hasattr(tower, "get_window_index"):  # up to 5.9
        return tower.get_window_index(grids)[0]
    from transformers.vision_utils import get_vision_window_index

    return get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)[0]


def _build_mask_arguments(config: Any, embeds: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Any]:
    arguments = dict(config=config, attention_mask=mask) | {_EMBEDS: embeds, CACHE: cache}
    if NEEDS_CACHE_POSITION:
        past = 0 if cache is None else cache.get_seq_length()
        arguments["cache_position"] = torch.arange(past, past + embeds.shape[1], device=embeds.device)
    return arguments


def reruns_layers(decoder: Any) -> bool:
    """Return True if gradient checkpointing runs the decoder layers again in the backward pass."""
    return decoder.training and getattr(decoder, "gradient_checkpointing", False)


def reruns_hooks(decoder: Any) -> bool:
    """Return True if gradient checkpointing also runs the hooks of the decoder layers again.

    Since transformers 5.20, only the `forward` of a layer is checkpointed, without its hooks.
    """
    inside = "__call__" in GradientCheckpointingLayer.__dict__
    return reruns_layers(decoder) and (
        inside or not all(isinstance(layer, GradientCheckpointingLayer) for layer in decoder.layers)
    )


def is_older_than(since: str) -> bool:
    """Return True if this version of transformers is older than `since`."""
    return Version(since) > VERSION
