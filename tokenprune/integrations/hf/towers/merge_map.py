# SPDX-License-Identifier: Apache-2.0
"""From patches that were merged in the tower to placeholders in the prompt: which visual tokens are one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.sequence.alignment import placeholder_to_feature
from tokenprune.integrations.shared.towers.packed_features import find_first_of_group, pop_packed_features
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.method import Selection
from tokenprune.selection.segments import Segments


def feature_groups(owners: Tensor, features: Any, protected: int) -> list[Tensor] | None:
    """Return for each image, for each of its features, the first feature of its group (long `[features]`).

    owners: long `[T, N]`, for each token (or unit) that entered the tower (of T tiles) the one that it is part of.
    features: what `get_image_features` made of them, one tensor an image or tile, or one of all tiles of a prompt
    (Idefics from transformers 5.24 on). protected: class tokens, which the features may leave out. None if the features
    are not the patches.
    """
    packed = pop_packed_features()
    if packed is not None:
        groups = find_first_of_group(owners[:, owners.shape[1] - packed.tokens_per_tile :], owners.shape[1])
        return [packed.map_groups(groups, image) for image in packed.images]
    if not isinstance(features, (list, tuple)) and getattr(features, "ndim", 0) != 3:
        return None
    if any(one.ndim != 2 for one in features):
        return None
    counts = [len(one) for one in features]
    if len(counts) != len(owners):
        each, rest = divmod(sum(counts), len(owners))
        if rest or any(count % max(each, 1) for count in counts):
            return None
        counts = [each] * len(owners)
    if any(not 0 <= owners.shape[1] - count <= protected for count in counts):
        return None
    if len({*counts}) == 1:
        return list(find_first_of_group(owners[:, owners.shape[1] - counts[0] :], owners.shape[1]))
    pairs = zip(owners, counts, strict=True)
    return [find_first_of_group(row[None, len(row) - count :], len(row))[0] for row, count in pairs]


def keep_one_per_group(
    segments: Segments, masks: dict[str, Tensor], groups: dict[str, list[Tensor]], merges: bool = True
) -> Selection | None:
    """Return the selection that keeps the first token of each group, -1 = in none; None if every token is one.

    masks: bool `[B, L]` of placeholders for each modality, on the host; groups: see `feature_groups`. How many tokens
    are left is what the host has to wait for. merges: whether tokens joined others; if not, they were dropped.
    """
    device = segments.mask.device
    batch, length = next(iter(masks.values())).shape
    first = torch.arange(length, device=device).repeat(batch, 1)  # the position of the first token of its group
    for modality, images in groups.items():
        mask, sizes = masks[modality], torch.tensor([len(image) for image in images], device="cpu")
        starts = to_device((sizes.cumsum(0) - sizes).repeat_interleave(sizes), device)
        group = torch.cat([image.to(device) for image in images])
        group = torch.where(group < 0, group, group + starts)
        numbers = placeholder_to_feature(modality, mask, len(group))
        columns = torch.empty(len(group), dtype=torch.long, device="cpu")
        columns[numbers[mask]] = mask.nonzero()[:, 1]  # copies of a row have their features in the same columns
        group = group[to_device(numbers.clamp(min=0), device)]
        of_group = to_device(columns, device)[group.clamp(min=0)].masked_fill(group < 0, -1)
        first = torch.where(to_device(mask, device), of_group, first)
    # Positions in the sequence -> places in the segment; padding is written to a scratch entry at the end.
    rows, real = segments.row_index.expand_as(segments.position), segments.mask
    numbers = torch.arange(real.shape[1], device=device).expand_as(segments.position)
    place = first.new_full((batch, length + 1), -1)
    place[rows, torch.where(real, segments.position, length)] = numbers
    owner = first[rows, segments.position]
    assign = place[rows, owner.clamp(min=0)].masked_fill(~real | (owner < 0), -1)
    keep = (assign == numbers) & real
    counts = keep.sum(1).tolist()
    if counts == segments.counts:
        return None
    # All tokens of a group are the same: the first is taken as it is, so that no rounding comes in.
    return Selection(keep, assign, keep.float(), counts) if merges else Selection(keep, counts=counts)


def keep_units(segments: Segments, masks: dict[str, Tensor], kept: dict[str, list[Tensor]]) -> Selection | None:
    """Return the selection that keeps the tokens of the kept units, or None if all are kept.

    Args:
        segments: The visual tokens of the call.
        masks: Placeholders of each modality, bool `[B, L]` on the host.
        kept: Mask of the kept features of each image, bool on the host.
    """
    if all(bool(image.all()) for images in kept.values() for image in images):
        return None
    stays = torch.ones_like(next(iter(masks.values())))
    for modality, images in kept.items():
        features, mask = torch.cat(images), masks[modality]
        numbers = placeholder_to_feature(modality, mask, len(features))
        stays[mask] = features[numbers[mask]]
    keep = to_device(stays, segments.mask.device)[segments.row_index, segments.position] & segments.mask
    return Selection(keep, counts=keep.sum(1).tolist())
