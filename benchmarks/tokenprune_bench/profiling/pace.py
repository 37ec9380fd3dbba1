# SPDX-License-Identifier: Apache-2.0
"""The remaining time of a run, estimated from its pace so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Pace:
    """The pace of a run, over all of it: batches may take minutes each. clock: seconds, of any start."""

    clock: Callable[[], float] = time.monotonic
    _start: tuple[float, int] | None = field(default=None, init=False)

    def format_remaining(self, done: int, total: int) -> str:
        """Return the time left, as in "about 3 min left"; "" before anything was done, and at the end.

        What was there at the first call, such as answers of an earlier run, took no time.
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
