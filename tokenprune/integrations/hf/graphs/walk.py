# SPDX-License-Identifier: Apache-2.0
"""The way of one prefill through the layers of a decoder, group by group."""

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
from tokenprune.integrations.hf.graphs.replay import Buckets, LayerCall, NotGraphedError, States
from tokenprune.integrations.shared.attachable import get_hidden_states

LEARNING = "the first prompt of its kind shows which layers follow each other"
# transformers 5.17 hands its models' encoded images on to layers, none of which reads them.
_OWN = {"hidden_states", "mm_encoder_outputs", *compat.CACHE_NAMES}


class Groups:
    """Groups of layers that follow each other in calls of one kind: each gets what the one before it returns, and the
    same arguments beside. The first call shows that, and is not graphed.

    alone: layers that run as they are.
    """

    def __init__(self, adapter: Adapter, alone: frozenset[int]) -> None:
        self.alone, self.tokens = alone, adapter.family.layer_tokens
        layers = adapter.decoder.layers
        kinds = getattr(adapter.text_config, "layer_types", None) or [None] * len(layers)
        self.starts = {index for index in range(1, len(layers)) if kinds[index] != kinds[index - 1]}
        self.forwards: list[Callable[..., Any]] = []
        self.returns_tuple = False
        self.learnt = False
        self.causal = adapter.text_config._attn_implementation == "sdpa"  # without a mask
        self.count = len(layers)

    def of(self, first: int) -> dict[int, Callable[..., Any]]:
        """Return the layers of the group that starts with `first`."""
        end = next(
            (index for index in range(first + 1, self.count) if index in self.starts or index in self.alone), self.count
        )
        return {index: self.forwards[index] for index in range(first, end)}


class Walk:
    """One call of a decoder. why_not: in words, why no layer was replayed; "" where one was."""

    def __init__(self, groups: Groups, buckets: Buckets) -> None:
        self.groups, self.buckets, self.learning = groups, buckets, not groups.learnt
        self.why_not = LEARNING if self.learning else "no layer is left to itself"
        self._forwards: list[Callable[..., Any]] = []
        self._starts: set[int] = set()
        self._beside: list[Any] = []
        self._handed: Any = None
        self._states: States = {}
        self._until = 0
        self._replayed = False
        self._looked_at: tuple[Any, bool] = None, False

    def layer(self, index: int, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of a layer, whose own forward is `forward`."""
        if self.learning:
            return self._learn(index, forward, args, kwargs)
        if index < self._until:
            if not self._follows(args, kwargs):
                raise TokenPruneError(
                    f"decoder layer {index} gets something else than layer {index - 1} returned, which it did not in "
                    "an earlier prompt of this kind: patch without graphs="
                )
            return self._pass_on(index, kwargs)
        if index in self.groups.alone:
            return forward(*args, **kwargs)
        try:
            call = self._call(index, args, kwargs)
            layers = self.groups.of(index)
            self._handed, self._states = self.buckets.run(layers, call)
        except NotGraphedError as error:
            self.why_not = self.why_not if self._replayed else str(error)
            return forward(*args, **kwargs)
        self._replayed, self.why_not = True, ""
        self._until, self._beside = index + len(layers), _beside(kwargs)
        return self._pass_on(index, kwargs)

    def end(self) -> None:
        """Note what the call showed, once it is over."""
        if self.learning and len(self._forwards) == self.groups.count:
            self.groups.forwards, self.groups.learnt = self._forwards, True
            self.groups.starts |= self._starts

    def _learn(self, index: int, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if index and not self._follows(args, kwargs):
            self._starts.add(index)
        output = forward(*args, **kwargs)
        self.groups.returns_tuple = isinstance(output, tuple)
        self._handed, self._beside = output[0] if isinstance(output, tuple) else output, _beside(kwargs)
        self._forwards.append(forward)
        return output

    def _follows(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether a layer gets what the one before it returned, and the same arguments beside."""
        beside = _beside(kwargs)
        same = len(beside) == len(self._beside) and all(map(_same, beside, self._beside))
        return same and get_hidden_states(args, kwargs) is self._handed

    def _pass_on(self, index: int, kwargs: dict[str, Any]) -> Any:
        cache = compat.get_cache(kwargs)
        if cache is not None and index in self._states:
            cache.update(*self._states.pop(index), index)
        return (self._handed,) if self.groups.returns_tuple else self._handed

    def _mask(self, mask: Any, length: int, static: bool) -> Tensor | None:
        """Return the mask of a call, `[B, H, L, L]`; None where attention that is causal by itself needs none."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 4 or not (static or mask.shape[-1] == length):
            raise NotGraphedError("layers are handed masks of a form of their own")
        # A static cache's is there in any case, and of all slots. Others are left out where nothing is hidden.
        if static and self.groups.causal:
            if self._looked_at[0] is not mask:
                seen = mask if mask.dtype == torch.bool else mask == 0
                wanted = torch.ones(length, mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
                self._looked_at = mask, torch.equal(seen, wanted.expand_as(seen))
            if self._looked_at[1]:
                return None
        return mask[..., :length]

    def _call(self, index: int, args: tuple, kwargs: dict[str, Any]) -> LayerCall:
        """Return a layer's call as it can be graphed; raise NotGraphedError where it cannot."""
        hidden, cache, most = get_hidden_states(args, kwargs), compat.get_cache(kwargs), self.buckets.graphs.most
        if len(args) > 1 or hidden.ndim != 3:
            raise NotGraphedError("layers are called in a form of their own")
        if hidden.shape[1] > most:
            raise NotGraphedError(f"{hidden.shape[1]} tokens are more than most={most}")
        if cache is not None and index < len(cache.layers) and count_slots(cache.layers[index]):
            raise NotGraphedError("the cache holds tokens already")
        if not (cache is None or type(cache) is DynamicCache or is_static(cache)):
            raise NotGraphedError(f"the cache is a {type(cache).__name__}")
        if hidden.is_cuda and is_static(cache) and not self.buckets.graphs.static:
            raise NotGraphedError("the cache is static: graphs=Graphs(static=True) replays its prefill, too")
        tensors: dict[str, tuple[Any, int]] = {}
        plain: dict[str, Any] = {"attention_mask": None} if "attention_mask" in kwargs else {}
        mask = self._mask(kwargs.get("attention_mask"), hidden.shape[1], is_static(cache))
        for name, value in kwargs.items():
            if name in _OWN or name == "attention_mask":
                continue
            if value is not None and name in self.groups.tokens:
                tensors[name] = (value, self.groups.tokens[name])
            elif value is None or isinstance(value, (bool, int, float, str)):
                plain[name] = value
            else:
                raise NotGraphedError(f"layers are handed {name}")
        return LayerCall(hidden, tensors, mask, plain, cache is not None)


def _beside(kwargs: dict[str, Any]) -> list[Any]:
    return [value for name, value in sorted(kwargs.items()) if name not in _OWN]


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, (Tensor, tuple, list)) and one == other)
