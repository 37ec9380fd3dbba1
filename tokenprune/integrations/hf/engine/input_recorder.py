# SPDX-License-Identifier: Apache-2.0
"""Record the decoder's entry, and the arguments of the layer before a cut, for methods that read them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.engine.layer_attention import LayerAttention
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Observations, Part, PerCall
from tokenprune.integrations.shared.attachable import get_hidden_states
from tokenprune.kernels.observation import Observation
from tokenprune.selection.method import Method
from tokenprune.selection.observable import ObservedAt, Recorder
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.segments import LayerInput

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.integrations.hf.forward.plan import Step
    from tokenprune.integrations.hf.forward.token_state import Layout


class InputRecorder(Part):
    """Records values that later cuts read.

    Args:
        adapter: Adapter of the model.
        steps: The cuts, by layer.
        attention: The part that observes the layers before the cuts.
    """

    def __init__(self, adapter: Adapter, steps: Mapping[int, Step], attention: LayerAttention) -> None:
        super().__init__()
        self.adapter, self.steps, self.attention = adapter, steps, attention
        self._entry: PerCall[tuple[Tensor, Layout]] = PerCall()
        self._next: PerCall[Observations] = PerCall()  # of the next cut
        self.entry = {layer for layer in self._find_readers(ObservedAt.ENTRY) if layer}

    def _find_readers(self, *where: ObservedAt) -> list[int]:
        """Return the layers whose cuts read an observable of `where`."""
        return sorted(layer for layer, step in self.steps.items() if select_observables(step.method.needs, *where))

    def _attach(self) -> None:
        for layer, step in self.steps.items():
            for observable in select_observables(step.method.needs, ObservedAt.OWN):
                recorder = observable.attach(self.adapter, layer)
                for index, module in enumerate(recorder.modules):
                    record = partial(self._record, layer, observable.name, recorder, index)
                    self.hook_in_call(module.register_forward_hook, record, with_kwargs=True)

    def before_cut(self, call: Call, step: Step, observed: Observations, args: tuple, kwargs: dict[str, Any]) -> None:
        if not call.cuts_at(step.layer):
            return
        if (kept := self._next.pop(call, None)) is not None:
            observed.update(kept)
        if (entry := self._entry.get(call)) is not None:
            observed[ObservedAt.ENTRY] = entry
        if step.layer >= max(self.entry & call.cuts, default=0):
            self._entry.pop(call, None)

    def after_cut(self, call: Call, layer: int, hidden: Tensor) -> None:
        if layer == 0 and self.entry & call.cuts:
            self._entry[call] = hidden, call.state.layout

    def on_layer(self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        if call.cuts_at(layer + 1):
            self._keep(call, self.steps[layer + 1].method, layer, args, kwargs)

    @torch.no_grad()
    def _record(
        self, layer: int, name: str, recorder: Recorder, index: int,
        module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any,
    ) -> None:  # fmt: skip
        call = self.current()
        if call is not None and call.active and call.cuts_at(layer):
            recorded = self._next.setdefault(call, {}).setdefault(ObservedAt.OWN, {})
            recorded.setdefault(name, [None] * len(recorder.modules))[index] = recorder.read(args, kwargs, output)

    def _keep(self, call: Call, method: Method, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record the arguments of `layer` that `method`, which cuts after it, reads."""
        needed = select_observables(method.needs, ObservedAt.INPUT_BEFORE, ObservedAt.UNROTATED)
        if not needed:
            return
        adapter = self.adapter
        hidden = adapter.get_method_states(call.state.extras, layer, adapter.flatten(get_hidden_states(args, kwargs)))
        rotation = find_rotation(args, kwargs)
        rotary = [observable.name for observable in needed if observable.rotary]
        if rotation is None and rotary:
            raise UnsupportedSetupError(
                f"{method.name} reads {', '.join(rotary)}, and decoder layer {layer} of {adapter.config.model_type!r} "
                "gets no rotary positions. Use a method that does not need them."
            )
        batch = len(hidden)
        expanded = rotation and (rotation[0].expand(batch, -1, -1), rotation[1].expand(batch, -1, -1))
        kept = self._next.setdefault(call, {})
        kept[ObservedAt.INPUT_BEFORE] = LayerInput(hidden, expanded)
        if rotation is not None and any(observable.where is ObservedAt.UNROTATED for observable in needed):
            kept[ObservedAt.UNROTATED] = self._unrotated(call, layer, args, kwargs, rotation)

    def _unrotated(
        self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any], rotation: tuple[Tensor, Tensor]
    ) -> Observation:
        """Return the inputs of the attention of `layer` before rotary embedding.

        The layer runs with angles of 0 until it calls its attention function, so its own norms and projections apply.
        """
        identity = (torch.ones_like(rotation[0]), torch.zeros_like(rotation[1]))
        if "position_embeddings" in kwargs:
            kwargs = kwargs | {"position_embeddings": identity}
        args = tuple(identity if isinstance(argument, tuple) and len(argument) == 2 else argument for argument in args)
        observation = self.attention.observe_layer(call, layer, args, kwargs)
        if (
            observation.mask is not None
            and (num_filled := call.cached.count_filled(layer, call.state.layout.width)) is not None
        ):
            observation.mask = observation.mask[..., :num_filled]
        if observation.mask is not None:  # without the keys of earlier turns
            observation.mask = observation.mask[..., -observation.key.shape[2] :]
        return observation


def find_rotation(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines among a layer's arguments, shape (batch or 1, width, channels), or None."""
    rotation = kwargs.get("position_embeddings")
    if rotation is None:
        rotation = next((part for part in args if isinstance(part, tuple) and len(part) == 2), None)
    is_rotation = isinstance(rotation, tuple) and all(isinstance(part, Tensor) and part.ndim == 3 for part in rotation)
    return rotation if is_rotation else None
