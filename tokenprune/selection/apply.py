# SPDX-License-Identifier: Apache-2.0
"""Check a method's `Selection`, and merge tokens by it, in any engine."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.kernels.join import destinations, join
from tokenprune.selection.method import Method, Selection
from tokenprune.selection.segments import Segments


def validate_selection(selection: Selection, segments: Segments, method: Method) -> tuple[Tensor, list[int]]:
    """Return the selection's `keep`, and how many tokens of each segment it keeps.

    On a device, counts that the method states are used as they are, and values go unchecked: a check would let the
    host wait for the device. Otherwise tokens are counted, and values are checked (`checked_keep`).
    """
    stated = selection.counts if isinstance(selection, Selection) else None
    if stated is not None and segments.mask.device.type != "cpu":
        keep, counts = checked_form(selection, segments, method), list(stated)
    else:
        keep, valid = _with_validity(selection, segments, method)
        found = keep.sum(1) if valid is None else torch.cat([keep.sum(1), valid.view(1)])  # one question for both
        counts = found.tolist()
        if valid is not None and not counts.pop():
            raise TokenPruneError(_BAD_ASSIGN.format(method.name))
    if method.min_tokens and not all(counts):
        raise TokenPruneError(
            f"{method.name}.select() keeps nothing of an image: keep at least one token "
            "of each, or declare min_tokens = 0 in the method"
        )
    if stated is not None and list(stated) != counts:
        raise TokenPruneError(
            f"{method.name}.select(): counts says {stated}, but keep holds {counts}: leave out counts"
        )
    return keep, counts


def checked_keep(selection: Selection, segments: Segments, method: Method) -> Tensor:
    """Return the selection's `keep`; a third party's method may get any part of it wrong."""
    keep, valid = _with_validity(selection, segments, method)
    if valid is not None and not bool(valid):
        raise TokenPruneError(_BAD_ASSIGN.format(method.name))
    return keep


_BAD_ASSIGN = "{}.select(): assign must hold -1 or the index of a token that is kept"


_PARTS = {"keep": (torch.bool,), "assign": (torch.long,), "weight": (torch.float32, torch.float16, torch.bfloat16)}


def checked_form(selection: Selection, segments: Segments, method: Method) -> Tensor:
    """Return the selection's `keep`, checked as far as types and shapes tell."""
    shape = segments.mask.shape
    if not isinstance(selection, Selection):
        raise TokenPruneError(f"{method.name}.select() must return a Selection, not {type(selection).__name__}")
    for (part, dtypes), value in zip(_PARTS.items(), (selection.keep, selection.assign, selection.weight), strict=True):
        if value is None and part != "keep":
            continue
        if not isinstance(value, Tensor) or value.dtype not in dtypes or value.shape != shape:
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            wanted = f"{str(dtypes[0]).removeprefix('torch.')} {tuple(shape)}"
            raise TokenPruneError(f"{method.name}.select(): {part} must be {wanted}, not {found}")
    return selection.keep & segments.mask if segments.has_padding else selection.keep


def _with_validity(selection: Selection, segments: Segments, method: Method) -> tuple[Tensor, Tensor | None]:
    """Return the selection's `keep`, and bool `[]`, True if its `assign`, if it has one, leads to tokens that are
    kept."""
    keep = checked_form(selection, segments, method)
    if selection.assign is None:
        return keep, None
    target = selection.assign.masked_fill(~segments.mask, -1)
    inside = (target >= -1) & (target < keep.shape[1])
    kept = (target < 0) | keep.gather(1, target.clamp(0, keep.shape[1] - 1))
    return keep, (inside & kept).all()


def merge_tokens(features: Tensor, selection: Selection, segments: Segments, places: Tensor) -> Tensor:
    """Return `[B, W, D]` features in which each kept token is the weighted mean of the tokens assigned to it.

    places: long `[S, N]`, places of the segments' tokens in the flattened `[B * W]`.
    """
    flat = features.reshape(-1, features.shape[-1])
    assert selection.assign is not None  # without it nothing merges
    given = selection.assign, segments.mask, places, selection.weight
    own, target, weight = destinations(*given, len(flat))
    return join(flat, None, own, places.flatten(), target, weight).view_as(features)
