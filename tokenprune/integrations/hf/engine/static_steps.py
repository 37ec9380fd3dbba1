# SPDX-License-Identifier: Apache-2.0
"""Steps of decoding with a reduced static cache: only masks differ, and nothing asks for more than the cache, so that a
step stays in a compiled graph."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import ReducedStatic, span_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.shared import eager
from tokenprune.integrations.shared.attachable import get_hidden_states


class StaticSteps(Part):
    """Hands each layer the mask of its own slots in a step that begins no call, from the first static cache on."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.decoder = adapter.decoder
        self.ahead: list[tuple[int, nn.Module]] = []  # layers at which it does not stand yet

    def _attach(self) -> None:
        self.ahead = list(enumerate(self.decoder.layers))

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if call.cached.capacity is not None:
            self.watch()

    def on_static_step(self) -> None:
        if self.ahead:  # the cache comes from an earlier patch
            eager.run_eagerly(self.watch)

    def watch(self) -> None:
        """Put hooks on all layers."""
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
        held = layer.cumulative_length_int if layer.is_sliding else 0  # else all slots are seen
        columns = span_of(layer, held, get_hidden_states(args, kwargs).shape[-2]).of(reduction.of_layer(index))
        # The model made it for the caller's lengths: `[B or 1, 1 or H, tokens, capacity]`.
        return args, kwargs | {"attention_mask": masks.gather_mask(kwargs["attention_mask"], None, columns)}
