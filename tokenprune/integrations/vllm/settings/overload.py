# SPDX-License-Identifier: Apache-2.0
"""The server key `overload`: the profile for requests that select none, by the number of requests in flight.

Load rises and falls in bursts, so the policy needs hysteresis and a minimum time per step. A step that was entered at
a number is left only well below that number. It stays in force for `rise` seconds before a higher step, which should
come soon, and for `dwell` seconds before a lower step.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import shorten
from tokenprune.integrations.vllm.settings.configuration import check_key

_MAX_STEPS = 32
_MAX_SECONDS = 3600.0  # of rise and dwell


@dataclass(frozen=True)
class Overload:
    """Profiles under load.

    Args:
        steps: Ascending numbers of requests in flight that enter each step. Step 0 is below the first.
        profiles: Profile of each step from step 1 on.
        release: A step is left below this share of its number. 1 leaves it at the number itself.
        rise: Minimum seconds in a step before a higher step is entered.
        dwell: Minimum seconds in a step before a lower step is entered.
    """

    steps: tuple[int, ...]
    profiles: tuple[str, ...]
    release: float = 0.5
    rise: float = 1.0
    dwell: float = 5.0

    @classmethod
    def from_json(cls, value: Any, names: Collection[str]) -> Overload:
        """Read the value of the key `overload`; raise OptionError. names: the server's profiles."""
        example = '{"in_flight": [8, 32], "profiles": ["normal", "fast"]}: a profile for each number of requests'
        required, options = {"in_flight", "profiles"}, ("release", "rise", "dwell")
        is_known = isinstance(value, dict) and required <= set(value) <= required | set(options)
        _check(is_known, f"{example}; and no more than {', '.join(options)} beside them")
        steps, profiles = value["in_flight"], value["profiles"]
        _check(isinstance(steps, list) and isinstance(profiles, list), example)
        _check(0 < len(steps) == len(profiles) <= _MAX_STEPS, example)
        are_ints = all(isinstance(step, int) and not isinstance(step, bool) for step in steps)
        _check(are_ints and steps[0] > 0, f"of whole numbers from 1 on, not {shorten(steps)}")
        _check(all(a < b for a, b in itertools.pairwise(steps)), f"ascending, not {shorten(steps)}")
        for name in profiles:
            is_known = isinstance(name, str) and name in names
            _check(is_known, f"of known profiles ({', '.join(names)}), not {shorten(name)}")
        release, rise, dwell = (_number(value.get(key, getattr(cls, key))) for key in options)
        _check(0 < release <= 1, f"with a release in (0, 1], as 0.5, not {shorten(value.get('release'))}")
        for key, seconds in (("rise", rise), ("dwell", dwell)):
            expected = f"with a {key} of 0 to {_MAX_SECONDS:g} seconds, not {shorten(value.get(key))}"
            _check(0 <= seconds <= _MAX_SECONDS, expected)
        return cls(tuple(steps), tuple(profiles), release, rise, dwell)

    def find_step(self, in_flight: int, step: int = 0) -> int:
        """Return the step for a load while `step` is in force, without the minimum times."""
        up = bisect.bisect_right(self.steps, in_flight)
        while step > up and in_flight < self.release * self.steps[step - 1]:
            step -= 1
        return max(up, step)


@dataclass
class OverloadState:
    """The current step of one front end."""

    rule: Overload
    step: int = 0
    _since: float = field(default=-math.inf, repr=False)

    def get_step(self, in_flight: int, now: float) -> int:
        """Return the step for a new request without entering it. now: seconds of a monotonic clock."""
        step, rule = self.rule.find_step(in_flight, self.step), self.rule
        may_change = now - self._since >= (rule.rise if step > self.step else rule.dwell)
        return step if may_change else self.step

    def take(self, in_flight: int, now: float) -> int:
        """Return the step for a new request and enter it. In `s` seconds it falls at most `s / dwell + 1` times."""
        if (step := self.get_step(in_flight, now)) != self.step:
            self.step, self._since = step, now
        return self.step


def _number(value: Any) -> float:
    """Return a number of the configuration as a float. Other values become NaN, which is out of every range."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _check(condition: bool, expected: str) -> None:
    check_key(condition, "overload", expected)
