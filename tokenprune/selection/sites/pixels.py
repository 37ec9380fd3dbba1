# SPDX-License-Identifier: Apache-2.0
"""The bases of methods that act on pixels, ahead of the encoder (PRE_ENCODER)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tokenprune.selection.method import Method, Site

if TYPE_CHECKING:
    from tokenprune.selection.images import InputImage


@dataclass(frozen=True)
class ResizeMethod(Method):
    """Base of the methods that resize images before they are encoded (PRE_ENCODER); a subclass implements `shares`.

    takes_tokens: True if `keep` may be a number of tokens: larger images then shrink to that many, and `shares` is not
    asked.
    """

    site: ClassVar[Site] = Site.PRE_ENCODER
    takes_tokens: ClassVar[bool] = False

    @property
    def videos(self) -> bool:
        """True if frames of videos shrink too, each by `keep`; an option of some methods."""
        return False

    @property
    def reads_question(self) -> bool:
        """True if `shares` looks at the question of an image, which needs the whole processor."""
        return False

    @property
    def depends_on_content(self) -> bool:
        """True if one image may get another share than the next."""
        return False

    def compute_shares(self, images: Sequence[InputImage], keep: float, per: str) -> list[float]:
        """Return the share of its visual tokens, in (0, 1], that each image of a processor's call gets. per: see
        `Budget`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_shares()")

    def check_keep(self, keep: float) -> None:
        """Raise BudgetError if the method cannot reach the share `keep`."""


@dataclass(frozen=True)
class ImageChooser(Method):
    """Base of the methods that choose which of a prompt's images are encoded (PRE_ENCODER); a subclass implements
    `choose`."""

    site: ClassVar[Site] = Site.PRE_ENCODER
    default_keep: ClassVar[float] = 1.0

    def choose(self, question: str, count: int, most: int) -> list[int]:
        """Return which of the `count` images of a prompt to encode, sorted, at least one. question: the text after the
        last image. most: how many `keep` allows."""
        raise NotImplementedError(f"{type(self).__name__} does not implement choose()")
