# SPDX-License-Identifier: Apache-2.0
"""Trace the features of tiles through a model's packing, which crops, reorders and separates them."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import torch

from tokenprune.errors import UnsupportedSetupError
from tokenprune.kernels.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor

_thread = threading.local()


def find_first_of_group(owner: Tensor, groups: int) -> Tensor:
    """Return the lowest index with the same group number.

    Args:
        owner: Group number of each token, shape (batch, tokens), int64, -1 for dropped tokens.
        groups: Upper bound of the group numbers.

    Returns:
        Index of the first token of each token's group, shape (batch, tokens), int64, -1 for dropped tokens.
    """
    indices = torch.arange(owner.shape[1], device=owner.device).expand_as(owner)
    # Dropped tokens go to one extra group.
    group = owner.masked_fill(is_dropped := owner < 0, groups)
    first = owner.new_full((owner.shape[0], groups + 1), owner.shape[1])
    return first.scatter_reduce(1, group, indices, "amin").gather(1, group).masked_fill(is_dropped, -1)


def pop_packed_features() -> PackedFeatures | None:
    """Return the result of this thread's last `PackRecorder` call, and clear it."""
    packed, _thread.packed = getattr(_thread, "packed", None), None
    return packed


class PackRecorder:
    """Replacement for a model's `pack_image_features` that also packs an id for each feature.

    The packed ids show the final position of each feature, for any handling of tiles, padding and newlines. The ids are
    packed on the host, so reading them does not synchronize with the device.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        result = self.original(*bound.args, **bound.kwargs)
        ids, start = [], 0
        for image in bound.arguments["image_features"]:
            tiles, tokens = image.shape[:2]
            ids.append(build_feature_ids(tiles, tokens, torch.device("cpu"), start))
            start += tiles * tokens
        bound.arguments["image_features"] = ids
        bound.arguments["image_sizes"] = torch.as_tensor(bound.arguments["image_sizes"], device="cpu")
        if bound.arguments.get("image_newline") is not None:
            bound.arguments["image_newline"] = build_newline_id(ids[0].device)
        images = self.original(*bound.args, **bound.kwargs)[0]
        _thread.packed = PackedFeatures(list(images), ids[0].shape[1])
        return result


class PackedFeatures:
    """Ids of the features after packing.

    Args:
        images: Packed ids of each image, shape (features, 2), float64, on the host.
        tokens_per_tile: Number of features of a tile.
    """

    def __init__(self, images: list[Tensor], tokens_per_tile: int) -> None:
        self.images, self.tokens_per_tile = images, tokens_per_tile

    def map_groups(self, groups: Tensor, packed: Tensor) -> Tensor:
        """Return the index of the first feature in the group of each feature of a packed image.

        Args:
            groups: First feature of each feature's group within its tile, shape (tiles, tokens), int64, -1 for dropped.
            packed: Packed ids of the image, an entry of `images`.

        Returns:
            Indices into the packed image, shape (features,), int64, -1 for dropped features.
        """
        ids = to_device(self.get_feature_ids(packed), groups.device)
        tile, token = ids // self.tokens_per_tile, ids % self.tokens_per_tile
        indices = torch.arange(len(ids), dtype=torch.long, device=ids.device)
        first = groups[tile.clamp(min=0), token]
        group = torch.where(first < 0, -1, tile * self.tokens_per_tile + first)
        # Each newline is a separate group.
        group = torch.where(ids < 0, groups.numel() + indices, group)
        return find_first_of_group(group[None], groups.numel() + len(ids))[0]

    @staticmethod
    def get_feature_ids(packed: Tensor) -> Tensor:
        """Return the id of each feature of a packed image, shape (features,), int64, -1 for newlines.

        Raises:
            UnsupportedSetupError: If the model interpolated the features.
        """
        ids = packed[:, 0].round().long()
        if not torch.equal(packed[:, 1], _check(ids.double())):
            raise UnsupportedSetupError(
                "This image has so many tiles that the model interpolates its features. Use a smaller image, or a "
                "method that acts after the tower."
            )
        return ids


def build_feature_ids(tiles: int, tokens: int, device: torch.device, start: int = 0) -> Tensor:
    """Return the ids that replace the features of an image while it is packed, shape (tiles, tokens, 2), float64."""
    ids = torch.arange(start, start + tiles * tokens, dtype=torch.float64, device=device)
    # The second channel is a checksum that detects interpolated ids.
    return torch.stack([ids, _check(ids)], -1).view(tiles, tokens, 2)


def build_newline_id(device: torch.device) -> Tensor:
    """Return the id that replaces a newline, shape (2,), float64."""
    return torch.tensor([-1, _check(-1)], dtype=torch.float64, device=device)


def _check(ids: Any) -> Any:
    return (ids * ids + 3 * ids) % 9973
