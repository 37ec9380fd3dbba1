# SPDX-License-Identifier: Apache-2.0
"""The final place of each feature of a tower's tiles, for models that crop, reorder and separate features."""

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
    """long `[B, N]` of group numbers below `groups` -> long `[B, N]`: the lowest place with the same number; -1 stays
    (dropped)."""
    places = torch.arange(owner.shape[1], device=owner.device).expand_as(owner)
    # One group more than there are takes what is in none.
    group = owner.masked_fill(out := owner < 0, groups)
    first = owner.new_full((owner.shape[0], groups + 1), owner.shape[1])
    return first.scatter_reduce(1, group, places, "amin").gather(1, group).masked_fill(out, -1)


def pop_packed_features() -> PackedFeatures | None:
    """Return what this thread's last `PackRecorder` noted, and forget it."""
    packed, _thread.packed = getattr(_thread, "packed", None), None
    return packed


class PackRecorder:
    """Stands in for a model's `pack_image_features`, and packs the numbers of the features beside the features.

    What comes out tells where each feature ended up, whatever the family does with tiles, padding and newlines. The
    numbers are packed on the host, where looking at them costs nothing.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        result = self.original(*bound.args, **bound.kwargs)
        numbers, start = [], 0
        for image in bound.arguments["image_features"]:
            tiles, tokens = image.shape[:2]
            numbers.append(build_feature_ids(tiles, tokens, torch.device("cpu"), start))
            start += tiles * tokens
        bound.arguments["image_features"] = numbers
        bound.arguments["image_sizes"] = torch.as_tensor(bound.arguments["image_sizes"], device="cpu")
        if bound.arguments.get("image_newline") is not None:
            bound.arguments["image_newline"] = build_newline_id(numbers[0].device)
        images = self.original(*bound.args, **bound.kwargs)[0]
        _thread.packed = PackedFeatures(list(images), numbers[0].shape[1])
        return result


class PackedFeatures:
    """images: float64 `[features, 2]` each, the numbers of the features that were packed, on the host; tokens:
    features a tile."""

    def __init__(self, images: list[Tensor], tokens_per_tile: int) -> None:
        self.images, self.tokens_per_tile = images, tokens_per_tile

    def map_groups(self, groups: Tensor, packed: Tensor) -> Tensor:
        """Return long `[features]`, the first feature of each feature's group in an image as it was packed; -1 stays.

        groups: long `[tiles, tokens]`, first of each feature's group in its tile. packed: the image's numbers.
        """
        ids = to_device(self.get_feature_ids(packed), groups.device)
        tile, token = ids // self.tokens_per_tile, ids % self.tokens_per_tile
        places = torch.arange(len(ids), dtype=torch.long, device=ids.device)
        own = groups[tile.clamp(min=0), token]
        # Newlines: each for itself.
        group = torch.where(
            ids < 0, groups.numel() + places, torch.where(own < 0, -1, tile * self.tokens_per_tile + own)
        )
        return find_first_of_group(group[None], groups.numel() + len(ids))[0]

    @staticmethod
    def get_feature_ids(packed: Tensor) -> Tensor:
        """long `[features]`: for each feature of an image the number of the one that was packed, -1 for a newline."""
        ids = packed[:, 0].round().long()
        if not torch.equal(packed[:, 1], _check(ids.double())):
            raise UnsupportedSetupError(
                "This image has so many tiles that the model interpolates its features, so they are no patches of the "
                "tower. Use a smaller image, or a method that acts after the tower."
            )
        return ids


def build_feature_ids(tiles: int, tokens: int, device: torch.device, start: int = 0) -> Tensor:
    """float64 `[tiles, tokens, 2]`: what stands for the features of an image while it is packed."""
    ids = torch.arange(start, start + tiles * tokens, dtype=torch.float64, device=device)
    # A second channel, so that interpolated numbers do not pass for numbers.
    return torch.stack([ids, _check(ids)], -1).view(tiles, tokens, 2)


def build_newline_id(device: torch.device) -> Tensor:
    """float64 `[2]`: what stands for a newline."""
    return torch.tensor([-1, _check(-1)], dtype=torch.float64, device=device)


def _check(ids: Any) -> Any:
    return (ids * ids + 3 * ids) % 9973
