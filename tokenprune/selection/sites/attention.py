# SPDX-License-Identifier: Apache-2.0
"""The base of methods that remove nothing, and change attention in prefill (ATTENTION)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tokenprune.selection.method import Method, Site

if TYPE_CHECKING:
    from tokenprune.selection.frames import Visual


@dataclass(frozen=True)
class AttentionPattern(Method):
    """Base of the methods that remove nothing, and change which tokens attend to which in prefill (ATTENTION).

    A subclass implements `block_starts`. It may make fields, which are options then, of `dense_layers` and
    `position_mode`.
    """

    site: ClassVar[Site] = Site.ATTENTION
    default_keep: ClassVar[float] = 1.0
    removes: ClassVar[bool] = False

    @property
    def dense_layers(self) -> Sequence[int]:
        """Decoder layers, counted from 0, that keep full attention."""
        return ()

    @property
    def position_mode(self) -> str:
        """Return "sequential", which keeps the positions of full attention, or "reuse", which starts every block where
        the first one starts."""
        return "sequential"

    def block_starts(self, visuals: Sequence[Visual], end: int) -> list[int] | str:
        """Return where in a prompt of `end` tokens each context block starts, and at last where the part that attends
        to everything does; or, in words, why the prompt keeps full attention. What comes before the first block is the
        sink."""
        raise NotImplementedError(f"{type(self).__name__} does not implement block_starts()")
