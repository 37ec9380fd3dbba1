# SPDX-License-Identifier: Apache-2.0
"""Let a method choose, and take the other tokens out of the sequence."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokenprune.base import Method, Selection
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.call import Call
from tokenprune.integrations.hf.carry import Carries, carry_of
from tokenprune.integrations.hf.kept_inputs import release
from tokenprune.integrations.hf.layout import gather_tokens
from tokenprune.integrations.hf.observe import Seen
from tokenprune.integrations.hf.plan import Step
from tokenprune.integrations.hf.row_ends import keep_row_ends
from tokenprune.integrations.hf.segments import Kept, keep_segments
from tokenprune.integrations.hf.sources import Sources
from tokenprune.kernels.join import join
from tokenprune.tokens import Segments, VisualTokens
from tokenprune.transfer import sent


def cut(call: Call, step: Step, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Make one cut: `[B, W, D]` hidden states in, `[B, W', D]` out; the call's layout, segments and extras follow."""
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
        selection = step.method.select(tokens)
    call.state.pop(Seen)
    release(call, step.layer)
    return apply(call, step, selection, hidden, adapter)


def apply(call: Call, step: Step, selection: Selection, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Take what `selection` leaves out of the sequence; see `cut`."""
    batch = hidden.shape[0]
    segments, before = call.segments.to(hidden.device), call.layout.to(hidden.device)
    keep, counts = counted_keep(selection, segments, step.method)
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
        stays &= ~sent(padding, hidden.device).gather(1, before.index)
    kept_per_row = list(before.counts)
    for row, count, kept in zip(segments.row, segments.counts, counts, strict=True):
        kept_per_row[row] -= count - kept

    merge = None
    if selection.assign is not None:
        merge = partial(merge_tokens, selection=selection, segments=segments, places=places)
        hidden = merge(hidden)
    call.layout, slots = before.cut(stays, kept_per_row)
    call.extras = adapter.cut_extras(call.extras, slots, call.layout, merge)
    kept = Kept.of(keep, counts)
    call.segments = keep_segments(segments, kept, counts)
    if (carries := call.state.get(Carries)) is not None:
        carries.follow(kept)
    call.report.cut(call, step, selection, segments)
    return gather_tokens(hidden, slots, 1)


def counted_keep(selection: Selection, segments: Segments, method: Method) -> tuple[Tensor, list[int]]:
    """Return the selection's `keep`, and how many of each segment that are.

    A method that says so itself is believed where asking would let the host wait for the device, and asked nothing
    else either; the other values are checked (`checked_keep`).
    """
    told = selection.counts if isinstance(selection, Selection) else None
    if told is not None and segments.mask.device.type != "cpu":
        return checked_form(selection, segments, method), told
    keep, valid = _with_validity(selection, segments, method)
    *counts, fine = torch.cat([keep.sum(1), valid.view(1)]).tolist()  # one question for both
    if not fine:
        raise TokenPruneError(_BAD_ASSIGN.format(method.name))
    if method.least and not all(counts):
        raise TokenPruneError(
            f"{method.name}.select() keeps nothing of an image: keep at least one token "
            "of each, or declare least = 0 in the method"
        )
    if told is not None and list(told) != counts:
        raise TokenPruneError(f"{method.name}.select(): counts says {told}, but keep holds {counts}: leave out counts")
    return keep, counts


def checked_keep(selection: Selection, segments: Segments, method: Method) -> Tensor:
    """Return the selection's `keep`; a third party's method may get any part of it wrong."""
    keep, valid = _with_validity(selection, segments, method)
    if not bool(valid):
        raise TokenPruneError(_BAD_ASSIGN.format(method.name))
    return keep


_BAD_ASSIGN = "{}.select(): assign must hold -1 or the index of a token that is kept"


def checked_form(selection: Selection, segments: Segments, method: Method) -> Tensor:
    """Return the selection's `keep`, checked as far as types and shapes tell."""
    shape = segments.mask.shape
    if not isinstance(selection, Selection):
        raise TokenPruneError(f"{method.name}.select() must return a Selection, not {type(selection).__name__}")
    parts = {"keep": (torch.bool,), "assign": (torch.long,), "weight": (torch.float32, torch.float16, torch.bfloat16)}
    for part, dtypes in parts.items():
        value = getattr(selection, part)
        if value is None and part != "keep":
            continue
        if not isinstance(value, Tensor) or value.dtype not in dtypes or value.shape != shape:
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            wanted = f"{str(dtypes[0]).removeprefix('torch.')} {tuple(shape)}"
            raise TokenPruneError(f"{method.name}.select(): {part} must be {wanted}, not {found}")
    return selection.keep & segments.mask


def _with_validity(selection: Selection, segments: Segments, method: Method) -> tuple[Tensor, Tensor]:
    """The selection's `keep`, and whether its `assign` leads to tokens that are kept (bool `[]`)."""
    keep = checked_form(selection, segments, method)
    if selection.assign is None:
        return keep, torch.ones((), dtype=torch.bool, device=keep.device)
    target = selection.assign.masked_fill(~segments.mask, -1)
    inside = (target >= -1) & (target < keep.shape[1])
    kept = (target < 0) | keep.gather(1, target.clamp(0, keep.shape[1] - 1))
    return keep, (inside & kept).all()


def _without(places: Tensor, gone: Tensor, width: int, batch: int) -> Tensor:
    """bool `[B, W]`: all slots but those at `places` where `gone`."""
    # What is not gone is written to a scratch entry at the end: no boolean indexing, so no device sync.
    stays = torch.ones(batch * width + 1, dtype=torch.bool, device=places.device)
    stays.scatter_(0, torch.where(gone, places, batch * width).flatten(), False)
    return stays[:-1].view(batch, width)


def merge_tokens(features: Tensor, selection: Selection, segments: Segments, places: Tensor) -> Tensor:
    """Return `[B, W, D]` features in which each kept token is the weighted mean of the tokens assigned to it.

    places: long `[S, N]`, places of the segments' tokens in the flattened `[B * W]`.
    """
    flat = features.reshape(-1, features.shape[-1])
    nowhere = len(flat)
    weight = torch.ones_like(places, dtype=torch.float32) if selection.weight is None else selection.weight.float()
    absorbed = segments.mask & (selection.assign >= 0)
    itself = absorbed & (selection.assign == torch.arange(places.shape[1], device=places.device))
    own = weight.new_zeros(nowhere + 1).scatter(0, torch.where(itself, places, nowhere).flatten(), weight.flatten())
    into = places.gather(1, selection.assign.clamp(min=0))
    target = torch.where(absorbed & ~itself, into, nowhere)
    return join(flat, None, own[:-1], places.flatten(), target.flatten(), weight.flatten()).view_as(features)
