# SPDX-License-Identifier: Apache-2.0
"""One cut: the method selects tokens, and the others leave the sequence."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

from tokenprune.integrations.hf.engine.method_inputs import DecoderSource
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.part import Observations
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.forward.token_state import StageMemory
from tokenprune.integrations.hf.sequence.layout import gather_tokens
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
    call.trace.add_cut(call, step, selection, segments, num_kept, call.state.layout)
    return gather_tokens(hidden, slots, 1)
