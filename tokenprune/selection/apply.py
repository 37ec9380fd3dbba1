# SPDX-License-Identifier: Apache-2.0
"""Limit the budget of a method, and check its `Selection`. Used by all engines."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.kernels.host_loops import is_valid_assignment
from tokenprune.selection.method import Method, Selection
from tokenprune.selection.segments import Segments


def validate_selection(selection: Selection, segments: Segments, method: Method) -> tuple[Tensor, list[int]]:
    """Check a selection.

    On an accelerator, `selection.counts` is trusted and values are not checked, because a check would wait for the
    device. Otherwise the kept tokens are counted and `assign` is checked.

    Returns:
        The mask of kept tokens, shape (S, N), and the number of kept tokens per segment.

    Raises:
        TokenPruneError: If the selection is invalid.
    """
    stated = selection.counts if isinstance(selection, Selection) else None
    if stated is not None and segments.mask.device.type != "cpu":
        keep, counts = check_form(selection, segments, method), list(stated)
    else:
        keep, is_valid = _check_assign(selection, segments, method)
        if isinstance(is_valid, Tensor):  # one transfer for the counts and the validity
            *counts, is_valid = torch.cat([keep.sum(1), is_valid.view(1)]).tolist()
        else:
            counts = keep.sum(1).tolist()
        if not is_valid:
            raise TokenPruneError(_INVALID_ASSIGN.format(method.name))
    if method.min_tokens and not all(counts):
        raise TokenPruneError(
            f"{method.name}.select() keeps no token of an image. Keep at least one token per image, or set "
            "min_tokens = 0 in the method."
        )
    if stated is not None and list(stated) != counts:
        raise TokenPruneError(
            f"{method.name}.select() returns counts={stated}, but its mask keeps {counts}. Leave out counts."
        )
    return keep, counts


def check_keep(selection: Selection, segments: Segments, method: Method) -> Tensor:
    """Return the mask of kept tokens. Raise TokenPruneError if any part of the selection is invalid."""
    keep, is_valid = _check_assign(selection, segments, method)
    if not is_valid:
        raise TokenPruneError(_INVALID_ASSIGN.format(method.name))
    return keep


_INVALID_ASSIGN = "{}.select(): each entry of assign must be -1 or the index of a kept token."


_DTYPES = {"keep": (torch.bool,), "assign": (torch.long,), "weight": (torch.float32, torch.float16, torch.bfloat16)}


def check_form(selection: Selection, segments: Segments, method: Method) -> Tensor:
    """Return the mask of kept tokens. Raise TokenPruneError if a type, a dtype or a shape is invalid."""
    shape = segments.mask.shape
    if not isinstance(selection, Selection):
        raise TokenPruneError(f"{method.name}.select() must return a Selection, not {type(selection).__name__}")
    tensors = (selection.keep, selection.assign, selection.weight)
    for (part, dtypes), value in zip(_DTYPES.items(), tensors, strict=True):
        if value is None and part != "keep":
            continue
        if not isinstance(value, Tensor) or value.dtype not in dtypes or value.shape != shape:
            actual = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            expected = f"{str(dtypes[0]).removeprefix('torch.')} {tuple(shape)}"
            raise TokenPruneError(f"{method.name}.select(): {part} must be {expected}, not {actual}")
    return selection.keep & segments.mask if segments.has_padding else selection.keep


def _check_assign(selection: Selection, segments: Segments, method: Method) -> tuple[Tensor, Tensor | bool]:
    """Return the mask of kept tokens, and whether `assign` refers only to kept tokens (on a device, a tensor)."""
    keep = check_form(selection, segments, method)
    if selection.assign is None:
        return keep, True
    if keep.device.type == "cpu":
        return keep, is_valid_assignment(selection.assign, keep, segments.mask)
    target = selection.assign.masked_fill(~segments.mask, -1)
    in_range = (target >= -1) & (target < keep.shape[1])
    is_kept = (target < 0) | keep.gather(1, target.clamp(0, keep.shape[1] - 1))
    return keep, (in_range & is_kept).all()


def limit_budget(method: Method, count: int, requested: int) -> int:
    """Return the number of tokens that `method` keeps of a segment with `count` tokens and a budget of `requested`."""
    return min(count, max(method.min_tokens, method.resolve_count(count, requested)))
