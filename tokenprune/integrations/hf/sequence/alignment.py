# SPDX-License-Identifier: Apache-2.0
"""Match encoded images with the placeholders of a prompt.

For beams and samples `generate` repeats each row after its images were encoded, in adjacent copies. It repeats the
features, but not the record on the encoder's output, which describes the images of the first copies.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import PlaceholderMismatchError, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record, list_features


def index_placeholders(modality: str, mask: Tensor, count: int) -> Tensor:
    """Return the index of each placeholder's feature.

    Args:
        modality: "image" or "video", for the error.
        mask: Placeholder mask, shape (batch, length), bool, on the host.
        count: Number of encoded features.

    Returns:
        Indices, shape (batch, length), int64, on the host, -1 at other tokens.

    Raises:
        UnsupportedSetupError: If placeholders and features do not match.
    """
    num_placeholders = int(mask.sum())
    copies = max(1, num_placeholders // count)
    first_copies = mask[::copies]
    index = torch.full(first_copies.shape, -1, device="cpu")
    index[first_copies] = torch.arange(int(first_copies.sum()), device="cpu")
    index = index.repeat_interleave(copies, 0)
    if num_placeholders != copies * count or not torch.equal(index >= 0, mask):
        raise UnsupportedSetupError(
            f"The prompt has {num_placeholders} {modality} placeholders, but the vision tower's patches form {count} "
            "tokens. Pass one image per image of the prompt."
        )
    return index


def check_rows(placeholders: Mapping[str, Sequence[int]], outputs: Mapping[str, Any]) -> None:
    """Check that the encoder's features are in the order of the prompt's rows.

    Some models of transformers repeat each image, instead of each row, for beams and samples. The total number of
    features is then right, but rows with several images get features of the wrong images.

    Args:
        placeholders: Number of placeholders in each row, by modality.
        outputs: The encoder's output by modality.

    Raises:
        PlaceholderMismatchError: If an image spans two rows, or copies of a row have different images.
    """
    for modality, output in outputs.items():
        features = list_features(output)
        if features is None or modality not in placeholders:
            continue
        counts = placeholders[modality]
        row_ends = list(accumulate(counts))
        image_ends = list(accumulate(math.prod(feature.shape[:-1]) for feature in features))
        if not image_ends or image_ends[-1] != row_ends[-1]:
            continue  # older versions of LLaVA-OneVision add newlines to the features of videos after encoding
        boundaries = {0, *image_ends}
        wrong_row = next((row for row, end in enumerate(row_ends) if end not in boundaries), None)
        copies, remainder = divmod(len(features), get_record(output).num_encoded or len(features))
        if wrong_row is None and copies > 1 and not remainder:
            wrong_row = _find_different_copy(features, copies, row_ends, image_ends)
        if wrong_row is not None:
            raise PlaceholderMismatchError(
                f"The {modality} features are not in the order of the prompt's rows: row {wrong_row} has "
                f"{counts[wrong_row]} placeholders for other images. With num_beams or num_return_sequences above 1 "
                "this model repeats images instead of rows: use one image per row, or leave these options out."
            )


def _find_different_copy(
    features: Sequence[Tensor], copies: int, row_ends: Sequence[int], image_ends: Sequence[int]
) -> int | None:
    """Return the first row whose images differ from the row that it is a copy of.

    `generate` lists the same tensor for each copy, so images are compared by identity. Return None if the features were
    moved to another device, which creates new tensors.
    """
    identities = [id(feature) for feature in features]
    if len(row_ends) % copies or len(set(identities)) > len(features) // copies:
        return None
    starts = [0, *(bisect_right(image_ends, end) for end in row_ends)]
    rows = [identities[start:end] for start, end in pairwise(starts)]
    return next((row for row, images in enumerate(rows) if images != rows[row - row % copies]), None)
