# SPDX-License-Identifier: Apache-2.0
"""Cut what a decoder is handed at its entry: embeddings, positions and masks (PRE_LLM, and merges in the tower)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import KeySpan
from tokenprune.integrations.hf.decoder.pruning import apply, cut
from tokenprune.integrations.hf.families.base import STATEFUL, Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.plan import Merged, Step
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.hf.sequence.layout import gather_tokens
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions, mask_functions


def mask_functions_of(call: Call, kwargs: dict[str, Any], adapter: Adapter) -> MaskFunctions | None:
    """Return what the decoder will make its masks of, if it is to make them itself; None where the caller, or the base
    model, made them, where a static cache has slots for tokens to come, and where attention takes no masks of pairs."""
    embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
    if call.cached.capacity is not None or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return None
    # Padding leaves with the first cut, but a visual token that the caller masks may stay.
    real_behind_cut = bool((call.host.real | ~call.host.visual).all())
    # Of embeddings masks take no more than their number and their type.
    make = partial(adapter.masks, embeds.new_empty(()).expand(*embeds.shape[:2], 1), mask, None)
    return mask_functions(make, adapter.text_config, call.past + embeds.shape[1], real_behind_cut)


def cut_entry(call: Call, kwargs: dict[str, Any], step: Step | None, adapter: Adapter) -> None:
    """Take what was merged in the tower, and what `step` leaves out, out of the decoder's arguments."""
    embeds, mask, positions = kwargs["inputs_embeds"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    config, length, arrived = adapter.text_config, embeds.shape[1], call.group(0)
    if positions is None:
        # The decoder would count the remaining tokens; they keep the positions of the full prompt.
        positions = adapter.positions(kwargs, call.past)
    prepared = isinstance(mask, dict) or (mask is not None and mask.ndim == 4)
    if not prepared and (call.past or call.cached.capacity is not None or masks.sliding_layers(config)):
        functions = call.state.get(MaskFunctions)
        mask = adapter.masks(embeds, mask, call.cached.cache) if functions is None else functions.made
        prepared = True

    if (merged := call.state.get(Merged)) is not None:
        embeds = apply(call, merged.step, merged.selection, embeds, adapter)
    if call.cuts_at(0):
        embeds = cut(call, step, embeds, adapter)
    kwargs["inputs_embeds"] = embeds
    layout = call.layout
    for name, dim in adapter.entry_tokens.items():
        if kwargs.get(name) is not None:
            kwargs[name] = gather_tokens(kwargs[name], layout.index, dim)
    kwargs["position_ids"] = gather_tokens(positions, layout.index, -1)
    if compat.COUNTS_OUTSIDE:
        kwargs.pop("cache_position", None)  # the decoder counts what is left
    if call.maskless.issuperset(range(len(adapter.decoder.layers))):
        # So that the decoder makes no dense mask that no layer reads.
        kwargs["attention_mask"] = torch.ones_like(layout.index)
    elif prepared:
        inputs = replace(call.group(0), start=arrived)
        keys = KeySpan(0, None, inputs.columns.shape[1])

        def remaining(kind: str, mask: Any) -> Any:
            if kind in STATEFUL:
                return inputs.state_mask(mask)
            return inputs.attention_mask(mask, keys, adapter.attention, embeds.dtype)

        made = {kind: remaining(kind, one) for kind, one in mask.items()} if isinstance(mask, dict) else None
        kwargs["attention_mask"] = remaining("", mask) if made is None else made
    elif mask is not None:
        kwargs["attention_mask"] = masks.gather_token_mask(mask[:, -length:], layout.index, layout.valid)
    elif layout.valid is not None:
        kwargs["attention_mask"] = layout.valid.long()
    if kwargs.get("attention_mask") is None and call.cached.cache is None:
        # Without mask and cache transformers takes gaps in position_ids for borders of packed sequences.
        kwargs["attention_mask"] = torch.ones_like(layout.index)
