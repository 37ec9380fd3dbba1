# SPDX-License-Identifier: Apache-2.0
"""Cut what a decoder is handed at its entry: embeddings, positions and masks (PRE_LLM, and merges in the tower)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf import masks
from tokenprune.integrations.hf.adapters.base import STATEFUL, Adapter
from tokenprune.integrations.hf.call import Call
from tokenprune.integrations.hf.cutting import Step, apply, cut
from tokenprune.integrations.hf.layout import gather_tokens


def cut_entry(call: Call, kwargs: dict[str, Any], step: Step | None, adapter: Adapter) -> None:
    """Take what was merged in the tower, and what `step` leaves out, out of the decoder's arguments."""
    embeds, mask, positions = kwargs["inputs_embeds"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    config, length = adapter.text_config, embeds.shape[1]
    if positions is None:
        # The decoder would count the remaining tokens; they keep the positions of the full prompt.
        positions = adapter.positions(kwargs, call.past)
    prepared = isinstance(mask, dict) or (mask is not None and mask.ndim == 4)
    if not prepared and (call.past or masks.sliding_layers(config)):
        mask = adapter.masks(embeds, mask, call.cache)
        prepared = True

    if call.merged is not None:
        embeds = apply(call, call.merged.step, call.merged.selection, embeds, adapter)
    if 0 in call.cuts:
        embeds = cut(call, step, embeds, adapter)
    kwargs["inputs_embeds"] = embeds
    layout = call.layout
    for name, dim in adapter.entry_tokens.items():
        if kwargs.get(name) is not None:
            kwargs[name] = gather_tokens(kwargs[name], layout.index, dim)
    kwargs["position_ids"] = gather_tokens(positions, layout.index, -1)
    if call.blocks is not None and call.blocks.everywhere:
        kwargs["attention_mask"] = call.blocks.mask(embeds)
    elif prepared:
        call.columns.clear()
        call.open_group(0)
        columns = call.columns.pop()[1]
        kinds = mask if isinstance(mask, dict) else {"": mask}
        attention = adapter.attention
        made = {kind: _prepared_mask(call, kind, one, columns, attention, embeds) for kind, one in kinds.items()}
        kwargs["attention_mask"] = made if isinstance(mask, dict) else made[""]
    elif mask is not None:
        mask = mask[:, -length:].gather(1, layout.index)
        kwargs["attention_mask"] = mask if layout.valid is None else mask.masked_fill(~layout.valid, 0)
    elif layout.valid is not None:
        kwargs["attention_mask"] = layout.valid.long()
    elif call.cache is None:
        # Without mask and cache transformers takes gaps in position_ids for borders of packed sequences.
        kwargs["attention_mask"] = torch.ones_like(layout.index)


def _prepared_mask(call: Call, kind: str, mask: Any, columns: Tensor, attention: str, embeds: Tensor) -> Any:
    if kind in STATEFUL:
        valid = call.layout.valid
        if mask is None:
            return valid
        mask = mask.gather(1, call.layout.index)
        return mask if valid is None else mask.masked_fill(~valid, 0)
    if mask is not None:
        return masks.gather_mask(mask, call.layout.index, columns)
    if call.layout.valid is None:
        return None
    return masks.causal_mask(columns >= 0, call.layout.width, attention, embeds.dtype)
