# SPDX-License-Identifier: Apache-2.0
"""Promise of the tuner: allowed loss of accuracy, confidence, and target speed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError
from tokenprune_bench.tuning.betting import count_questions_needed


@dataclass(frozen=True)
class Promise:
    """The patched model's mean score is less than `max_drop` below the unpatched score, with this confidence.

    Args:
        max_drop: Allowed drop as a share: 0.01 is from 80 % to 79 %.
        confidence: In [0.5, 1). Over all data sets that could be drawn, at least this share of tunings keeps the
            promise.
        max_kind_drop: Allowed drop of each kind of question, measured without confidence. None for no limit.
        target_ttft: Time to first token to reach: "0.5x" of the unpatched model, or "120ms". None for no target.

    Raises:
        OptionError: If a value is out of range.
    """

    max_drop: float = 0.01
    confidence: float = 0.95
    max_kind_drop: float | None = None
    target_ttft: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_drop", "max_kind_drop"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise OptionError(f"{name} must be between 0 and 1 (0.01 is one point), not {value}.")
        if not 0.5 <= self.confidence < 1:
            raise OptionError(f"confidence must be at least 0.5 and below 1, not {self.confidence}.")
        if self.target_ttft is not None:
            self.ttft_limit()

    @property
    def level(self) -> float:
        """Significance level of the test."""
        return 1 - self.confidence

    @property
    def questions_needed(self) -> int:
        """Minimum number of held-out questions that can prove the promise, if no answer changes."""
        return count_questions_needed(self.max_drop, self.level)

    def ttft_limit(self) -> tuple[float, str]:
        """Return the limit in `target_ttft` and its unit, "ratio" or "ms"."""
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(x|ms)\s*", self.target_ttft)
        if match is None or float(match[1]) == 0:
            raise OptionError(
                f'target_ttft={self.target_ttft!r} is not valid. Use "0.5x" (of the unpatched time) or "120ms".'
            )
        return float(match[1]), {"x": "ratio", "ms": "ms"}[match[2]]

    def is_reached(self, timing: dict[str, Any]) -> bool:
        """Return True if the median of a timing (see `timing.compare_times`) reaches `target_ttft`."""
        limit, unit = self.ttft_limit()
        return timing[f"ttft_{unit}"]["p50"] <= limit


def read_share(text: str, name: str = "--max-drop") -> float:
    """Parse "1%", "1pt" or "0.01" into a share.

    Raises:
        OptionError: If the text is not a share between 0 and 1.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|pts?)?\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value < 1:
        raise OptionError(f"{name}={text!r} is not a valid drop. 1%, 1pt and 0.01 all mean one point of the metric.")
    return value


def format_points(share: float) -> str:
    """Format a difference of scores in points: 0.015 becomes "1.5 points"."""
    text = f"{100 * share:.2f}".rstrip("0").rstrip(".")
    return f"{text} point{'' if text == '1' else 's'}"


__all__ = ["Promise", "format_points", "read_share"]
