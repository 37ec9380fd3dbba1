# SPDX-License-Identifier: Apache-2.0
"""Keep what methods read of the decoder's entry, and of what the layer before a cut is called with."""

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
    from tokenprune.integrations.hf.sequence.layout import Layout


class KeptInputs(Part):
    """Keeps what cuts to come will read. steps: the cuts, by layer. attention: observes the layers before them."""

    def __init__(self, adapter: Adapter, steps: Mapping[int, Step], attention: LayerAttention) -> None:
        super().__init__()
        self.adapter, self.steps, self.attention = adapter, steps, attention
        self._entry: PerCall[tuple[Tensor, Layout]] = PerCall()
        self._next: PerCall[Observations] = PerCall()  # of the next cut
        self.entry = {layer for layer in self._readers(ObservedAt.ENTRY) if layer}

    def _readers(self, *where: ObservedAt) -> list[int]:
        """Return the layers whose cuts read what is observed at `where`."""
        return sorted(layer for layer, step in self.steps.items() if select_observables(step.method.needs, *where))

    def _attach(self) -> None:
        for layer, step in self.steps.items():
            for one in select_observables(step.method.needs, ObservedAt.OWN):
                recorder = one.attach(self.adapter, layer)
                for number, module in enumerate(recorder.modules):
                    record = partial(self._record, layer, one.name, recorder, number)
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
        self, layer: int, name: str, recorder: Recorder, number: int,
        module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any,
    ) -> None:  # fmt: skip
        call = self.current()
        if call is not None and call.active and call.cuts_at(layer):
            recorded = self._next.setdefault(call, {}).setdefault(ObservedAt.OWN, {})
            recorded.setdefault(name, [None] * len(recorder.modules))[number] = recorder.read(args, kwargs, output)

    def _keep(self, call: Call, method: Method, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep what `layer` is called with in the current layout, as far as `method`, which cuts after it, reads it."""
        needed = select_observables(method.needs, ObservedAt.INPUT_BEFORE, ObservedAt.UNROTATED)
        if not needed:
            return
        adapter = self.adapter
        hidden = adapter.seen(call.state.extras, layer, adapter.flatten(get_hidden_states(args, kwargs)))
        rotation = rotation_of(args, kwargs)
        if rotation is None and any(one.rotary for one in needed):
            raise UnsupportedSetupError(
                f"{method.name} reads {', '.join(one.name for one in needed if one.rotary)}, and decoder layer {layer} "
                f"of {adapter.config.model_type!r} gets no rotary positions; use a method that does not need them"
            )
        batch = len(hidden)
        turned = rotation and (rotation[0].expand(batch, -1, -1), rotation[1].expand(batch, -1, -1))
        kept = self._next.setdefault(call, {})
        kept[ObservedAt.INPUT_BEFORE] = LayerInput(hidden, turned)
        if rotation is not None and any(one.where is ObservedAt.UNROTATED for one in needed):
            kept[ObservedAt.UNROTATED] = self._unrotated(call, layer, args, kwargs, rotation)

    def _unrotated(
        self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any], rotation: tuple[Tensor, Tensor]
    ) -> Observation:
        """Return what the attention of `layer` would see of this call's tokens if it turned nothing.

        The layer runs with angles of 0 until its attention function is called, so its own norms and projections apply,
        and whatever it turns against what, in whichever order, and by which factor.
        """
        still = (torch.ones_like(rotation[0]), torch.zeros_like(rotation[1]))
        if "position_embeddings" in kwargs:
            kwargs = kwargs | {"position_embeddings": still}
        args = tuple(still if isinstance(one, tuple) and len(one) == 2 else one for one in args)
        observation = self.attention.attention_of(call, layer, args, kwargs)
        if observation.mask is not None and (filled := call.cached.filled(layer, call.state.layout.width)) is not None:
            observation.mask = observation.mask[..., :filled]
        if observation.mask is not None:  # keys of earlier turns are not among these
            observation.mask = observation.mask[..., -observation.key.shape[2] :]
        return observation


def rotation_of(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines, `[B or 1, W, R]`, among a layer's arguments; None if it gets none."""
    found = kwargs.get("position_embeddings")
    if found is None:
        found = next((one for one in args if isinstance(one, tuple) and len(one) == 2), None)
    whole = isinstance(found, tuple) and all(isinstance(one, Tensor) and one.ndim == 3 for one in found)
    return found if whole else None
