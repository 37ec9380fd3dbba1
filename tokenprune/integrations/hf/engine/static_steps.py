# SPDX-License-Identifier: Apache-2.0
"""Decoding steps with a reduced static cache, which torch.compile can trace: only the attention masks change."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import ReducedStatic, find_span
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.shared import eager
from tokenprune.integrations.shared.attachable import get_hidden_states


class StaticSteps(Part):
    """Replaces the attention masks of decode steps if the call has a static cache with fewer tokens.

    The hooks are added by the first call with a static cache.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.decoder = adapter.decoder
        self.ahead: list[tuple[int, nn.Module]] = []  # layers without a hook

    def _attach(self) -> None:
        self.ahead = list(enumerate(self.decoder.layers))

    def before_call(self, call: Call, arguments: dict[str, Any]) -> None:
        if call.cached.capacity is not None:
            self.watch()

    def on_static_step(self) -> None:
        if self.ahead:  # the cache was reduced by an earlier patch
            eager.run_eagerly(self.watch)

    def watch(self) -> None:
        """Add hooks to all layers."""
        while self.ahead:
            index, layer = self.ahead.pop()
            self.hook(layer.register_forward_pre_hook, partial(self._enter_layer, index), eager=False, with_kwargs=True)

    def _enter_layer(
        self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        cache = kwargs.get(compat.CACHE)
        if not isinstance(cache, ReducedStatic) or self.current() is not None:
            return None
        reduction, layer = cache.tokenprune_reduction, cache.layers[index]
        held = layer.cumulative_length_int if layer.is_sliding else 0  # other layers see all slots
        columns = find_span(layer, held, get_hidden_states(args, kwargs).shape[-2]).select(reduction.get_slots(index))
        # The model's mask is for the caller's lengths, shape (batch or 1, 1 or heads, tokens, capacity).
        return args, kwargs | {"attention_mask": masks.gather_mask(kwargs["attention_mask"], None, columns)}
