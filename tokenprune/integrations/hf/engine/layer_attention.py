# SPDX-License-Identifier: Apache-2.0
"""Observe the attention of decoder layers for methods that read it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.checks import AFTER, BEFORE
from tokenprune.integrations.hf.engine.decode_pruning import get_step_state
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.part import Observations, Part, PerCall
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.shared import eager
from tokenprune.kernels.observation import Observation
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables


class _Stop(Exception):
    """Stops a layer after its attention was observed."""


class LayerAttention(Part):
    """Records the inputs of attention (query, key and mask) that methods read at a cut.

    The inputs are recorded in the layer before the cut, and in the layer after it. The layer after the cut runs on the
    tokens before the cut, and stops when it calls its attention function.

    Args:
        adapter: Adapter of the model.
        steps: The cuts, by layer.
    """

    def __init__(self, adapter: Adapter, steps: Mapping[int, Step]) -> None:
        super().__init__()
        self.adapter, self.steps = adapter, steps
        needs = {layer: step.method.needs for layer, step in steps.items()}
        self.before = {layer for layer, needed in needs.items() if select_observables(needed, *BEFORE)}
        self.next = {layer for layer, needed in needs.items() if select_observables(needed, *AFTER)}
        self._before: PerCall[Observation] = PerCall()
        self._trials: PerCall[list[Observation]] = PerCall()  # observations of layers that run only to be observed

    def _attach(self) -> None:
        for layer in sorted({layer - 1 for layer in self.before} | self.next):
            observe = partial(eager.run_in_call, self.current, partial(self._observe, layer))
            self.attach_part(Observer(self.adapter.get_attention(layer), observe))

    def before_cut(self, call: Call, step: Step, observed: Observations, args: tuple, kwargs: dict[str, Any]) -> None:
        if (before := self._before.pop(call, None)) is not None:
            observed[ObservedAt.LAYER_BEFORE] = before
        if step.layer in self.next and call.cuts_at(step.layer):
            observed[ObservedAt.NEXT_LAYER] = self._next(call, step.layer, args, kwargs)

    def _observe(self, layer: int, observation: Observation) -> None:
        call = self.current()
        if call is None or not call.active:
            return
        if (trial := self._trials.get(call)) is not None:
            trial.append(observation)
            raise _Stop
        if (filled := call.cached.count_filled(layer, call.state.layout.width)) is not None:
            observation = observation.first_keys(filled)
        after = layer + 1
        if after in self.before and (call.cuts_at(after) or get_step_state(call, self.steps[after].method)):
            self._before[call] = observation

    def _next(self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any]) -> Observation:
        """Return the inputs of the attention of `layer` for all tokens that reach the cut."""
        cached, width = call.cached, call.state.layout.width
        shared = self.adapter.key_count(layer, kwargs)
        keys = None if layer in call.maskless else cached.known_span(layer, width, shared)
        args, kwargs = call.group(layer).arguments(layer, args, kwargs, self.adapter, keys)
        observation = self.observe_layer(call, layer, args, kwargs)
        if (past := cached.past_keys(layer, width, self.adapter.cached_keys)) is not None:
            past = past.to(observation.key.device)
            observation.key = torch.cat([past, observation.key], dim=2)
        return observation

    def observe_layer(self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any]) -> Observation:
        """Run an observed layer until it calls its attention function, and return the inputs of that function.

        The layer's own norms, projections and rotary embedding apply. The cache is not changed.

        Raises:
            UnsupportedSetupError: If the layer calls no attention function.
        """
        kwargs = {name: None if value is call.cached.cache else value for name, value in kwargs.items()}
        trial = self._trials[call] = []
        try:
            with torch.no_grad(), suppress(_Stop):
                # `forward`, because calling the module would run our own hooks.
                self.adapter.decoder.layers[layer].forward(*args, **kwargs)
        finally:
            del self._trials[call]
        if not trial:
            raise UnsupportedSetupError(f"Decoder layer {layer} ran without calling its attention function.")
        return trial[0]
