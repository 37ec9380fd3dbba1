# SPDX-License-Identifier: Apache-2.0
"""Keep the last token of each prompt, because `generate` reads the next token from its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tokenprune.kernels.transfer import to_device
from tokenprune.selection.method import Selection
from tokenprune.selection.segments import Segments


def keep_row_ends(
    selection: Selection, segments: Segments, counts: Sequence[int], ends: Sequence[tuple[int, int]]
) -> Selection:
    """Keep the visual tokens at which prompts end, without changing the number of kept tokens per segment.

    If the last token would be merged, it replaces the token that absorbs it. If it would be dropped, it replaces the
    nearest kept token. Segments that keep no token are unchanged.

    Args:
        selection: Selection of the method.
        segments: Segments of the visual tokens.
        counts: Number of kept tokens per segment.
        ends: (row, position) of each prompt that ends with a visual token.
    """
    end_of_row = dict(ends)
    affected = [index for index, row in enumerate(segments.row) if row in end_of_row and counts[index]]
    if not affected:
        return selection
    device = segments.mask.device
    rows = to_device(affected, device)
    position = to_device([[end_of_row[segments.row[index]]] for index in affected], device)
    mask, keep = segments.mask[rows], selection.keep[rows] & segments.mask[rows]
    is_last = (segments.position[rows] == position) & mask
    has_last, last = is_last.any(1, keepdim=True), is_last.to(torch.uint8).argmax(1, keepdim=True)
    # The last token of the prompt has the highest index, so the nearest kept token is the last kept token.
    replaced = (keep * torch.arange(keep.shape[1], device=device)).amax(1, keepdim=True)
    assign = None
    if selection.assign is not None:
        target = selection.assign[rows]
        absorber = target.gather(1, last)
        replaced = torch.where(absorber >= 0, absorber, replaced)
        new_target = torch.where(target == replaced, last, target).scatter(1, last, last)
        assign = selection.assign.index_copy(0, rows, torch.where(has_last, new_target, target))
    new_keep = keep.scatter(1, replaced, False).scatter(1, last, True)
    keep = selection.keep.index_copy(0, rows, torch.where(has_last, new_keep, keep))
    return dataclasses.replace(selection, keep=keep, assign=assign)
