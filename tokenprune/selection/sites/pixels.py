# SPDX-License-Identifier: Apache-2.0
"""Base classes of methods that act on pixels, before the vision tower (PRE_ENCODER)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tokenprune.selection.method import Method, Site

if TYPE_CHECKING:
    from tokenprune.selection.images import InputImage


@dataclass(frozen=True)
class ResizeMethod(Method):
    """Base class of methods that resize images before encoding (PRE_ENCODER). A subclass implements `compute_shares`.

    Attributes:
        takes_tokens: True if `keep` may be a number of tokens. Larger images are then resized to this number, and
            `compute_shares` is not called.

    Examples:
        >>> class Smaller(ResizeMethod):
        ...     def compute_shares(self, images, keep, per):
        ...         return [keep] * len(images)
        >>> Smaller().compute_shares([image, image], keep=0.25, per="image")
        [0.25, 0.25]
    """

    site: ClassVar[Site] = Site.PRE_ENCODER
    takes_tokens: ClassVar[bool] = False

    @property
    def videos(self) -> bool:
        """True if video frames are also resized, each by `keep`. An option of some methods."""
        return False

    @property
    def reads_question(self) -> bool:
        """True if `compute_shares` reads the question of an image, which requires the full processor."""
        return False

    @property
    def depends_on_content(self) -> bool:
        """True if images of one call may get different shares."""
        return False

    def compute_shares(self, images: Sequence[InputImage], keep: float, per: str) -> list[float]:
        """Return the share of its visual tokens that each image keeps, in (0, 1].

        Args:
            images: Images of a processor call.
            keep: Requested share.
            per: Scope of the budget. See `Budget`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_shares()")

    def check_keep(self, keep: float) -> None:
        """Raise BudgetError if the method cannot reach the share `keep`."""


@dataclass(frozen=True)
class ImageChooser(Method):
    """Base class of methods that choose which images of a prompt to encode. A subclass implements `choose`.

    Examples:
        >>> class FirstImages(ImageChooser):
        ...     def choose(self, question, count, max_images):
        ...         return list(range(min(count, max_images)))
        >>> FirstImages().choose("What is shown?", count=5, max_images=2)
        [0, 1]
    """

    site: ClassVar[Site] = Site.PRE_ENCODER
    default_keep: ClassVar[float] = 1.0

    def choose(self, question: str, count: int, max_images: int) -> list[int]:
        """Return the indices of the images to encode, sorted, at least one.

        Args:
            question: Text after the last image.
            count: Number of images in the prompt.
            max_images: Maximum number of images that `keep` allows.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement choose()")
