# SPDX-License-Identifier: Apache-2.0
"""Squares of patches that become one visual token and merge as one unit (pixel shuffle and pooling after a tower).

Two units merge patch by patch: each patch merges with the patch at the same position of the other unit. The projector
then computes the same for a merged unit as for an unmerged unit. To methods a unit is a token.
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
    """Return the indices of a grid's patches unit by unit, shape (height * width,), int64.

    Units are in raster order, and so are the patches of each unit.
    """
    indices = torch.arange(height * width, device=device).view(height // side, side, -1, side)
    return indices.transpose(1, 2).flatten()


@dataclass(frozen=True)
class Squares:
    """The units of a square grid of patches.

    Attributes:
        side: Number of patches on a side of a unit.
        num_leading: Number of tokens before the patches (class tokens). They do not belong to a unit.
    """

    side: int
    num_leading: int

    @property
    def size(self) -> int:
        """Number of patches of a unit."""
        return self.side**2

    def count_units(self, tokens: int) -> int:
        """Return the number of units of an image with `tokens` tokens.

        Raises:
            UnsupportedSetupError: If the patches are not a square grid of complete units.
        """
        patches = tokens - self.num_leading
        height = math.isqrt(max(0, patches))
        if not patches or height * height != patches or height % self.side:
            raise UnsupportedSetupError(
                f"{patches} patches of the vision tower are not a square grid of {self.side} x {self.side} units. "
                "Use a method that acts after the tower."
            )
        return patches // self.size

    def to_unit_counts(self, tokens: list[int] | None) -> list[int] | None:
        """Convert numbers of tokens to numbers of units."""
        return None if tokens is None else [(count - self.num_leading) // self.size for count in tokens]

    def build_order(self, tokens: int, device: torch.device) -> Tensor:
        """Return the indices of the patches unit by unit, relative to the first patch; see `order_by_units`."""
        height = math.isqrt(self.count_units(tokens) * self.size)
        return order_by_units(height, height, self.side, device)

    def fold(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Concatenate the values of the patches of each unit.

        Args:
            x: Values of each token, shape (batch, tokens, channels).
            order: Result of `build_order`, or None if the patches are already in order.

        Returns:
            Values of each unit, shape (batch, units, size * channels).
        """
        patches = x[:, self.num_leading :]
        patches = patches if order is None else patches[:, order]
        return patches.reshape(len(x), -1, self.size * x.shape[-1])

    def spread(self, merge: Merge, order: Tensor | None) -> Merge:
        """Convert a merge of units to a merge of tokens. After the merge the tokens are in order, unit by unit.

        Args:
            order: Result of `build_order`, or None if the tokens are already in order.
        """
        offsets = torch.arange(self.size, device=merge.keep.device)

        def patches(units: Tensor) -> Tensor:
            return (units.unsqueeze(-1) * self.size + offsets).flatten(1)

        keep, source = patches(merge.keep), patches(merge.source)
        if order is not None:
            keep, source = order[keep], order[source]
        leading = torch.arange(self.num_leading, device=keep.device).expand(len(keep), -1)
        return Merge(
            torch.cat([leading, keep + self.num_leading], dim=1),
            source + self.num_leading,
            patches(merge.target) + self.num_leading,
            merge.num_tokens * self.size + self.num_leading,
            None if merge.num_kept is None else [count * self.size + self.num_leading for count in merge.num_kept],
            None if merge.num_merged is None else merge.num_merged * self.size,
            merge.is_drop,
        )

    def find_unit_owners(self, owner: Tensor) -> Tensor:
        """Return the first unit of the group of each unit, shape (batch, units), int64.

        Args:
            owner: Group of each token, shape (batch, tokens), int64; see `Units.owner`.
        """
        tokens = owner.shape[1]
        first = self.build_order(tokens, owner.device)[:: self.size]
        return find_first_of_group(owner[:, self.num_leading :][:, first], tokens)
