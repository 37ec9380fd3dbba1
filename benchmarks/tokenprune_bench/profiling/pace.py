# SPDX-License-Identifier: Apache-2.0
"""Remaining time of a run, estimated from its pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Pace:
    """Average pace of a run since the first call.

    Args:
        clock: Returns the time in seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _start: tuple[float, int] | None = field(default=None, init=False)

    def format_remaining(self, done: int, total: int) -> str:
        """Format the remaining time, as in "about 3 min left". Empty before the first progress and at the end.

        Items that are done at the first call, such as stored answers, do not count for the pace.
        """
        now = self.clock()
        if self._start is None or done < self._start[1]:
            self._start = now, done
        start, before = self._start
        if done <= before or done >= total:
            return ""
        seconds = (now - start) / (done - before) * (total - done)
        if seconds < 90:
            return f"about {max(1, round(seconds))} s left"
        return f"about {round(seconds / 60)} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"
