# SPDX-License-Identifier: Apache-2.0
"""Let a method choose, and take the other tokens out of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenprune.accounting import DecoderShape
from tokenprune.base import Method, Selection
from tokenprune.budget import Budget
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.call import Call
from tokenprune.integrations.hf.layout import gather_tokens
from tokenprune.integrations.hf.segments import keep_segments
from tokenprune.integrations.hf.sources import Sources
from tokenprune.kernels.join import join
from tokenprune.tokens import Segments, VisualTokens
from tokenprune.transfer import sent


@dataclass(frozen=True)
class Step:
    """One cut of the plan: a method with its budget, at the input of a decoder layer (0: at the decoder's entry)."""

    method: Method
    budget: Budget

    @property
    def layer(self) -> int:
        return self.method.cut_layer


@dataclass(frozen=True)
class Merged:
    """What is left of a call's visual tokens after a merge in the tower, and the step that it is reported as."""

    step: Step
    selection: Selection


def resolve_budgets(call: Call, steps: dict[int, Step], shape: DecoderShape, length: int) -> bool:
    """Note which steps will cut tokens of this call; returns whether any will."""
    visual = [0] * (max(call.segments.row) + 1)
    for row, count in zip(call.segments.row, call.segments.counts, strict=True):
        visual[row] += count
    tokens = call.tokens_per_row(len(visual), length)
    call.text = [of_row - visuals for of_row, visuals in zip(tokens, visual, strict=False)]
    counts = call.segments.counts if call.merged is None else call.merged.selection.counts
    for layer, step in steps.items():
        keep = _resolve(call, step, counts, shape)
        if keep != counts:
            call.cuts.add(layer)
        counts = keep
    if call.verdict is not None:
        call.verdict.conclude(counts, call.report.stats)
    return bool(call.cuts) or call.merged is not None


def _resolve(call: Call, step: Step, counts: list[int], shape: DecoderShape) -> list[int]:
    """Return how many of each segment's `counts` tokens a step keeps; row by row, so that a batch gives what its rows
    give alone."""
    if step.budget.is_identity():
        return list(counts)
    keep = list(counts)
    for row in dict.fromkeys(call.segments.row):
        places = [place for place, other in enumerate(call.segments.row) if other == row]
        of_row = [counts[place] for place in places]
        wanted = step.budget.resolve(of_row, layer=step.layer, shape=shape, text_tokens=call.text[row])
        for place, count, number in zip(places, of_row, wanted, strict=True):
            keep[place] = min(count, max(1, step.method.budget(count, number)))
    if call.verdict is not None:
        keep = call.verdict.at_least(step, counts, keep)
    return keep


def cut(call: Call, step: Step, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Make one cut: `[B, W, D]` hidden states in, `[B, W', D]` out; the call's layout, segments and extras follow."""
    # A model may be spread over devices.
    segments, call.layout = call.segments.to(hidden.device), call.layout.to(hidden.device)
    # Anew: a method before this one may have kept another number than it was asked for.
    budget = _resolve(call, step, segments.counts, call.report.shape)
    sources = Sources(call, adapter.seen(call.extras, step.layer, hidden), adapter, step.method.needs)
    tokens = VisualTokens(segments, budget, sources)
    with torch.no_grad():
        selection = step.method.select(tokens)
    call.observation = call.ahead = None
    call.inputs.release()
    return apply(call, step, selection, hidden, adapter)


def apply(call: Call, step: Step, selection: Selection, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Take what `selection` leaves out of the sequence; see `cut`."""
    batch = hidden.shape[0]
    segments, before = call.segments.to(hidden.device), call.layout.to(hidden.device)
    keep, counts = counted_keep(selection, segments, step.method)

    # Places of the visual tokens in the flattened [B * W].
    places = before.inverse[segments.row_index, segments.position] + segments.row_index * before.width
    stays = _without(places, segments.mask & ~keep, before.width, batch)
    if before.valid is not None:
        stays &= before.valid
    elif call.padding_to_drop is not None:
        stays &= ~sent(call.padding_to_drop, hidden.device).gather(1, before.index)
    kept_per_row = list(before.counts)
    for row, count, kept in zip(segments.row, segments.counts, counts, strict=True):
        kept_per_row[row] -= count - kept

    merge = None
    if selection.assign is not None:
        merge = partial(merge_tokens, selection=selection, segments=segments, places=places)
        hidden = merge(hidden)
    call.layout, slots = before.cut(stays, kept_per_row)
    call.extras = adapter.cut_extras(call.extras, slots, call.layout, merge)
    call.segments = keep_segments(segments, keep, counts)
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
    if not all(counts):
        raise TokenPruneError(f"{method.name}.select() keeps nothing of a picture: keep at least one token of each")
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
