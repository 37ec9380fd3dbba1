# SPDX-License-Identifier: Apache-2.0
"""Let a method choose, and take the other tokens out of the sequence."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

from tokenprune.base import Pruner, Selection
from tokenprune.integrations.hf.decoder.carry import Carries, carry_of
from tokenprune.integrations.hf.decoder.method_inputs import Sources
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.sequence.layout import gather_tokens
from tokenprune.integrations.hf.sequence.segments import Kept, keep_segments
from tokenprune.integrations.hf.statistics import note_cut
from tokenprune.integrations.shared.row_ends import keep_row_ends
from tokenprune.integrations.shared.selection import merge_tokens, validate_selection
from tokenprune.ops.transfer import to_device
from tokenprune.view.tokens import VisualTokens


def choose(call: Call, step: Step, hidden: Tensor, adapter: Adapter) -> Selection:
    """Let the method of `step` choose among the tokens that arrive, `[B, W, D]`."""
    # A model may be spread over devices.
    segments, call.layout = call.segments.to(hidden.device), call.layout.to(hidden.device)
    # Anew: a method before this one may have kept another number than it was asked for.
    arrived = call.plan.counts_of(segments)
    carry = carry_of(call, step, arrived)
    kept = call.plan.stage(step, arrived, carry.original).kept
    keep = [number for number, count in zip(kept, arrived, strict=True) if count]
    seen = adapter.seen(call.extras, step.layer, hidden)
    tokens = VisualTokens(segments, keep, Sources(call, seen, adapter, step.method.needs, carry))
    with torch.no_grad():
        return cast(Pruner, step.method).select(tokens)


def apply(call: Call, step: Step, selection: Selection, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Take what `selection` leaves out of the sequence: `[B, W, D]` hidden states in, `[B, W', D]` out; the call's
    layout, segments and extras follow."""
    batch = hidden.shape[0]
    segments, before = call.segments.to(hidden.device), call.layout.to(hidden.device)
    keep, counts = validate_selection(selection, segments, step.method)
    if counts == segments.counts:
        return hidden  # nothing leaves, nor does padding
    if ends := call.host.visual_ends:
        selection = keep_row_ends(selection, segments, counts, ends)
        keep = selection.keep & segments.mask

    # Places of the visual tokens in the flattened [B * W].
    places = before.inverse[segments.row_index, segments.position] + segments.row_index * before.width
    stays = _without(places, segments.mask & ~keep, before.width, batch)
    if before.valid is not None:
        stays &= before.valid
    elif (padding := call.host.padding_to_drop) is not None:
        stays &= ~to_device(padding, hidden.device).gather(1, before.index)
    kept_per_row = list(before.counts)
    for row, count, kept in zip(segments.row, segments.counts, counts, strict=True):
        kept_per_row[row] -= count - kept

    merge = None
    if selection.assign is not None:
        merge = partial(merge_tokens, selection=selection, segments=segments, places=places)
        hidden = merge(hidden)
    call.layout, slots = before.cut(stays, kept_per_row)
    call.extras = adapter.cut_extras(call.extras, slots, call.layout, merge)
    left = Kept.of(keep, counts)
    call.segments = keep_segments(segments, left, counts)
    if (carries := call.state.get(Carries)) is not None:
        carries.follow(left)
    note_cut(call, step, selection, segments)
    return gather_tokens(hidden, slots, 1)


def _without(places: Tensor, gone: Tensor, width: int, batch: int) -> Tensor:
    """bool `[B, W]`: all slots but those at `places` where `gone`."""
    # What is not gone is written to a scratch entry at the end: no boolean indexing, so no device sync.
    stays = torch.ones(batch * width + 1, dtype=torch.bool, device=places.device)
    stays.scatter_(0, torch.where(gone, places, batch * width).flatten(), False)
    return stays[:-1].view(batch, width)
