# SPDX-License-Identifier: Apache-2.0
"""Cuts: a method selects visual tokens, and the engine drops the others.

Tokens are dropped from the decoder's inputs (PRE_LLM, merges in the tower) or from its hidden states (IN_LLM).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import KeySpan
from tokenprune.integrations.hf.families.base import STATEFUL, Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs, LayerInputs
from tokenprune.integrations.hf.forward.part import Observations
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.forward.token_state import StageMemory, TokenState, gather_token_mask, gather_tokens
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions
from tokenprune.integrations.hf.towers.attention_scores import EncodedTokens
from tokenprune.kernels.observation import Observation
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.apply import validate_selection
from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.row_ends import keep_row_ends
from tokenprune.selection.segments import LayerInput, Patches, Segments
from tokenprune.selection.source import TokenSource
from tokenprune.selection.tokens import VisualTokens


def select_tokens(call: Call, step: Step, observed: Observations, hidden: Tensor, adapter: Adapter) -> Selection:
    """Run the method of `step`. hidden: Hidden states at the cut, shape (batch, width, channels)."""
    state = call.state.to(hidden.device)
    plan, segments, memories = call.plan, state.segments, state.memories
    assert plan is not None  # only planned cuts are made
    # An earlier method may have kept fewer or more tokens than planned, so the counts are planned again.
    arrived = plan.match_counts(segments)
    keep = [kept for kept, count in zip(plan.plan_step(step, arrived).kept, arrived, strict=True) if count]
    if step.owner not in memories:
        memories[step.owner] = StageMemory()
    visible = adapter.get_method_states(state.extras, step.layer, hidden)
    source = DecoderSource(call, state, visible, adapter, step.method.needs, memories[step.owner], observed)
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
        return hidden  # padding is dropped by the first cut that drops a visual token
    if ends := call.prompt.visual_ends:
        selection = keep_row_ends(selection, segments, num_kept, ends)
        keep = selection.keep & segments.mask
    flat_indices, merge = state.flat_indices(), None
    if selection.assign is not None:
        merge = partial(selection.apply, index=flat_indices, mask=segments.mask)
        hidden = merge(hidden)
    padding = call.prompt.padding_to_drop if state.layout.valid is None else None
    call.state, slots = state.cut(keep, num_kept, flat_indices, padding, partial(adapter.cut_extras, merge=merge))
    call.trace.add_cut(step, selection, segments, num_kept, call.state.layout)
    return gather_tokens(hidden, slots, 1)


# -- the decoder's entry


def prepare(call: Call, inputs: DecoderInputs, adapter: Adapter) -> tuple[DecoderInputs, MaskFunctions | None]:
    """Return the inputs of a call with cuts, and its mask functions. A missing cache is created."""
    functions, use_cache = _mask_functions(call, inputs, adapter), inputs.extras.get("use_cache")
    if inputs.cache is None and (adapter.text_config.use_cache if use_cache is None else use_cache):
        cache = DynamicCache(config=adapter.text_config)
        inputs = DecoderInputs(inputs.embeds, inputs.mask, inputs.positions, cache, inputs.extras, inputs.names)
        call.cached.cache = cache  # an empty cache changes only this attribute of the view
    return inputs, functions


def _mask_functions(call: Call, inputs: DecoderInputs, adapter: Adapter) -> MaskFunctions | None:
    """Return the functions that build the decoder's masks.

    None if the caller passed masks of query-key pairs, or if a static cache has slots for later tokens.
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
    read_mask = partial(to_device, call.prompt.is_real, device)
    key = ("masks", dtype, mask is None, config._attn_implementation)
    return call.state.segments.cache.get(key, lambda: functions(None if mask is None else read_mask()))


def cut_entry(call: Call, inputs: DecoderInputs, step: Step | None, adapter: Adapter) -> DecoderInputs:
    """Apply the merge of a vision tower and the cut of `step`, and return the decoder's inputs for the kept tokens.

    The first entry of `call.groups` is replaced by inputs for the kept tokens.
    """
    embeds, positions = inputs.embeds, inputs.positions
    mask, is_layer_mask = _build_uncut_mask(call, inputs, adapter)
    if positions is None:
        positions = adapter.positions(inputs.mask, call.past)
    if call.merged is not None:
        embeds = apply_selection(call, *call.merged, embeds, adapter)
    if step is not None and call.cuts_at(0):
        selection = select_tokens(call, step, {}, embeds, adapter)
        embeds = apply_selection(call, step, selection, embeds, adapter)
    layout, index = call.state.layout, call.state.layout.index
    functions, group = call.groups[0].functions, call.group(0) if is_layer_mask else None
    call.groups.clear()
    call.groups.append(call.group(0, functions))
    if layout.is_uncut and not call.maskless:  # a method that chooses its own count kept all tokens
        return DecoderInputs(embeds, inputs.mask, inputs.positions, inputs.cache, inputs.extras, inputs.names)
    extras = dict(inputs.extras)
    for name, dim in adapter.family.entry_tokens.items():
        if extras.get(name) is not None:
            extras[name] = gather_tokens(extras[name], index, dim)
    if compat.NEEDS_CACHE_POSITION:
        extras.pop("cache_position", None)  # the decoder counts the kept tokens
    if call.maskless.issuperset(range(len(adapter.decoder.layers))):
        mask = torch.ones_like(index)  # the decoder then builds no dense mask, which no layer would read
    elif group is not None:
        mask = _cut_layer_mask(group, mask, embeds.dtype, adapter)
    elif mask is not None:
        mask = gather_token_mask(mask[:, -inputs.embeds.shape[1] :], index, layout.valid)
    elif layout.valid is not None:
        mask = layout.valid.long()
    if mask is None and call.cached.cache is None:
        # Without mask and cache, transformers takes gaps in position_ids for borders of packed samples.
        mask = torch.ones_like(index)
    # Kept tokens keep the positions of the full prompt. Without position_ids the decoder would number them anew.
    positions = index + call.past if positions is None else gather_tokens(positions, index, -1)
    return DecoderInputs(embeds, mask, positions, inputs.cache, extras, inputs.names)


def _build_uncut_mask(call: Call, inputs: DecoderInputs, adapter: Adapter) -> tuple[Any, bool]:
    """Return the attention mask before the cut, and True if it has the form that layers take.

    A 4-D mask and a dictionary of masks by kind of layer have this form already. A 2-D mask is converted, if possible
    to `MaskFunction`, if the model has a sliding window, or the cache holds tokens or has a fixed size. Otherwise it
    is returned unchanged, with False.
    """
    mask, cached = inputs.mask, call.cached
    if isinstance(mask, dict) or (mask is not None and mask.ndim == 4):
        return mask, True
    if not (cached.past or cached.capacity is not None or adapter.sliding):
        return mask, False
    functions = call.groups[0].functions
    if functions is None or functions.attention is None:
        return adapter.masks(inputs.embeds, mask, cached.cache), True
    return functions.built, True


def _cut_layer_mask(group: LayerInputs, mask: Any, dtype: torch.dtype, adapter: Adapter) -> Any:
    """Return the attention mask after the cut, as a tensor or, like `mask`, as a dictionary by kind of layer.

    Args:
        group: Inputs of the layers after the cut.
        mask: The mask before the cut, in the form that layers take.
    """
    keys = KeySpan(0, None, group.columns.shape[1])

    def cut_mask(kind: str, mask: Any) -> Any:
        if kind in STATEFUL:
            return group.state_mask(mask)
        return group.attention_mask(mask, keys, adapter, dtype)

    return {kind: cut_mask(kind, part) for kind, part in mask.items()} if isinstance(mask, dict) else cut_mask("", mask)


# -- inputs of methods


@dataclass
class DecoderSource(TokenSource):
    """Values that a `VisualTokens` reads in the decoder.

    Attributes:
        call: The current call.
        state: Tokens that reach the cut.
        hidden: Hidden states in the layout of `state`, shape (batch, width, channels).
        needs: Observables that the method declares.
        carry: Memory of the method between its stages.
        observed: Attention, inputs and records of the layers around the cut, as far as the method reads them.
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
        state = self.state
        if state.layout.is_uncut:
            return position
        if position is state.segments.position:
            return state.visual_slots
        return state.layout.inverse[segments.row_index, position].clamp(min=0)

    def gather(self, values: Tensor, position: Tensor, segments: Segments) -> Tensor:
        return super().gather(values.to(self.hidden.device), position, segments)

    def final_norm(self, hidden: Tensor) -> Tensor:
        norm = getattr(self.adapter.decoder, self.adapter.family.norm_name)
        return hidden if norm is None else norm(hidden)  # some OPT models have none

    @property
    def attention_before(self) -> Observation:
        return _require(self.observed.get(ObservedAt.LAYER_BEFORE))

    @property
    def attention_after(self) -> Observation:
        return _require(self.observed.get(ObservedAt.NEXT_LAYER))

    @property
    def input_before(self) -> LayerInput:
        value = self.observed.get(ObservedAt.INPUT_BEFORE)
        return super().input_before if value is None else value

    @property
    def unrotated_attention(self) -> Observation:
        return _require(self.observed.get(ObservedAt.UNROTATED))

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
        mask = to_device(self.call.prompt.is_real, self.hidden.device).gather(1, layout.index)
        return mask if layout.valid is None else mask & layout.valid

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        return segments.cache.get("text", lambda: self._find_text_after(segments))

    def _find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        # The width is the same for all images of a row: the text after the row's first placeholder, known on the host.
        row = segments.row_index.squeeze(1)
        order, is_text = (to_device(values, self.hidden.device)[row] for values in self.call.prompt.text_after_image)
        last = segments.position.masked_fill(~segments.mask, -1).amax(1, keepdim=True)
        mask = is_text & (order > last)
        # Padding points at a kept token, because dropped tokens lack a slot.
        return torch.where(mask, order, segments.position[:, :1]), mask

    def get_last_slot(self) -> Tensor:
        layout, segments = self.state.layout, self.state.segments
        device = layout.index.device
        last = segments.cache.get("last", lambda: to_device(self.call.prompt.last_index, device)[:, None])
        return last if layout.is_uncut else layout.inverse.gather(1, last)


def _require(observation: Observation | None) -> Observation:
    if observation is None:
        raise TokenPruneError("No attention of the decoder layer at this cut was observed: the layer did not run.")
    return observation
