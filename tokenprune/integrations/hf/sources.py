# SPDX-License-Identifier: Apache-2.0
"""What a method may see of a call: everything behind a `VisualTokens`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.call import Call
from tokenprune.integrations.hf.carry import Carry
from tokenprune.integrations.hf.encoder_attention import EncodedTokens
from tokenprune.integrations.hf.observe import Observation, Seen
from tokenprune.kernels.compact import partition
from tokenprune.tokens import Patches, Segments, require


@dataclass
class Sources:
    """Backs a `VisualTokens`: everything a method may read, computed when it asks."""

    call: Call
    hidden: Tensor
    adapter: Adapter
    carry: Carry

    def slots(self, position: Tensor, segments: Segments) -> Tensor:
        """long `[S, N]`: the slots of the current layout where the tokens at `position` are."""
        return self.call.layout.inverse[segments.row_index, position].clamp(min=0)

    def gather(self, what: str, position: Tensor, segments: Segments) -> Tensor:
        values = self.hidden if what == "hidden" else self.observation(what).keys(self.call.layout.width)
        values = values.to(self.hidden.device)
        return values[segments.row_index, self.slots(position, segments)]

    def observation(self, what: str) -> Observation:
        return require(self._seen.before, what)

    @property
    def _seen(self) -> Seen:
        return self.call.state.get(Seen) or Seen()

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.adapter.norm(hidden)

    def attention(self, kind: str) -> Tensor:
        """float32 `[B, H, W]`: attention over the slots of the current layout."""
        seen = require(self._seen.behind if kind == "next_row" else self._seen.before, f"{kind}_attention")
        width = self.call.layout.width
        if kind in ("last_row", "next_row"):
            return seen.rows(self.last_slot())[:, :, 0, -width:]
        padding = self._padding()
        valid = torch.ones(self.hidden.shape[:2], dtype=torch.bool, device=self.hidden.device)
        if padding is not None:
            valid = ~padding.gather(1, self.call.layout.index)
        return seen.received(valid if self.call.layout.valid is None else valid & self.call.layout.valid)

    @cached_property
    def encoded(self) -> EncodedTokens:
        return EncodedTokens(self.call, self.hidden.device)

    def encoder_attention(self, layer: int | float, segments: Segments) -> Tensor:
        return self.encoded.attention(layer, segments)

    def patches(self, segments: Segments) -> Patches:
        return self.encoded.patches(segments)

    def text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        """Positions (long `[S, M]`) and mask of the text tokens behind each segment."""
        text = ~self.call.visual(self.hidden.device)
        padding = self._padding()
        if padding is not None:
            text = text & ~padding
        text = text[segments.row_index.squeeze(1)]
        last = segments.position.masked_fill(~segments.mask, -1).amax(1, keepdim=True)
        behind = text & (torch.arange(text.shape[1], device=text.device) > last)
        # As many as the host can tell: all text behind the first placeholder of a row.
        visual = self.call.host.visual
        width = max(1, int(((visual.cumsum(1) > 0) & ~visual).sum(1).max()))
        order = partition(behind)[:, :width]
        mask = behind.gather(1, order)
        # Removed visual tokens have no slot; point the padding at a token that is certainly there.
        return torch.where(mask, order, segments.position[:, :1]), mask

    def _padding(self) -> Tensor | None:
        padding = self.call.padding(self.call.layout.length)
        return None if padding is None else padding.to(self.hidden.device)

    def last_slot(self) -> Tensor:
        """long `[B, 1]`: the slot of each row's last token that is not padding."""
        layout, padding = self.call.layout, self._padding()
        if padding is None:
            return layout.index.new_full((layout.index.shape[0], 1), layout.width - 1)
        last = (~padding).long().cumsum(1).argmax(1, keepdim=True)
        return layout.inverse.gather(1, last)
