# SPDX-License-Identifier: Apache-2.0
"""One call of the layers of a decoder, group by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import count_slots
from tokenprune.integrations.hf.cache.static_cache import is_static
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.graphs.buckets import Buckets
from tokenprune.integrations.hf.graphs.capture import NotGraphedError
from tokenprune.integrations.hf.graphs.replay import LayerCall, States
from tokenprune.integrations.shared.attachable import get_hidden_states

LEARNING = "the first prompt of a kind records the groups of layers"
LEARNING_STEP = "the first step of a kind records the groups of layers"
# transformers 5.17 passes the encoder outputs to the layers, and no layer reads them.
_IGNORED = {"hidden_states", "mm_encoder_outputs", *compat.CACHE_NAMES}


class Groups:
    """Groups of consecutive layers for calls of one kind.

    Each layer of a group gets the output of the layer before it, and the same other arguments. The first call records
    the groups, and runs without graphs.

    Args:
        adapter: Adapter of the model.
        eager_layers: Indices of layers that run without graphs.
        starts: Indices of layers that begin a group in any case.
    """

    def __init__(self, adapter: Adapter, eager_layers: frozenset[int], starts: frozenset[int] = frozenset()) -> None:
        self.eager_layers, self.tokens = eager_layers, adapter.family.layer_tokens
        layers = adapter.decoder.layers
        kinds = getattr(adapter.text_config, "layer_types", None) or [None] * len(layers)
        self.starts = {index for index in range(1, len(layers)) if kinds[index] != kinds[index - 1]} | starts
        self.forwards: list[Callable[..., Any]] = []
        self.returns_tuple = False
        self.is_recorded = False
        self.attention = adapter.text_config._attn_implementation
        self.num_layers = len(layers)

    def get_group(self, first: int) -> dict[int, Callable[..., Any]]:
        """Return the forwards of the group that starts with layer `first`, by layer index."""
        end = next(
            (i for i in range(first + 1, self.num_layers) if i in self.starts or i in self.eager_layers),
            self.num_layers,
        )
        return {index: self.forwards[index] for index in range(first, end)}


class Walk:
    """State of one prefill.

    Attributes:
        why_not: Reason why no layer was replayed. Empty if at least one group was replayed.
    """

    learning = LEARNING

    def __init__(self, groups: Groups, buckets: Buckets) -> None:
        self.groups, self.buckets, self.is_recording = groups, buckets, not groups.is_recorded
        self.why_not = self.learning if self.is_recording else "no layer can use graphs"
        self._forwards: list[Callable[..., Any]] = []
        self._starts: set[int] = set()
        self._other_arguments: list[Any] = []
        self._output: Any = None
        self._states: States = {}
        self._group_end = 0
        self._replayed = False
        self._checked_mask: tuple[Any, bool] = None, False

    def run_layer(self, index: int, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of layer `index`, whose original forward is `forward`."""
        if self.is_recording:
            return self._record(index, forward, args, kwargs)
        if index < self._group_end:
            if not self._follows(args, kwargs):
                raise TokenPruneError(
                    f"The input of decoder layer {index} differs from the output of layer {index - 1}, unlike in "
                    "earlier prompts of this kind. Patch without graphs=."
                )
            return self._pass_on(index, kwargs)
        if index in self.groups.eager_layers:
            return forward(*args, **kwargs)
        try:
            self._output, self._group_end = self._run_group(index, args, kwargs)
        except NotGraphedError as error:
            self.why_not = self.why_not if self._replayed else str(error)
            return forward(*args, **kwargs)
        self._replayed, self.why_not = True, ""
        self._other_arguments = _get_other_arguments(kwargs)
        return self._pass_on(index, kwargs)

    def end(self) -> None:
        """Store the recorded groups at the end of the call."""
        if self.is_recording and len(self._forwards) == self.groups.num_layers:
            self.groups.forwards, self.groups.is_recorded = self._forwards, True
            self.groups.starts |= self._starts

    def _record(self, index: int, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if index and not self._follows(args, kwargs):
            self._starts.add(index)
        output = forward(*args, **kwargs)
        self.groups.returns_tuple = isinstance(output, tuple)
        self._output = output[0] if isinstance(output, tuple) else output
        self._other_arguments = _get_other_arguments(kwargs)
        self._forwards.append(forward)
        return output

    def _follows(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether a layer gets the output of the layer before it, and the same other arguments."""
        arguments = _get_other_arguments(kwargs)
        same = len(arguments) == len(self._other_arguments) and all(map(_is_same, arguments, self._other_arguments))
        return same and get_hidden_states(args, kwargs) is self._output

    def _pass_on(self, index: int, kwargs: dict[str, Any]) -> Any:
        cache = compat.get_cache(kwargs)
        if cache is not None and index in self._states:
            cache.update(*self._states.pop(index), index)
        return (self._output,) if self.groups.returns_tuple else self._output

    def _get_mask(self, mask: Any, length: int, static: bool) -> Tensor | None:
        """Return the mask of a call, shape (batch, heads, length, length), or None if causal attention is enough."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 4 or not (static or mask.shape[-1] == length):
            raise NotGraphedError("the layers get masks of an unknown form")
        # A static cache always has a mask of all slots. A dynamic cache has a mask only if a token is hidden.
        # SDPA is causal without a mask.
        if static and self.groups.attention == "sdpa":
            if self._checked_mask[0] is not mask:
                visible = mask if mask.dtype == torch.bool else mask == 0
                causal = torch.ones(length, mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
                self._checked_mask = mask, torch.equal(visible, causal.expand_as(visible))
            if self._checked_mask[1]:
                return None
        return mask[..., :length]

    def _run_group(self, index: int, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the group that starts with layer `index`. Return its output, and the index after its last layer."""
        hidden, cache, graphs = self._get_hidden(args, kwargs), compat.get_cache(kwargs), self.buckets.graphs
        if hidden.shape[1] > graphs.max_tokens:
            raise NotGraphedError(f"{hidden.shape[1]} tokens are more than max_tokens={graphs.max_tokens}")
        if cache is not None and index < len(cache.layers) and count_slots(cache.layers[index]):
            raise NotGraphedError("the cache holds tokens already")
        if not (cache is None or type(cache) is DynamicCache or is_static(cache)):
            raise NotGraphedError(f"the cache is a {type(cache).__name__}")
        if hidden.is_cuda and is_static(cache) and not graphs.static:
            raise NotGraphedError("the cache is static: pass graphs=Graphs(static=True) to use graphs")
        mask = self._get_mask(kwargs.get("attention_mask"), hidden.shape[1], is_static(cache))
        layers = self.groups.get_group(index)
        output, self._states = self.buckets.run(layers, self._build_call(hidden, mask, kwargs, cache is not None))
        return output, index + len(layers)

    @staticmethod
    def _get_hidden(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        hidden = get_hidden_states(args, kwargs)
        if len(args) > 1 or hidden.ndim != 3:
            raise NotGraphedError("the layers are called with unknown arguments")
        return hidden

    def _build_call(self, hidden: Tensor, mask: Tensor | None, kwargs: dict[str, Any], caches: bool) -> LayerCall:
        """Return the arguments of a layer, or raise NotGraphedError."""
        tensors: dict[str, tuple[Any, int]] = {}
        plain: dict[str, Any] = {"attention_mask": None} if "attention_mask" in kwargs else {}
        for name, value in kwargs.items():
            if name in _IGNORED or name == "attention_mask":
                continue
            if value is not None and name in self.groups.tokens:
                tensors[name] = (value, self.groups.tokens[name])
            elif value is None or isinstance(value, (bool, int, float, str)):
                plain[name] = value
            else:
                raise NotGraphedError(f"the layers get the argument {name}")
        return LayerCall(hidden, tensors, mask, plain, caches)


def _get_other_arguments(kwargs: dict[str, Any]) -> list[Any]:
    return [value for name, value in sorted(kwargs.items()) if name not in _IGNORED]


def _is_same(first: Any, second: Any) -> bool:
    return first is second or (not isinstance(first, (Tensor, tuple, list)) and first == second)
