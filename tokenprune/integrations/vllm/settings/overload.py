# SPDX-License-Identifier: Apache-2.0
"""The policy under load: a profile for requests that choose none, by how many are in flight, that does not flutter.

A burst passes every number on its way up and again on its way down. So a step that was taken is left only well below
the number at which it was taken (hysteresis), and no step is left before it has been in force for a while (dwell):
briefly on the way up, where waiting costs time, and longer on the way down, where it costs what images lose.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import short
from tokenprune.integrations.vllm.settings.configuration import check_key

_MOST = 32  # steps
_LONGEST = 3600.0  # seconds of rise and dwell


@dataclass(frozen=True)
class Overload:
    """A server's rule under load.

    steps:    from so many requests in flight on, ascending, a step is taken; step 0 is below the first.
    profiles: the profile of each step from 1 on.
    release:  a step is left, down, below this share of its number; 1: at the number itself.
    rise:     seconds that a step is in force at least before a higher one is taken.
    dwell:    seconds that a step is in force at least before a lower one is taken.
    """

    steps: tuple[int, ...]
    profiles: tuple[str, ...]
    release: float = 0.5
    rise: float = 1.0
    dwell: float = 5.0

    @classmethod
    def from_json(cls, given: Any, names: Collection[str]) -> Overload:
        """Read the value of the key `overload`. names: of the profiles that there are. Raises OptionError."""
        wanted = '{"in_flight": [8, 32], "profiles": ["normal", "fast"]}: a profile for each number of requests'
        required, options = {"in_flight", "profiles"}, ("release", "rise", "dwell")
        known = isinstance(given, dict) and required <= set(given) <= required | set(options)
        _check(known, f"{wanted}; and no more than {', '.join(options)} beside them")
        steps, profiles = given["in_flight"], given["profiles"]
        _check(isinstance(steps, list) and isinstance(profiles, list), wanted)
        _check(0 < len(steps) == len(profiles) <= _MOST, wanted)
        whole = all(isinstance(step, int) and not isinstance(step, bool) for step in steps)
        _check(whole and steps[0] > 0, f"of whole numbers from 1 on, not {short(steps)}")
        _check(all(a < b for a, b in itertools.pairwise(steps)), f"ascending, not {short(steps)}")
        for name in profiles:
            there = isinstance(name, str) and name in names
            _check(there, f"of profiles that are there ({', '.join(names)}), not {short(name)}")
        release, rise, dwell = (_number(given.get(key, getattr(cls, key))) for key in options)
        _check(0 < release <= 1, f"with a release in (0, 1], as 0.5, not {short(given.get('release'))}")
        for key, value in (("rise", rise), ("dwell", dwell)):
            seconds = f"with a {key} of 0 to {_LONGEST:g} seconds, not {short(given.get(key))}"
            _check(0 <= value <= _LONGEST, seconds)
        return cls(tuple(steps), tuple(profiles), release, rise, dwell)

    def find_step(self, in_flight: int, step: int = 0) -> int:
        """Return the step that a load asks for while `step` is in force, whatever the dwell."""
        up = bisect.bisect_right(self.steps, in_flight)
        while step > up and in_flight < self.release * self.steps[step - 1]:
            step -= 1
        return max(up, step)


@dataclass
class OverloadState:
    """The rule at work in one front end: the step in force, and since when."""

    rule: Overload
    step: int = 0
    _since: float = field(default=-math.inf, repr=False)

    def get_step(self, in_flight: int, now: float) -> int:
        """Return the step for a request that would find so many others in flight. now: seconds of a clock that never
        goes back."""
        wanted, rule = self.rule.find_step(in_flight, self.step), self.rule
        may = now - self._since >= (rule.rise if wanted > self.step else rule.dwell)
        return wanted if may else self.step

    def take(self, in_flight: int, now: float) -> int:
        """Return the same for a request that comes, which puts it in force. Within any `s` seconds it goes down
        `s / dwell + 1` times at most."""
        if (step := self.get_step(in_flight, now)) != self.step:
            self.step, self._since = step, now
        return self.step


def _number(value: Any) -> float:
    """Return a number of a setting; for all else nan, which is in no range."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _check(condition: bool, wanted: str) -> None:
    check_key(condition, "overload", wanted)
