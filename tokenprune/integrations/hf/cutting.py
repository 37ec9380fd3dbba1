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
from tokenprune.integrations.hf.call import Call, Sources
from tokenprune.integrations.hf.layout import gather_tokens
from tokenprune.integrations.hf.segments import keep_segments
from tokenprune.tokens import Segments, VisualTokens


@dataclass(frozen=True)
class Step:
    """One cut of the plan: a method with its budget, at the input of a decoder layer (0: at the decoder's entry)."""

    method: Method
    budget: Budget

    @property
    def layer(self) -> int:
        return self.method.cut_layer


def resolve_budgets(call: Call, steps: dict[int, Step], shape: DecoderShape, length: int) -> bool:
    """Work out how many tokens each cut of this call keeps; returns whether any cut removes something."""
    rows: dict[int, list[int]] = {}
    for segment, row in enumerate(call.segments.row):
        rows.setdefault(row, []).append(segment)
    counts = list(call.segments.counts)
    text = {row: length - sum(counts[segment] for segment in segments) for row, segments in rows.items()}
    if any(step.budget.flops_share is not None for step in steps.values()):
        padding = call.padding_per_row(length)
        text = {row: tokens - padding[row] for row, tokens in text.items()}
    for layer, step in steps.items():
        keep = list(counts)
        # Row by row, so that a batch gives what its rows give alone.
        for row, segments in rows.items():
            of_row = [counts[segment] for segment in segments]
            wanted = step.budget.resolve(of_row, layer=layer, shape=shape, text_tokens=text[row])
            for segment, count, number in zip(segments, of_row, wanted, strict=True):
                own = number if step.budget.is_identity() else step.method.budget(count, number)
                keep[segment] = min(count, max(1, own))
        if keep != counts:
            call.budgets[layer] = keep
        counts = keep
    return bool(call.budgets)


def cut(call: Call, step: Step, hidden: Tensor, adapter: Adapter) -> Tensor:
    """Make one cut: `[B, W, D]` hidden states in, `[B, W', D]` out; the call's layout, segments and extras follow."""
    batch = hidden.shape[0]
    # A model may be spread over devices.
    segments, before = call.segments.to(hidden.device), call.layout.to(hidden.device)
    call.layout = before
    tokens = VisualTokens(segments, call.budgets[step.layer], Sources(call, hidden, adapter))
    with torch.no_grad():
        selection = step.method.select(tokens)
    call.observation = None
    keep = _checked(selection, segments, step.method)
    counts = keep.sum(1).tolist()

    # Places of the visual tokens in the flattened [B * W].
    places = before.inverse[segments.row_index, segments.position] + segments.row_index * before.width
    stays = _without(places, segments.mask & ~keep, before.width, batch)
    if before.valid is None:
        kept_per_row = [before.width] * batch
    else:
        stays &= before.valid
        kept_per_row = before.valid.sum(1).tolist()
    for row, count, kept in zip(segments.row, segments.counts, counts, strict=True):
        kept_per_row[row] -= count - kept

    merge = None
    if selection.assign is not None:
        merge = partial(_merge, selection=selection, segments=segments, places=places)
        hidden = merge(hidden)
    call.layout, slots = before.cut(stays, kept_per_row)
    call.extras = adapter.cut_extras(call.extras, slots, call.layout, merge)
    call.segments = keep_segments(segments, keep, counts)
    call.report.cut(call, step, selection, segments)
    return gather_tokens(hidden, slots, 1)


def _checked(selection: Selection, segments: Segments, method: Method) -> Tensor:
    """Return the selection's `keep`; a third party's method may get it wrong."""
    keep = selection.keep if isinstance(selection, Selection) else None
    if keep is None or keep.dtype != torch.bool or keep.shape != segments.mask.shape:
        found = type(selection).__name__ if keep is None else f"{keep.dtype} {tuple(keep.shape)}"
        raise TokenPruneError(
            f"{method.name}.select() must return a Selection whose keep is torch.bool {tuple(segments.mask.shape)}, "
            f"not {found}"
        )
    return keep & segments.mask


def _without(places: Tensor, gone: Tensor, width: int, batch: int) -> Tensor:
    """bool `[B, W]`: all slots but those at `places` where `gone`."""
    # What is not gone is written to a scratch entry at the end: no boolean indexing, so no device sync.
    stays = torch.ones(batch * width + 1, dtype=torch.bool, device=places.device)
    stays.scatter_(0, torch.where(gone, places, batch * width).flatten(), False)
    return stays[:-1].view(batch, width)


def _merge(features: Tensor, selection: Selection, segments: Segments, places: Tensor) -> Tensor:
    """Return `[B, W, D]` features in which each kept token is the weighted mean of the tokens assigned to it.

    places: long `[S, N]`, places of the segments' tokens in the flattened `[B * W]`.
    """
    flat = features.reshape(-1, features.shape[-1])
    members = flat[places].float()
    weight = segments.mask.float() if selection.weight is None else selection.weight.float() * segments.mask
    weight = weight.masked_fill(selection.assign < 0, 0)
    target = selection.assign.clamp(min=0)
    total = torch.zeros_like(weight).scatter_add(1, target, weight)
    index = target.unsqueeze(-1).expand_as(members)
    mean = torch.zeros_like(members).scatter_add(1, index, members * weight.unsqueeze(-1))
    mean = (mean / total.clamp(min=1e-12).unsqueeze(-1)).to(flat.dtype)
    write = selection.keep & segments.mask & (total > 0)
    scratch = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
    scratch = scratch.index_copy(0, torch.where(write, places, flat.shape[0]).flatten(), mean.flatten(0, 1))
    return scratch[:-1].view_as(features)
