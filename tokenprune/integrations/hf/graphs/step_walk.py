# SPDX-License-Identifier: Apache-2.0
"""One decoding step through the layers of a decoder, group by group."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import count_slots, is_offloaded
from tokenprune.integrations.hf.cache.reduced_cache import Reduced
from tokenprune.integrations.hf.graphs.capture import NotGraphedError
from tokenprune.integrations.hf.graphs.steps import StepBucket
from tokenprune.integrations.hf.graphs.walk import LEARNING_STEP, Walk


class StepWalk(Walk):
    """State of one decoding step: a call with one new token per row, and a cache that holds tokens."""

    learning = LEARNING_STEP
    _bucket: StepBucket
    _slots: int

    def _run_group(self, index: int, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        hidden, cache = self._get_hidden(args, kwargs), compat.get_cache(kwargs)
        check_cache(cache)
        layers = cache.layers[index : index + len(self.groups.get_group(index))]
        slots = count_slots(layers[0])
        # Cuts inside the decoder leave layers with different numbers of slots.
        cached = list(takewhile(lambda layer: count_slots(layer) == slots, layers))
        for layer in cached:
            check_layer(layer, self.buckets.graphs.capacity(slots + 1))
        end = index + len(cached)
        call = self._build_call(hidden, self._get_step_mask(kwargs, hidden, slots + 1), kwargs, True)
        forwards = {i: forward for i, forward in self.groups.get_group(index).items() if i < end}
        output, self._bucket = self.buckets.run_step(forwards, call, cached)
        self._slots = slots + 1
        return output, end

    def _pass_on(self, index: int, kwargs: dict[str, Any]) -> Any:
        # The view grows only here, because the mask of a layer is built from its slots before the step.
        layer = compat.get_cache(kwargs).layers[index]
        self._bucket.set_view(index, layer, self._slots)
        if layer.is_sliding:
            layer.cumulative_length += 1
        return super()._pass_on(index, kwargs)

    def _get_step_mask(self, kwargs: dict[str, Any], hidden: Tensor, num_keys: int) -> Tensor:
        """Return the mask of the keys of a step, shape (batch or 1, heads or 1, 1, keys), bool or additive."""
        mask = kwargs.get("attention_mask")
        if mask is None and self.groups.attention == "sdpa":
            return hidden.new_ones((1, 1, 1, num_keys), dtype=torch.bool)
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2:] != (1, num_keys):
            raise NotGraphedError("the layers get masks of an unknown form")
        return mask


def check_cache(cache: Any) -> None:
    """Raise NotGraphedError for caches whose steps cannot use graphs."""
    kind = cache._tokenprune_original if isinstance(cache, Reduced) else type(cache)
    if kind is not DynamicCache:
        raise NotGraphedError(f"the cache is a {type(cache).__name__}")
    if is_offloaded(cache):
        raise NotGraphedError("the cache is offloaded")


def check_layer(layer: Any, capacity: int) -> None:
    """Raise NotGraphedError for cache layers that a step cannot replace by views of buffers."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise NotGraphedError(f"the cache has a {type(layer).__name__}")
    # Below its window, a sliding layer keeps all tokens.
    if layer.is_sliding and (getattr(layer, "record_past", False) or capacity >= layer.sliding_window):
        raise NotGraphedError("the cache has layers with a sliding window")
