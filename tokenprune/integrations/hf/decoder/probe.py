# SPDX-License-Identifier: Apache-2.0
"""See the attention of a decoder layer before it runs: for methods that cut at its input by what it attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.shared.observation import Observation


@dataclass(frozen=True)
class Probe:
    """Stands in a call's state while a layer is run only to see its queries and keys."""

    layer: int


class StopForward(Exception):
    """Ends the run of a layer of which only the attention's queries and keys are wanted; whoever observes the layer
    raises it while a `Probe` is under way."""

    def __init__(self, observation: Observation) -> None:
        super().__init__("a layer was run only to see its queries and keys")
        self.observation = observation


def probe_layer(call: Call, adapter: Adapter, layer: int, args: tuple, kwargs: dict[str, Any]) -> Observation:
    """Return what the attention of `layer` would see of the tokens that arrive at it, if none were cut.

    The layer runs until its attention function is called, so its own norms, projections and rotary embedding apply,
    whatever the family calls them; the cache is left out, and nothing behind is computed.
    """
    cached, width = call.cached, call.held.layout.width
    shared = adapter.key_count(layer, kwargs)
    keys = None if layer in call.maskless else cached.known_span(layer, width, shared)
    args, kwargs = call.group(layer).arguments(layer, args, kwargs, adapter, keys)
    observation = attention_of(call, adapter, layer, args, kwargs)
    if (past := cached.past_keys(layer, width, adapter.cached_keys)) is not None:
        past = past.to(observation.key.device)
        observation.key = torch.cat([past, observation.key], dim=2)
    return observation


def attention_of(call: Call, adapter: Adapter, layer: int, args: tuple, kwargs: dict[str, Any]) -> Observation:
    """Return what the attention of `layer`, called with `args` and `kwargs`, would see of this call's tokens.

    Raises UnsupportedSetupError for a layer that calls no attention function.
    """
    kwargs = {name: None if value is call.cached.cache else value for name, value in kwargs.items()}
    call.state.put(Probe(layer))
    try:
        with torch.no_grad():
            adapter.decoder.layers[layer].forward(*args, **kwargs)  # not a call: that would enter our own hooks
    except StopForward as seen:
        return seen.observation
    finally:
        call.state.pop(Probe)
    raise UnsupportedSetupError(f"decoder layer {layer} ran without calling its attention function")
