# SPDX-License-Identifier: Apache-2.0
"""Cuts: a method selects tokens, and the others leave the decoder's input (PRE_LLM, merges in the tower) or its hidden
states (IN_LLM)."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import KeySpan
from tokenprune.integrations.hf.engine.method_inputs import DecoderSource
from tokenprune.integrations.hf.families.base import STATEFUL, Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.layer_inputs import LayerInputs
from tokenprune.integrations.hf.forward.part import Observations
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.forward.token_state import StageMemory
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.hf.sequence.layout import gather_tokens
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.apply import merge_tokens, validate_selection
from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.row_ends import keep_row_ends
from tokenprune.selection.tokens import VisualTokens


def select_tokens(call: Call, step: Step, observed: Observations, hidden: Tensor, adapter: Adapter) -> Selection:
    """Return the selection of the method of `step`. hidden: arrives at the cut, shape (batch, width, channels)."""
    state = call.state.to(hidden.device)
    plan, segments, memories = call.plan, state.segments, state.memories
    assert plan is not None  # only planned cuts are made
    # An earlier method may have kept another number of tokens than its budget, so the counts are planned again.
    arrived = plan.counts_of(segments)
    keep = [kept for kept, count in zip(plan.stage(step, arrived).kept, arrived, strict=True) if count]
    if step.owner not in memories:
        memories[step.owner] = StageMemory()
    seen = adapter.seen(state.extras, step.layer, hidden)
    source = DecoderSource(call, state, seen, adapter, step.method.needs, memories[step.owner], observed)
    tokens = VisualTokens(segments, keep, source)
    method = cast(Pruner, step.method)
    return torch.no_grad()(method.select)(tokens) if torch.is_grad_enabled() else method.select(tokens)


def apply_selection(call: Call, step: Step, selection: Selection, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Drop the tokens that `selection` does not keep, and replace `call.state` by the state after the cut.

    Args:
        hidden: Hidden states that arrive at the cut, shape (batch, width, channels).

    Returns:
        Hidden states of the kept tokens, in the layout of the new state.
    """
    state = call.state.to(hidden.device)
    segments = state.segments
    keep, num_kept = validate_selection(selection, segments, step.method)
    if num_kept == segments.counts:
        return hidden  # padding leaves with the first cut that drops a visual token
    if ends := call.prompt.visual_ends:
        selection = keep_row_ends(selection, segments, num_kept, ends)
        keep = selection.keep & segments.mask
    flat_indices, merge = state.flat_indices(), None
    if selection.assign is not None:
        merge = partial(merge_tokens, selection=selection, segments=segments, places=flat_indices)
        hidden = merge(hidden)
    padding = call.prompt.padding_to_drop if state.layout.valid is None else None
    call.state, slots = state.cut(keep, num_kept, flat_indices, padding, partial(adapter.cut_extras, merge=merge))
    call.trace.add_cut(step, selection, segments, num_kept, call.state.layout)
    return gather_tokens(hidden, slots, 1)


# -- the decoder's entry


def prepare(call: Call, inputs: DecoderInputs, adapter: Adapter) -> tuple[DecoderInputs, MaskFunctions | None]:
    """Return the inputs of a call with cuts, and its mask functions. A missing cache is created."""
    functions, wanted = _mask_functions(call, inputs, adapter), inputs.extras.get("use_cache")
    if inputs.cache is None and (adapter.text_config.use_cache if wanted is None else wanted):
        cache = DynamicCache(config=adapter.text_config)
        inputs = DecoderInputs(inputs.embeds, inputs.mask, inputs.positions, cache, inputs.extras, inputs.given)
        call.take_cache(cache)
    return inputs, functions


def _mask_functions(call: Call, inputs: DecoderInputs, adapter: Adapter) -> MaskFunctions | None:
    """Return the functions from which the decoder builds its masks.

    None if the masks exist already, if a static cache has slots for later tokens, or if attention takes no masks of
    query-key pairs.
    """
    embeds, mask = inputs.embeds, inputs.mask
    if call.cached.capacity is not None or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return None
    shape, dtype, device, config = embeds.shape[:2], embeds.dtype, embeds.device, adapter.text_config

    def functions(mask: Tensor | None) -> MaskFunctions:
        def make(config: Any) -> Any:
            # Masks depend only on the shape and the dtype of the embeddings.
            return adapter.masks(torch.empty((), dtype=dtype, device=device).expand(*shape, 1), mask, None, config)

        return MaskFunctions(make, config, call.past + shape[1], call.prompt.no_padding_after_cut)

    if call.past or not call.prompt.placeholders or adapter.stateful or not (mask is None or mask.shape == shape):
        return functions(mask)
    # Prompts of this shape share the functions. They use the host's copy, because the caller may change its mask.
    real = partial(to_device, call.prompt.is_real, device)
    key = ("masks", dtype, mask is None, config._attn_implementation)
    return call.state.segments.cache.get(key, lambda: functions(None if mask is None else real()))


def cut_entry(call: Call, inputs: DecoderInputs, step: Step | None, adapter: Adapter) -> DecoderInputs:
    """Apply the merge of a vision tower and the cut of `step`, and return the decoder's inputs for the kept tokens.

    The first entry of `call.groups` is replaced by inputs for the kept tokens.
    """
    embeds, positions = inputs.embeds, inputs.positions
    mask, made = _whole_mask(call, inputs, adapter)
    if positions is None:
        positions = adapter.positions(inputs.mask, call.past)
    if call.merged is not None:
        embeds = apply_selection(call, *call.merged, embeds, adapter)
    if step is not None and call.cuts_at(0):
        selection = select_tokens(call, step, {}, embeds, adapter)
        embeds = apply_selection(call, step, selection, embeds, adapter)
    layout, index = call.state.layout, call.state.layout.index
    functions, group = call.groups[0].functions, call.group(0) if made else None
    call.groups.clear()
    call.groups.append(call.group(0, functions))
    if layout.whole and not call.maskless:  # a method that finds the count itself kept all: the decoder makes its masks
        return DecoderInputs(embeds, inputs.mask, inputs.positions, inputs.cache, inputs.extras, inputs.given)
    extras = dict(inputs.extras)
    for name, dim in adapter.family.entry_tokens.items():
        if extras.get(name) is not None:
            extras[name] = gather_tokens(extras[name], index, dim)
    if compat.COUNTS_OUTSIDE:
        extras.pop("cache_position", None)  # the decoder counts what is left
    if call.maskless.issuperset(range(len(adapter.decoder.layers))):
        mask = torch.ones_like(index)  # so that the decoder makes no dense mask that no layer reads
    elif group is not None:
        mask = _mask_of_pairs(group, mask, embeds.dtype, adapter)
    elif mask is not None:
        mask = masks.gather_token_mask(mask[:, -inputs.embeds.shape[1] :], index, layout.valid)
    elif layout.valid is not None:
        mask = layout.valid.long()
    if mask is None and call.cached.cache is None:
        # Without mask and cache transformers takes gaps in position_ids for borders of packed sequences.
        mask = torch.ones_like(index)
    # The decoder would count the remaining tokens; they keep the positions of the full prompt.
    positions = index + call.past if positions is None else gather_tokens(positions, index, -1)
    return DecoderInputs(embeds, mask, positions, inputs.cache, extras, inputs.given)


def _whole_mask(call: Call, inputs: DecoderInputs, adapter: Adapter) -> tuple[Any, bool]:
    """Return the mask of the whole sequence, and True if it is what layers take: as it came, or made here because a
    mask of tokens does not say enough. Else it is of tokens."""
    mask, cached = inputs.mask, call.cached
    if isinstance(mask, dict) or (mask is not None and mask.ndim == 4):
        return mask, True
    if not (cached.past or cached.capacity is not None or adapter.sliding):
        return mask, False
    functions = call.groups[0].functions
    if functions is None or functions.attention is None:
        return adapter.masks(inputs.embeds, mask, cached.cache), True
    return functions.made, True


def _mask_of_pairs(group: LayerInputs, mask: Any, dtype: torch.dtype, adapter: Adapter) -> Any:
    """Return the mask that layers take, or those by kind of layer, of the tokens that are left, those of `group`. mask:
    of the whole sequence, with which the group starts."""
    keys = KeySpan(0, None, group.columns.shape[1])

    def remaining(kind: str, mask: Any) -> Any:
        if kind in STATEFUL:
            return group.state_mask(mask)
        return group.attention_mask(mask, keys, adapter, dtype)

    return {kind: remaining(kind, one) for kind, one in mask.items()} if isinstance(mask, dict) else remaining("", mask)
