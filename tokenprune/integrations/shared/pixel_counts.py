# SPDX-License-Identifier: Apache-2.0
"""Record the number of visual tokens that a prompt would have without the method that acted on its pixels."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_CALLS = 64


class PixelCounts:
    """Token counts of the last calls of a processor, with and without the method.

    A processor passes only tensors to the model, so a prompt is recognized by its number of visual tokens.
    """

    def __init__(self) -> None:
        # The tuple is replaced and never changed, because several threads may use one processor.
        self._calls: tuple[tuple[int, int], ...] = ()

    def record(self, num_tokens: int, num_unpruned: int) -> None:
        """Record the number of visual tokens of one call, with and without the method."""
        self._calls = (*self._calls[1 - _MAX_CALLS :], (num_tokens, num_unpruned))

    def find_unpruned(self, rows: Sequence[int]) -> int | None:
        """Return the number of visual tokens that a batch would have without the method, or None if it is not known.

        Args:
            rows: Number of visual tokens of each row. The rows come from one call (and may be repeated for beams and
                samples), or from one call each.
        """
        rows = [count for count in rows if count]
        for copies in range(1, len(rows) + 1):
            distinct = rows[::copies]
            is_repeated = rows == [count for count in distinct for _ in range(copies)]
            if is_repeated and (num_unpruned := self._find(sum(distinct))) is not None:
                return copies * num_unpruned
        counts = [num_unpruned for count in rows if (num_unpruned := self._find(count)) is not None]
        return sum(counts) if len(counts) == len(rows) else None

    def _find(self, num_tokens: int) -> int | None:
        """Return the unpruned count of calls with `num_tokens` tokens, or None if there is none or they differ."""
        counts = {num_unpruned for recorded, num_unpruned in self._calls if recorded == num_tokens}
        return counts.pop() if len(counts) == 1 else None
