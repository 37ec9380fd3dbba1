# SPDX-License-Identifier: Apache-2.0
"""The promise of the tuner: the accuracy that may be lost, the certainty of that, and the speed to reach."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError
from tokenprune_bench.tuning.betting import count_questions_needed


@dataclass(frozen=True)
class Promise:
    """The patched model's mean score is less than `max_drop` below the unpatched one's, with this confidence.

    max_drop: in points of the metric, as a share: 0.01 is from 80 % to 79 %. confidence: in (0, 1); over all data that
    could have been drawn, the share of tunings whose choice keeps the promise is at least this. max_kind_drop: the
    same for each kind of question, measured on the held-out questions, without confidence; None: no limit.
    target_ttft: "0.5x" of the unpatched model's time to the first token, or "120ms"; None: it does not count.
    Raises OptionError.
    """

    max_drop: float = 0.01
    confidence: float = 0.95
    max_kind_drop: float | None = None
    target_ttft: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_drop", "max_kind_drop"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise OptionError(f"{name} must lie between 0 and 1 (0.01 is one point), not {value}")
        if not 0.5 <= self.confidence < 1:
            raise OptionError(f"confidence must be at least 0.5 and below 1, not {self.confidence}")
        if self.target_ttft is not None:
            self.ttft_limit()

    @property
    def level(self) -> float:
        return 1 - self.confidence

    @property
    def questions_needed(self) -> int:
        """The least number of held-out questions that can prove the promise, if not a single answer changes."""
        return count_questions_needed(self.max_drop, self.level)

    def ttft_limit(self) -> tuple[float, str]:
        """Return the limit of `target_ttft` and what it is a limit of: "ratio" or "ms"."""
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(x|ms)\s*", self.target_ttft)
        if found is None or float(found[1]) == 0:
            raise OptionError(f'target_ttft {self.target_ttft!r}: write "0.5x" of the unpatched model, or "120ms"')
        return float(found[1]), {"x": "ratio", "ms": "ms"}[found[2]]

    def is_reached(self, timing: dict[str, Any]) -> bool:
        """Return True if a timing (of `bench.timing.compare`) reaches `target_ttft`, by its median."""
        limit, what = self.ttft_limit()
        return timing[f"ttft_{what}"]["p50"] <= limit


def read_share(text: str, name: str = "--max-drop") -> float:
    """Read "1%", "1pt" or "0.01"; raises OptionError."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|pts?)?\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < value < 1:
        raise OptionError(
            f"{name} {text!r} is no drop: write 1%, 1pt or 0.01, all of which are one point of the metric"
        )
    return value


def format_points(share: float) -> str:
    """Return a difference of scores as people say it: 0.015 is "1.5 points"."""
    number = f"{100 * share:.2f}".rstrip("0").rstrip(".")
    return f"{number} point{'' if number == '1' else 's'}"


__all__ = ["Promise", "format_points", "read_share"]
