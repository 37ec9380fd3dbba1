# SPDX-License-Identifier: Apache-2.0
"""Remember how many visual tokens a prompt would have had without the method that acted on its pixels."""

from __future__ import annotations

from collections.abc import Sequence

_CALLS = 64  # of a processor that are remembered


class PixelCounts:
    """Remembers of a processor's last calls how many visual tokens their images make, and would have made.

    Nothing travels from a processor to the model but tensors, so a prompt is recognised by the number of its tokens.
    """

    def __init__(self) -> None:
        # Replaced, not changed: processors are used from several threads.
        self._calls: tuple[tuple[int, int], ...] = ()

    def record(self, num_tokens: int, num_unpruned: int) -> None:
        """Record the number of visual tokens of one call, with the method and without it."""
        self._calls = (*self._calls[1 - _CALLS :], (num_tokens, num_unpruned))

    def find_unpruned(self, rows: Sequence[int]) -> int | None:
        """Return the visual tokens that a batch would have had; None where that is not known.

        rows: the visual tokens of each of its rows. They come from one call, copied for beams and samples or not, or
        each row from a call of its own.
        """
        rows = [count for count in rows if count]
        for copies in range(1, len(rows) + 1):
            own = rows[::copies]
            if rows == [count for count in own for _ in range(copies)] and (found := self._find(sum(own))) is not None:
                return copies * found
        found_each = [found for count in rows if (found := self._find(count)) is not None]
        return sum(found_each) if len(found_each) == len(rows) else None

    def _find(self, made: int) -> int | None:
        """Return the full count of the calls of `made` tokens; None if there are none, or they differ in it."""
        full = {full for known, full in self._calls if known == made}
        return full.pop() if len(full) == 1 else None
