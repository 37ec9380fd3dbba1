# SPDX-License-Identifier: Apache-2.0
"""Base class of methods that change attention in prefill and remove no token (ATTENTION)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tokenprune.selection.method import Method, Site

if TYPE_CHECKING:
    from tokenprune.selection.frames import Visual


@dataclass(frozen=True)
class AttentionPattern(Method):
    """Base class of methods that restrict which tokens attend to which in prefill (ATTENTION). No token is removed.

    A subclass implements `block_starts`. It may turn `dense_layers` and `position_mode` into fields to make them
    options.

    Examples:
        >>> class TwoBlocks(AttentionPattern):
        ...     def block_starts(self, visuals, end):
        ...         frames = [frame for visual in visuals for frame in visual.frames]
        ...         return [frames[0][0], frames[len(frames) // 2][0], frames[-1][1]]
        >>> from tokenprune.selection import Visual
        >>> TwoBlocks().block_starts([Visual("video", ((4, 8), (8, 12)))], end=20)
        [4, 8, 12]
    """

    site: ClassVar[Site] = Site.ATTENTION
    default_keep: ClassVar[float] = 1.0
    removes: ClassVar[bool] = False

    @property
    def dense_layers(self) -> Sequence[int]:
        """Indices of the decoder layers that keep full attention."""
        return ()

    @property
    def position_mode(self) -> str:
        """Position ids of the blocks.

        "sequential" keeps the positions of full attention. With "reuse", every block starts at the position of the
        first block.
        """
        return "sequential"

    def block_starts(self, visuals: Sequence[Visual], end: int) -> list[int] | str:
        """Return the start of each block, followed by the start of the text that attends to everything.

        Tokens before the first block are the attention sink: every block attends to them.

        Args:
            visuals: Images and videos of the prompt.
            end: Number of tokens in the prompt.

        Returns:
            Ascending positions, or the reason why this prompt keeps full attention.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement block_starts()")
