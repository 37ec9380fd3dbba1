# SPDX-License-Identifier: Apache-2.0
"""Table of advice (advice.toml): a setting to start from for each situation, with evidence.

Evidence (evidence.json, written by dev/evidence.py from the papers and benchmarks/results) is shown first if it has the
same kind of questions and a keep within a factor of `STEP`. Other evidence for the method is shown under "elsewhere".

Evidence is **strong** if all of these hold, else weak:

- At least 500 questions, about photographs or scans instead of drawn images (published benchmarks have thousands).
- A decoder of a third to three times the size of the user's decoder.
- Significance. For our runs: the paired 95 % interval of the gain over random dropping is above 0. For published
  numbers: a second paper has nearly the same result (within 2 points of accuracy or 15 % of a time), and neither paper
  is the method's own. For our times: p20 and p80 are on the same side of the unpatched time.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenprune.settings import Setting

ASSETS = Path(__file__).parent
QUESTIONS, STEP, SIZE = 500, 2.0, 3.0
REFERENCE = 7e9  # decoder parameters to grade for without a model, as on pages
PROCESSOR_LIMIT = 0.3  # share of the time to the first token from which the processor counts as the bottleneck
NONE = "no evidence: `tune` on your questions"


@dataclass(frozen=True)
class Evidence:
    """A piece of evidence for or against a setting.

    Attributes:
        kind: "published", "measured by us" or "closed form".
        figure: The result as text.
        source: Where the result was published or stored.
        about: "accuracy" or "time".
        grade: "strong", "weak", or "" for a closed form.
    """

    kind: str
    figure: str
    source: str
    about: str = "time"
    grade: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{self.grade and f', {self.grade}'}: {self.figure} ({self.source})"


@dataclass(frozen=True)
class Advice:
    """A row of the table.

    Attributes:
        situation: Key of the row.
        title: The user's situation.
        method: Method for `patch`.
        keep: Keep for `patch`.
        reason: The main reason.
        reason_page: Page that supports the reason.
        questions: Kinds of evidence that apply.
        max_visual_tokens: Maximum number of tokens per image before the method selects tokens.
        guard: Kind of question that needs guard="auto", "" for none.
        instead: Row for families that do not support the method.
        note: Additional note.
        tokens: Visual tokens of a typical prompt.
        frames: Frames of a typical prompt.
    """

    situation: str
    title: str
    method: str
    keep: float
    reason: str
    reason_page: str
    questions: tuple[str, ...]
    max_visual_tokens: int | None = None
    guard: str = ""
    instead: str = "general"
    note: str = ""
    tokens: int = 1024
    frames: int = 1

    @property
    def more(self) -> str:
        """Remaining arguments of `patch`, as Python."""
        return describe_more("auto" if self.guard else "", self.max_visual_tokens)

    @property
    def served_keep(self) -> float:
        """Keep for servers, which have no guard. It is at least the measured floor of the guarded questions."""
        from tokenprune.integrations.hf.guard.floors import load_floors

        return max(self.keep, load_floors().get_floor(self.method, self.guard)) if self.guard else self.keep

    @property
    def setting(self) -> Setting:
        """The method at its keep."""
        from tokenprune.settings import Setting  # imports torch, which the command's help does not need

        limit = {} if self.max_visual_tokens is None else {"max_visual_tokens": self.max_visual_tokens}
        return Setting.from_json({"method": self.method, "keep": self.keep} | limit)

    def evidence(self, size: float = REFERENCE) -> tuple[list[Evidence], list[Evidence]]:
        """Return the evidence at this keep and kind of question, and other evidence, each with the nearest keep first.

        Args:
            size: Number of decoder parameters to grade for.
        """
        entries = sorted(
            (entry for entry in _read_entries() if entry["method"] == self.method), key=self._compute_distance
        )
        nearby = [entry for entry in entries if self._is_near(entry)]
        # For each source only the nearest keep counts. Its other keeps go to "elsewhere".
        first = list({(entry["source"], entry["about"]): entry for entry in reversed(nearby)}.values())[::-1]
        rest = [entry for entry in entries if entry not in first]
        return [_build_evidence(entry, size) for entry in first], [_build_evidence(entry, size) for entry in rest]

    def _is_near(self, entry: dict[str, Any]) -> bool:
        at_keep = entry["keep"] is None or self._compute_distance(entry)[1] <= STEP
        return at_keep and (entry["questions"] is None or entry["questions"] in self.questions)

    def _compute_distance(self, entry: dict[str, Any]) -> tuple[bool, float]:
        """Sort key: the same questions first, then the ratio of the keeps."""
        ratio = 1.0 if entry["keep"] is None else entry["keep"] / self.keep
        return entry["questions"] not in (*self.questions, None), max(ratio, 1 / ratio)


def describe_more(guard: str, max_visual_tokens: int | None) -> str:
    """Return the remaining arguments of `patch` as Python, "" if there are none."""
    limit = "" if max_visual_tokens is None else f"max_visual_tokens={max_visual_tokens}"
    parts = [*filter(None, [guard and f'guard="{guard}"', limit])]
    return ", ".join([*parts, "processor=processor"]) if parts else ""


def describe_limit() -> str:
    """Return the advice for calls in which the processor takes `PROCESSOR_LIMIT` of the time or more.

    Examples:
        >>> describe_limit()
        'Set max_visual_tokens=320 (--max-visual-tokens 320), and read JPEG files with tokenprune.load_image.'
    """
    limit = load_advice()["clients"].max_visual_tokens
    return (
        f"Set max_visual_tokens={limit} (--max-visual-tokens {limit}), and read JPEG files with tokenprune.load_image."
    )


def grade_entry(entry: dict[str, Any], size: float) -> str:
    """Grade an entry of evidence.json as "strong" or "weak" (see the module docstring).

    Args:
        entry: The entry.
        size: Number of decoder parameters of the user's model.
    """
    enough = entry["photographs"] and (entry["asked"] is None or entry["asked"] >= QUESTIONS)
    is_similar_size = entry["size"] is not None and max(entry["size"] / size, size / entry["size"]) <= SIZE
    return "strong" if enough and is_similar_size and entry["sure"] else "weak"


def _build_evidence(entry: dict[str, Any], size: float) -> Evidence:
    return Evidence(entry["kind"], entry["figure"], entry["source"], entry["about"], grade_entry(entry, size))


@cache
def load_advice() -> dict[str, Advice]:
    """Return the rows of the table by situation."""
    rows = tomllib.loads((ASSETS / "advice.toml").read_text(encoding="utf-8"))
    return {name: Advice(name, **row | {"questions": tuple(row["questions"])}) for name, row in rows.items()}


@cache
def _read_entries() -> list[dict[str, Any]]:
    return json.loads((ASSETS / "evidence.json").read_text(encoding="utf-8"))["evidence"]


__all__ = ["NONE", "PROCESSOR_LIMIT", "Advice", "Evidence", "describe_limit", "grade_entry", "load_advice"]
