# SPDX-License-Identifier: Apache-2.0
"""The base of methods that drop units of patches at the input of a block of the vision tower (IN_ENCODER)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tokenprune.selection.sites.encoder import TowerMethod

if TYPE_CHECKING:
    from torch import Tensor

Sees = Literal["pixels", "hidden", "mean", "change"]


@dataclass(frozen=True)
class UnitDropper(TowerMethod):
    """Base of the methods that drop units at the input of a block of the vision tower, the first by default.

    A unit is the patches that become one visual token. A subclass implements `keep_units`: it sees one image or video
    and never a model. Places, attention's pieces, and what the decoder gets, are the engine's.

    chooses_count: False in a subclass whose `keep_units` keeps exactly `most`, which vLLM asks of one that does not
    see pixels.
    removes: False in a subclass whose units come back by `choose_guides` at the end of the tower; a frame of a video is
    an image then. stabilise: for so many blocks they are still attended to; make it a field to offer the choice.
    """

    chooses_count: ClassVar[bool] = True
    stabilise = 0  # not annotated: no option, unless a subclass makes it a field

    @property
    def sees(self) -> Sees:
        """The values that `keep_units` gets: the image's "pixels"; the "hidden" states that enter the block, of all
        patches of a unit, or their "mean"; or of each patch how long the "change" is that the block before made."""
        return "pixels"

    @property
    def reads_colours(self) -> str | None:
        """Why `keep_units` needs colours in 0..1, which takes the processor; None where normalised ones do as well."""
        return None

    def block(self, depth: int) -> int:
        """Return the index of the block, of a tower's `depth`, at whose input units leave."""
        return 0

    def checked_block(self, depth: int) -> int:
        """Return `block(depth)`; raises OptionError for a block that there is not."""
        block = self.block(depth)
        self._check(0 <= block < depth, f"the vision tower has {depth} blocks, and no block {block}")
        return block

    def keep_units(self, pixels: Tensor, most: int) -> Tensor:
        """Return which units of one image or video stay, bool `[T, H, W]`: at least one, and at most `most`.

        pixels: float32 `[T, H, W, P]`, for each of T temporal patches (1 of an image) the grid of H x W units, with the
        P values of all pixels of a unit: colours in 0..1, or normalised ones (see `reads_colours`); or the P hidden
        values (see `sees`).
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement keep_units()")

    def choose_guides(self, gone: Tensor, kept: Tensor) -> Tensor:
        """Return for each patch of an image that left, float32 `[R, D]` at the block, T of those that stayed, `[n, D]`:
        long `[R, T]`. It comes back as it was, moved as far as these moved on average."""
        raise NotImplementedError(f"{type(self).__name__} does not implement choose_guides()")
