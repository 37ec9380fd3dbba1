# SPDX-License-Identifier: Apache-2.0
"""Map patches that were merged or dropped in the tower to visual tokens of the prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.sequence.alignment import index_placeholders
from tokenprune.integrations.shared.towers.packed_features import find_first_of_group, pop_packed_features
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.method import Selection
from tokenprune.selection.segments import Segments


def find_feature_groups(owners: Tensor, features: Any, protected: int) -> list[Tensor] | None:
    """Find the group of each feature of an encoder's output.

    Args:
        owners: Merged token of each token (or unit) at the tower's input, long `[tiles, tokens]`.
        features: Output of `get_image_features`: one tensor per image or tile, or one for all tiles of a prompt
            (Idefics since transformers 5.24).
        protected: Number of class tokens, which the features may omit.

    Returns:
        For each image, the index of the first feature in the group of each feature, long `[features]`. None if the
        features do not correspond to patches.
    """
    packed = pop_packed_features()
    if packed is not None:
        groups = find_first_of_group(owners[:, owners.shape[1] - packed.tokens_per_tile :], owners.shape[1])
        return [packed.map_groups(groups, image) for image in packed.images]
    if not isinstance(features, (list, tuple)) and getattr(features, "ndim", 0) != 3:
        return None
    if any(image.ndim != 2 for image in features):
        return None
    counts = [len(image) for image in features]
    if len(counts) != len(owners):
        per_tile, remainder = divmod(sum(counts), len(owners))
        if remainder or any(count % max(per_tile, 1) for count in counts):
            return None
        counts = [per_tile] * len(owners)
    if any(not 0 <= owners.shape[1] - count <= protected for count in counts):
        return None
    if len({*counts}) == 1:
        return list(find_first_of_group(owners[:, owners.shape[1] - counts[0] :], owners.shape[1]))
    pairs = zip(owners, counts, strict=True)
    return [find_first_of_group(row[None, len(row) - count :], len(row))[0] for row, count in pairs]


def keep_one_per_group(
    segments: Segments, masks: dict[str, Tensor], groups: dict[str, list[Tensor]], merges: bool = True
) -> Selection | None:
    """Build the selection that keeps the first token of each group. Synchronises with the device to count tokens.

    Args:
        segments: The visual tokens of the call.
        masks: Placeholders of each modality, bool `[B, L]` on the host.
        groups: Result of `find_feature_groups` for each modality. -1 marks dropped features.
        merges: True if tokens were merged, False if they were dropped.

    Returns:
        The selection, or None if it keeps all tokens.
    """
    device = segments.mask.device
    batch, length = next(iter(masks.values())).shape
    first = torch.arange(length, device=device).repeat(batch, 1)  # position of the first token of each token's group
    for modality, images in groups.items():
        mask, sizes = masks[modality], torch.tensor([len(image) for image in images], device="cpu")
        starts = to_device((sizes.cumsum(0) - sizes).repeat_interleave(sizes), device)
        group = torch.cat([image.to(device) for image in images])
        group = torch.where(group < 0, group, group + starts)
        feature_index = index_placeholders(modality, mask, len(group))
        columns = torch.empty(len(group), dtype=torch.long, device="cpu")
        columns[feature_index[mask]] = mask.nonzero()[:, 1]  # copies of a row have their features in the same columns
        group = group[to_device(feature_index.clamp(min=0), device)]
        first_column = to_device(columns, device)[group.clamp(min=0)].masked_fill(group < 0, -1)
        first = torch.where(to_device(mask, device), first_column, first)
    # Convert positions in the sequence to indices in the segment. Padding is written to a scratch entry at the end.
    rows, mask = segments.row_index.expand_as(segments.position), segments.mask
    indices = torch.arange(mask.shape[1], device=device).expand_as(segments.position)
    segment_index = first.new_full((batch, length + 1), -1)
    segment_index[rows, torch.where(mask, segments.position, length)] = indices
    owner = first[rows, segments.position]
    assign = segment_index[rows, owner.clamp(min=0)].masked_fill(~mask | (owner < 0), -1)
    keep = (assign == indices) & mask
    counts = keep.sum(1).tolist()
    if counts == segments.counts:
        return None
    # All tokens of a group are equal. Taking the first instead of the mean avoids rounding.
    return Selection(keep, assign, keep.float(), counts) if merges else Selection(keep, counts=counts)


def keep_units(segments: Segments, masks: dict[str, Tensor], kept: dict[str, list[Tensor]]) -> Selection | None:
    """Build the selection that keeps the tokens of the kept units, or return None if all are kept.

    Args:
        segments: The visual tokens of the call.
        masks: Placeholders of each modality, bool `[B, L]` on the host.
        kept: Mask of the kept features of each image, bool on the host.
    """
    if all(bool(image.all()) for images in kept.values() for image in images):
        return None
    kept_placeholders = torch.ones_like(next(iter(masks.values())))
    for modality, images in kept.items():
        features, mask = torch.cat(images), masks[modality]
        feature_index = index_placeholders(modality, mask, len(features))
        kept_placeholders[mask] = features[feature_index[mask]]
    keep = to_device(kept_placeholders, segments.mask.device)[segments.row_index, segments.position] & segments.mask
    return Selection(keep, counts=keep.sum(1).tolist())
