# SPDX-License-Identifier: Apache-2.0
"""Observe the attention of decoder layers for the cuts that read it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenprune.integrations.hf.attention.observer import Observer, Seen
from tokenprune.integrations.hf.checks.decoder import reads_layer_before, reads_next_layer
from tokenprune.integrations.hf.decoder.probe import Probe, StopForward, probe_layer
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.parts.decode_pruning import Decides
from tokenprune.integrations.shared import eager
from tokenprune.integrations.shared.observation import Observation


class LayerAttention(Part):
    """Keeps in `Seen` what attention saw in the layer before a cut, and what it would see in the layer after it.

    steps: the cuts, by layer.
    """

    def __init__(self, adapter: Adapter, steps: Mapping[int, Step]) -> None:
        super().__init__()
        self.adapter, self.steps = adapter, steps
        self.before = {layer for layer, step in steps.items() if reads_layer_before(step.method)}
        self.next = {layer for layer, step in steps.items() if reads_next_layer(step.method)}

    def _attach(self) -> None:
        for layer in sorted({layer - 1 for layer in self.before} | self.next):
            observe = partial(eager.in_call, self.current, partial(self._observe, layer))
            self.attach_part(Observer(self.adapter.attention_of(layer), observe))

    def before_layer(self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        if layer in self.next and call.cuts_at(layer):
            seen = call.state.get(Seen) or call.state.put(Seen())
            seen.behind = probe_layer(call, self.adapter, layer, args, kwargs)

    def after_choice(self, call: Call, step: Step) -> None:
        call.state.pop(Seen)

    def _observe(self, layer: int, observation: Observation) -> None:
        call = self.current()
        if call is None or not call.active:
            return
        if call.state.get(Probe) is not None:
            raise StopForward(observation)
        if (filled := call.cached.filled(layer, call.held.layout.width)) is not None:
            observation = observation.first_keys(filled)
        reads = layer + 1 in self.before and call.cuts_at(layer + 1)
        if reads or call.state.get(Decides) == Decides(layer + 1):
            call.state.put(Seen(before=observation))
