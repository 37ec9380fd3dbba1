# SPDX-License-Identifier: Apache-2.0
"""Match what was learnt of images when they were encoded with the prompt that they stand in.

For beams and samples `generate` repeats each row after its images were encoded, copies side by side. The features
follow, what travels beside them on the encoder's output does not: it tells of the images of the first copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError

T = TypeVar("T")


def placeholder_to_feature(modality: str, mask: Tensor, count: int) -> Tensor:
    """long `[B, L]`: for each placeholder the number of its feature, of `count` that were encoded; -1 elsewhere.

    mask: bool `[B, L]` of the placeholders, on the host, like the result. Raises UnsupportedSetupError where the two
    cannot be matched.
    """
    found = int(mask.sum())
    copies = max(1, found // count)
    own = mask[::copies]
    numbers = torch.full(own.shape, -1, device="cpu")
    numbers[own] = torch.arange(int(own.sum()), device="cpu")
    numbers = numbers.repeat_interleave(copies, 0)
    if found != copies * count or not torch.equal(numbers >= 0, mask):
        raise UnsupportedSetupError(
            f"the prompt holds {found} {modality} placeholders, but the vision tower's patches make {count} "
            "tokens: the two cannot be matched"
        )
    return numbers


def align_per_image(known: Sequence[T], rows: Sequence[int]) -> list[T | None]:
    """Return what is known of each piece of a prompt, None of each where the two cannot be matched.

    known: of each image of one modality that was encoded; rows: the row of each of its pieces, in order.
    """
    copies, rest = divmod(len(rows), max(1, len(known)))
    if copies and not rest:
        left = iter(known)
        firsts = {row: list(islice(left, rows.count(row))) for row in dict.fromkeys(rows) if row % copies == 0}
        found: list[T | None] = [one for row in dict.fromkeys(rows) for one in firsts.get(row - row % copies, [])]
        if len(found) == len(rows):
            return found
    return [None] * len(rows)
