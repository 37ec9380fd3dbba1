# SPDX-License-Identifier: Apache-2.0
"""The parts of a call that a method may see, for a `VisualTokens`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.part import Observations
from tokenprune.integrations.hf.forward.token_state import StageMemory, TokenState
from tokenprune.integrations.hf.towers.attention_scores import EncodedTokens
from tokenprune.kernels.compact import partition
from tokenprune.kernels.observation import Observation
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.segments import LayerInput, Patches, Segments
from tokenprune.selection.source import TokenSource


@dataclass
class DecoderSource(TokenSource):
    """Backs a `VisualTokens` in the decoder.

    state: the tokens that arrive at the cut. hidden: `[B, W, D]`, in their layout. needs: of the method. observed: the
    attention, inputs and records of the layers around the cut, as far as the method reads them.
    """

    call: Call
    state: TokenState
    hidden: Tensor
    adapter: Adapter
    needs: frozenset[str] = frozenset()
    carry: StageMemory = field(default_factory=StageMemory)
    observed: Observations = field(default_factory=dict)

    def remember(self, name: str, value: Any, per_token: bool | None) -> None:
        self.carry.remember(name, value, per_token)

    def note(self, text: str) -> None:
        if text not in self.call.notes:
            self.call.notes.append(text)

    def find_slots(self, position: Tensor, segments: Segments) -> Tensor:
        layout = self.state.layout
        return position if layout.whole else layout.inverse[segments.row_index, position].clamp(min=0)

    def gather(self, values: Tensor, position: Tensor, segments: Segments) -> Tensor:
        return super().gather(values.to(self.hidden.device), position, segments)

    def final_norm(self, hidden: Tensor) -> Tensor:
        norm = getattr(self.adapter.decoder, self.adapter.family.norm_name)
        return hidden if norm is None else norm(hidden)  # some OPT models have none

    @property
    def attention_before(self) -> Observation:
        return _shown(self.observed.get(ObservedAt.LAYER_BEFORE))

    @property
    def attention_after(self) -> Observation:
        return _shown(self.observed.get(ObservedAt.NEXT_LAYER))

    @property
    def input_before(self) -> LayerInput:
        value = self.observed.get(ObservedAt.INPUT_BEFORE)
        return super().input_before if value is None else value

    @property
    def unrotated_attention(self) -> Observation:
        return _shown(self.observed.get(ObservedAt.UNROTATED))

    def get_recorded(self, name: str) -> list[Any]:
        values = self.observed.get(ObservedAt.OWN, {}).get(name, [None])
        return super().get_recorded(name) if any(value is None for value in values) else values

    @property
    def first_layer(self) -> nn.Module:
        return self.adapter.decoder.layers[0]

    def get_embeddings(self, position: Tensor, segments: Segments) -> Tensor:
        entry = self.observed.get(ObservedAt.ENTRY)
        if entry is None:  # the cut is at the entry
            return self.gather(self.hidden, position, segments)
        embeds, layout = entry
        slots = layout.inverse.to(position.device)[segments.row_index, position].clamp(min=0)
        return embeds.to(position.device)[segments.row_index, slots]

    @cached_property
    def encoded(self) -> EncodedTokens:
        return EncodedTokens(self.call, self.hidden.device)

    def read_tower(self, key: tuple, segments: Segments) -> Tensor:
        return self.encoded.values(key, segments)

    def patches(self, segments: Segments) -> Patches:
        return self.encoded.patches(segments)

    def get_token_mask(self) -> Tensor:
        layout = self.state.layout
        real = to_device(self.call.prompt.is_real, self.hidden.device).gather(1, layout.index)
        return real if layout.valid is None else real & layout.valid

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        return segments.cache.get("text", lambda: self._text_after(segments))

    def _text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        # The same for all images of a row, as many as the host can tell: all text after the row's first placeholder.
        text, width = self.call.prompt.text_after_image
        text = to_device(text, self.hidden.device)
        order, row = partition(text)[:, :width], segments.row_index.squeeze(1)
        last = segments.position.masked_fill(~segments.mask, -1).amax(1, keepdim=True)
        order, mask = order[row], text.gather(1, order)[row] & (order[row] > last)
        # Removed visual tokens have no slot; point the padding at a token that is certainly there.
        return torch.where(mask, order, segments.position[:, :1]), mask

    def get_last_slot(self) -> Tensor:
        layout, segments = self.state.layout, self.state.segments
        device = layout.index.device
        last = segments.cache.get("last", lambda: to_device(self.call.prompt.last_index, device)[:, None])
        return last if layout.whole else layout.inverse.gather(1, last)


def _shown(observation: Observation | None) -> Observation:
    if observation is None:
        raise TokenPruneError("the decoder layer at this cut showed no attention: it was left out of this call")
    return observation
