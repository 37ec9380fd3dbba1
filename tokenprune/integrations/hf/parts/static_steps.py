# SPDX-License-Identifier: Apache-2.0
"""Steps of decoding with a reduced static cache: only masks differ, so that a step stays in a compiled graph."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tokenprune.integrations.hf.cache.static_cache import ReducedStaticMixin, begin_turn, end_turn, step_mask
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.shared.attachable import hidden_states


class StaticSteps(Part):
    """Hands each decoder layer the mask of its own slots in a step that begins no call."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.decoder = adapter.decoder

    def _attach(self) -> None:
        for index, layer in enumerate(self.decoder.layers):
            # Not eagerly: torch.compile keeps the step in one graph.
            self.hook(layer.register_forward_pre_hook, partial(_enter_layer, index), eager=False, with_kwargs=True)

    def skips(self, arguments: dict[str, Any]) -> bool:
        return begin_turn(arguments)

    def after_call(self, call: Call) -> None:
        end_turn(call.arguments.get("past_key_values"))


def _enter_layer(index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, ReducedStaticMixin) or cache.tokenprune_reduction.in_turn:
        return None
    mask = step_mask(index, kwargs, hidden_states(args, kwargs).shape[-2])
    return args, kwargs | {"attention_mask": mask}
