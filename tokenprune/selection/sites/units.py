# SPDX-License-Identifier: Apache-2.0
"""Base class of methods that drop units of patches inside the vision tower (IN_ENCODER)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tokenprune.selection.sites.encoder import TowerMethod

if TYPE_CHECKING:
    from torch import Tensor

UnitInput = Literal["pixels", "hidden", "mean", "change"]


@dataclass(frozen=True)
class UnitDropper(TowerMethod):
    """Base class of methods that drop units at the input of a vision tower block, by default the first.

    A unit is the set of patches that become one visual token. A subclass implements `keep_units`, which receives one
    image or video. The engine handles positions, attention and the output for the decoder.

    Attributes:
        chooses_count: False if `keep_units` keeps exactly `max_units` units. vLLM requires False unless `sees` is
            "pixels".
        removes: False if dropped units are restored at the end of the tower, with `choose_guides`. Each video frame is
            then treated as an image.
        stabilise: Number of blocks in which dropped units are still attended to. A field makes it an option.

    Examples:
        >>> class Contrast(UnitDropper):
        ...     def keep_units(self, pixels, max_units):
        ...         contrast = pixels.std(dim=-1)
        ...         keep = torch.zeros(contrast.shape, dtype=torch.bool)
        ...         keep.view(-1)[contrast.flatten().topk(max_units).indices] = True
        ...         return keep
        >>> Contrast().keep_units(torch.rand(1, 4, 4, 12), max_units=3).sum()
        tensor(3)
    """

    chooses_count: ClassVar[bool] = True
    stabilise = 0  # not annotated, so it is not an option unless a subclass makes it a field

    @property
    def sees(self) -> UnitInput:
        """Input of `keep_units`.

        "pixels" of the image, the "hidden" states at the input of the block for all patches of a unit, their "mean", or
        the length of the "change" that the block before made to each patch.
        """
        return "pixels"

    @property
    def reads_colours(self) -> str | None:
        """Reason why `keep_units` needs colors in [0, 1], which requires the processor.

        None if normalized pixel values are sufficient.
        """
        return None

    def block(self, depth: int) -> int:
        """Return the index of the block at whose input units are dropped, in a tower of `depth` blocks."""
        return 0

    def checked_block(self, depth: int) -> int:
        """Return `block(depth)`. Raise OptionError if there is no such block."""
        block = self.block(depth)
        self._check(0 <= block < depth, f"block {block} is out of range: the vision tower has {depth} blocks.")
        return block

    def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
        """Return the mask of kept units of one image or video, shape (T, H, W), bool.

        Args:
            pixels: Values of each unit, shape (T, H, W, P), float32, in T temporal patches (1 for an image) of H x W
                units. P are all pixel values of a unit (see `reads_colours`), or its hidden values (see `sees`).
            max_units: Maximum number of kept units. At least one must be kept.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement keep_units()")

    def choose_guides(self, dropped: Tensor, kept: Tensor) -> Tensor:
        """Return the indices of T kept patches that guide each dropped patch, shape (R, T), int64.

        A dropped patch is restored as its hidden state at the block plus the mean change of its guides since then.

        Args:
            dropped: Hidden states of the dropped patches at the block, shape (R, D), float32.
            kept: Hidden states of the kept patches at the block, shape (n, D), float32.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement choose_guides()")
