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
from tokenprune.integrations.hf.decoder.pruning import apply, choose
from tokenprune.integrations.hf.families.base import STATEFUL, Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.layer_inputs import LayerInputs
from tokenprune.integrations.hf.forward.observed import Observed
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.hf.sequence.layout import Layout, gather_tokens
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions, mask_functions
from tokenprune.integrations.hf.sequence.masks import sliding_layers


def mask_functions_of(call: Call, inputs: DecoderInputs, adapter: Adapter) -> MaskFunctions | None:
    """Return what the decoder will make its masks of, if it is to make them itself; None where the caller, or the base
    model, made them, where a static cache has slots for tokens to come, and where attention takes no masks of pairs."""
    embeds, mask = inputs.embeds, inputs.mask
    if call.cached.capacity is not None or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return None
    # Padding leaves with the first cut, but a visual token that the caller masks may stay.
    real_behind_cut = bool((call.host.real | ~call.host.visual).all())
    # Of embeddings masks take no more than their number and their type.
    make = partial(adapter.masks, embeds.new_empty(()).expand(*embeds.shape[:2], 1), mask, None)
    return mask_functions(make, adapter.text_config, call.past + embeds.shape[1], real_behind_cut)


def cut_entry(
    call: Call, inputs: DecoderInputs, step: Step | None, functions: MaskFunctions | None, adapter: Adapter
) -> DecoderInputs:
    """Return the decoder's inputs without the tokens that were merged in the tower, and those that `step` drops.

    functions: see `mask_functions_of`.
    """
    embeds, positions, arrived = inputs.embeds, inputs.positions, call.group(0, functions)
    if positions is None:
        # The decoder would count the remaining tokens; they keep the positions of the full prompt.
        positions = adapter.positions(inputs.arguments(), call.past)
    mask, made = _whole_mask(call, inputs, functions, adapter)
    if call.merged is not None:
        embeds = apply(call, call.merged.step, call.merged.selection, embeds, adapter)
    if step is not None and call.cuts_at(0):
        embeds = apply(call, step, choose(call, step, Observed(), embeds, adapter), embeds, adapter)
    index = call.held.layout.index
    extras = dict(inputs.extras)
    for name, dim in adapter.family.entry_tokens.items():
        if extras.get(name) is not None:
            extras[name] = gather_tokens(extras[name], index, dim)
    if compat.COUNTS_OUTSIDE:
        extras.pop("cache_position", None)  # the decoder counts what is left
    if call.maskless.issuperset(range(len(adapter.decoder.layers))):
        mask = torch.ones_like(index)  # so that the decoder makes no dense mask that no layer reads
    elif made:
        mask = _mask_of_pairs(call, mask, arrived, embeds.dtype, adapter)
    else:
        mask = _mask_of_tokens(mask, call.held.layout, inputs.embeds.shape[1])
    if mask is None and call.cached.cache is None:
        # Without mask and cache transformers takes gaps in position_ids for borders of packed sequences.
        mask = torch.ones_like(index)
    return replace(inputs, embeds=embeds, mask=mask, positions=gather_tokens(positions, index, -1), extras=extras)


def _whole_mask(
    call: Call, inputs: DecoderInputs, functions: MaskFunctions | None, adapter: Adapter
) -> tuple[Any, bool]:
    """Return the mask of the whole sequence, and True if it is what layers take: as it came, or made here because a
    mask of tokens does not say enough. Else it is of tokens."""
    mask, cached = inputs.mask, call.cached
    if isinstance(mask, dict) or (mask is not None and mask.ndim == 4):
        return mask, True
    if not (cached.past or cached.capacity is not None or sliding_layers(adapter.text_config)):
        return mask, False
    return adapter.masks(inputs.embeds, mask, cached.cache) if functions is None else functions.made, True


def _mask_of_tokens(mask: Tensor | None, layout: Layout, length: int) -> Tensor | None:
    """Return the mask of tokens, `[B, W]`, of those that are left. mask: before; length: tokens before."""
    if mask is None:
        return None if layout.valid is None else layout.valid.long()
    return masks.gather_token_mask(mask[:, -length:], layout.index, layout.valid)


def _mask_of_pairs(call: Call, mask: Any, arrived: LayerInputs, dtype: torch.dtype, adapter: Adapter) -> Any:
    """Return the mask that layers take, or those by kind of layer, of the tokens that are left. mask: of the whole
    sequence, whose group is `arrived`."""
    group = replace(call.group(0, arrived.functions), start=arrived)
    keys = KeySpan(0, None, group.columns.shape[1])

    def remaining(kind: str, mask: Any) -> Any:
        if kind in STATEFUL:
            return group.state_mask(mask)
        return group.attention_mask(mask, keys, adapter, dtype)

    return {kind: remaining(kind, one) for kind, one in mask.items()} if isinstance(mask, dict) else remaining("", mask)
