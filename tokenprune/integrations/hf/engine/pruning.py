# SPDX-License-Identifier: Apache-2.0
"""Let a method choose, and take the other tokens out of the sequence."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

from tokenprune.integrations.hf.engine.method_inputs import Sources
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.carry import Carry
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.observed import Observed
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.sequence.layout import gather_tokens
from tokenprune.integrations.hf.statistics import note_cut
from tokenprune.selection.apply import merge_tokens, validate_selection
from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.row_ends import keep_row_ends
from tokenprune.selection.tokens import VisualTokens


def choose(call: Call, step: Step, observed: Observed, hidden: Tensor, adapter: Adapter) -> Selection:
    """Let the method of `step` choose among the tokens that arrive, `[B, W, D]`."""
    held, plan = call.held.to(hidden.device), call.report.plan
    assert plan is not None  # a method is asked where one cuts
    call.held = held
    # Anew: a method before this one may have kept another number than it was asked for.
    arrived = plan.counts_of(held.segments)
    carries = held.carries
    if step.owner not in carries:
        carries[step.owner] = Carry(plan.original(step, arrived))
    carry = carries[step.owner]
    kept = plan.stage(step, arrived, carry.original).kept
    keep = [number for number, count in zip(kept, arrived, strict=True) if count]
    seen = adapter.seen(held.extras, step.layer, hidden)
    tokens = VisualTokens(held.segments, keep, Sources(call, seen, adapter, step.method.needs, carry, observed))
    method = cast(Pruner, step.method)
    return torch.no_grad()(method.select)(tokens) if torch.is_grad_enabled() else method.select(tokens)


def apply(call: Call, step: Step, selection: Selection, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Take what `selection` leaves out of the sequence: `[B, W, D]` hidden states in, `[B, W', D]` out; what the call
    holds follows."""
    held = call.held.to(hidden.device)
    segments = held.segments
    keep, counts = validate_selection(selection, segments, step.method)
    if counts == segments.counts:
        return hidden  # nothing leaves, nor does padding
    if ends := call.host.visual_ends:
        selection = keep_row_ends(selection, segments, counts, ends)
        keep = selection.keep & segments.mask
    places, merge = held.places(), None
    if selection.assign is not None:
        merge = partial(merge_tokens, selection=selection, segments=segments, places=places)
        hidden = merge(hidden)
    padding = call.host.padding_to_drop if held.layout.valid is None else None
    call.held, slots = held.cut(keep, counts, places, padding, partial(adapter.cut_extras, merge=merge))
    note_cut(call, call.held.layout, counts, step, selection, segments)
    return gather_tokens(hidden, slots, 1)
