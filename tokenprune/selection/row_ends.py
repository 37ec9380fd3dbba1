# SPDX-License-Identifier: Apache-2.0
"""Keep the last token of each prompt: what comes out there is what `generate` takes the next token from."""

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
    """Return `selection` with the tokens at `ends` kept, and as many tokens of each segment as before.

    Where such a token was to leave, it takes the place of the one that was to absorb it; in plain dropping, of the
    nearest one that stays. Of a segment that is withdrawn as a whole nothing is kept.

    counts: how many tokens of each segment stay. ends: (row, position) of prompts that end with a visual token.
    """
    at = dict(ends)
    of = [index for index, row in enumerate(segments.row) if row in at and counts[index]]
    if not of:
        return selection
    device = segments.mask.device
    rows, place = to_device(of, device), to_device([[at[segments.row[index]]] for index in of], device)
    mask, keep = segments.mask[rows], selection.keep[rows] & segments.mask[rows]
    last = (segments.position[rows] == place) & mask
    there, index = last.any(1, keepdim=True), last.to(torch.uint8).argmax(1, keepdim=True)
    # The end of a prompt comes after all of its visual tokens: the nearest that stays is the last that stays.
    leaves = (keep * torch.arange(keep.shape[1], device=device)).amax(1, keepdim=True)
    assign = None
    if selection.assign is not None:
        into = selection.assign[rows]
        absorbs = into.gather(1, index)
        leaves = torch.where(absorbs >= 0, absorbs, leaves)
        moved = torch.where(into == leaves, index, into).scatter(1, index, index)
        assign = selection.assign.index_copy(0, rows, torch.where(there, moved, into))
    swapped = keep.scatter(1, leaves, False).scatter(1, index, True)
    keep = selection.keep.index_copy(0, rows, torch.where(there, swapped, keep))
    return dataclasses.replace(selection, keep=keep, assign=assign)
