# SPDX-License-Identifier: Apache-2.0
"""Patches that become one visual token, and so merge as one: pixel shuffle and pooling after a tower.

A unit is a square of neighbouring patches. Two units merge patch by patch: each with the one at the same place of the
other. What a projector makes of a whole unit it then makes of a merged one, and to methods a unit is a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.towers.packed_features import find_first_of_group
from tokenprune.kernels.merging import Merge

if TYPE_CHECKING:
    from torch import Tensor


def order_by_units(height: int, width: int, side: int, device: torch.device) -> Tensor:
    """Return the places of a grid's patches unit by unit, long `[height * width]`. Units, and the patches in each, are
    in order of rows."""
    places = torch.arange(height * width, device=device).view(height // side, side, -1, side)
    return places.transpose(1, 2).flatten()


@dataclass(frozen=True)
class Squares:
    """The units of a square grid of patches.

    side: patches on a side of a unit. ahead: tokens before the patches (class tokens), which are in no unit.
    """

    side: int
    num_leading: int

    @property
    def size(self) -> int:
        """Patches in a unit."""
        return self.side**2

    def count_units(self, tokens: int) -> int:
        """Return how many units an image has of which `tokens` enter the tower.

        Raises UnsupportedSetupError if its patches are no square grid of whole units.
        """
        patches = tokens - self.num_leading
        height = math.isqrt(max(0, patches))
        if not patches or height * height != patches or height % self.side:
            raise UnsupportedSetupError(
                f"{patches} patches of the vision tower are no square grid of units of {self.side} x {self.side} "
                "patches. Use a method that acts after the tower."
            )
        return patches // self.size

    def to_unit_counts(self, tokens: list[int] | None) -> list[int] | None:
        """Return how many units these numbers of tokens are."""
        return None if tokens is None else [(number - self.num_leading) // self.size for number in tokens]

    def build_order(self, tokens: int, device: torch.device) -> Tensor:
        """Return the places of the patches unit by unit, counted from the first patch, see `order_by_units`."""
        height = math.isqrt(self.count_units(tokens) * self.size)
        return order_by_units(height, height, self.side, device)

    def fold(self, x: Tensor, order: Tensor | None) -> Tensor:
        """`[B, n, D]` -> `[B, units, size * D]`: what is known of a unit's patches, end to end.

        order: see `order`; None where the patches stand unit by unit already.
        """
        patches = x[:, self.num_leading :]
        patches = patches if order is None else patches[:, order]
        return patches.reshape(len(x), -1, self.size * x.shape[-1])

    def spread(self, merge: Merge, order: Tensor | None) -> Merge:
        """Return the merge of tokens that a merge of units is. order: how the tokens stand before it; after it they
        stand unit by unit."""
        places = torch.arange(self.size, device=merge.keep.device)

        def patches(units: Tensor) -> Tensor:
            return (units.unsqueeze(-1) * self.size + places).flatten(1)

        keep, source = patches(merge.keep), patches(merge.source)
        if order is not None:
            keep, source = order[keep], order[source]
        ahead = torch.arange(self.num_leading, device=keep.device).expand(len(keep), -1)
        return Merge(
            torch.cat([ahead, keep + self.num_leading], dim=1),
            source + self.num_leading,
            patches(merge.target) + self.num_leading,
            merge.num_tokens * self.size + self.num_leading,
            None if merge.num_kept is None else [number * self.size + self.num_leading for number in merge.num_kept],
            None if merge.num_merged is None else merge.num_merged * self.size,
            merge.is_drop,
        )

    def find_unit_owners(self, owner: Tensor) -> Tensor:
        """long `[B, tokens]`, for each token that entered the one that it is part of -> long `[B, units]`.

        What is returned is for each unit the first that is part of the same.
        """
        tokens = owner.shape[1]
        first = self.build_order(tokens, owner.device)[:: self.size]
        return find_first_of_group(owner[:, self.num_leading :][:, first], tokens)
