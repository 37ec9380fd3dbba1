# SPDX-License-Identifier: Apache-2.0
"""The table of advice (advice.toml): what to start from, by situation, and the evidence for it.

Evidence (evidence.json, which dev/evidence.py makes of the papers and of benchmarks/results) is shown where
it is of the same kind of questions at the advised keep, one step either way (from half to twice as many tokens);
everything else of the method stands under "elsewhere".

It is **strong** where all of these hold, and weak otherwise:

- at least 500 questions, about photographs or scans and not about drawn images (published benchmarks have thousands);
- a decoder of a third to three times the size of yours;
- more than luck: of our runs the paired 95 % interval of what the method answers beyond dropping at random lies above
  0; of published numbers, which come without answers, a second paper prints nearly the same (within 2 points of
  accuracy, 15 % of a time), neither of them the method's own; of our times p20 to p80 lies on one side of the
  unpatched.
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
REFERENCE = 7e9  # parameters: the size of "yours" where no model is given, as on pages
NONE = "no evidence: `tune` on your questions"


@dataclass(frozen=True)
class Evidence:
    """A piece of evidence for a setting, or against it.

    kind: "published", "measured by us" or "closed form". figure: the number, in words. source: where it stands. about:
    "accuracy" or "time". grade: "strong", "weak", or "" for a closed form.
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

    title: what the reader has. method, keep: for `patch`. guard: the kind of question for which guard="auto" goes with
    them, "" for none. reason: one, which reason_page shows. questions: the kinds of evidence that speak for it.
    instead: the row for families where the method cannot act. note: what stands beside it. tokens, frames: of a prompt
    of this kind.
    """

    situation: str
    title: str
    method: str
    keep: float
    reason: str
    reason_page: str
    questions: tuple[str, ...]
    guard: str = ""
    instead: str = "general"
    note: str = ""
    tokens: int = 1024
    frames: int = 1

    @property
    def more(self) -> str:
        """The rest of what `patch` takes, as Python."""
        return 'guard="auto", processor=processor' if self.guard else ""

    @property
    def served_keep(self) -> float:
        """The keep where there is no guard: at least what was measured to be enough for all prompts."""
        from tokenprune.integrations.hf.guard.floors import shipped

        return max(self.keep, shipped().of(self.method, self.guard)) if self.guard else self.keep

    @property
    def setting(self) -> Setting:
        """The method at its keep."""
        from tokenprune.settings import Setting  # it imports torch, and the command's help reads this table

        return Setting.from_json({"method": self.method, "keep": self.keep})

    def evidence(self, size: float = REFERENCE) -> tuple[list[Evidence], list[Evidence]]:
        """Return the evidence at this keep and kind of questions, and that from elsewhere; the nearest keep first.

        size: parameters of the decoder that it is graded for.
        """
        own = sorted((one for one in _entries() if one["method"] == self.method), key=self._distance)
        near = [one for one in own if self._is_near(one)]
        # Of one source the nearest keep says it; what it says of the next keep stands elsewhere.
        first = list({(one["source"], one["about"]): one for one in reversed(near)}.values())[::-1]
        rest = [one for one in own if one not in first]
        return [_evidence(one, size) for one in first], [_evidence(one, size) for one in rest]

    def _is_near(self, one: dict[str, Any]) -> bool:
        at_keep = one["keep"] is None or self._distance(one)[1] <= STEP
        return at_keep and (one["questions"] is None or one["questions"] in self.questions)

    def _distance(self, one: dict[str, Any]) -> tuple[bool, float]:
        """Order evidence: the same questions first, then by the keep, as a ratio."""
        ratio = 1.0 if one["keep"] is None else one["keep"] / self.keep
        return one["questions"] not in (*self.questions, None), max(ratio, 1 / ratio)


def grade_entry(one: dict[str, Any], size: float) -> str:
    """Return "strong" or "weak" for an entry of the file, by the rule above."""
    enough = one["photographs"] and (one["asked"] is None or one["asked"] >= QUESTIONS)
    alike = one["size"] is not None and max(one["size"] / size, size / one["size"]) <= SIZE
    return "strong" if enough and alike and one["sure"] else "weak"


def _evidence(one: dict[str, Any], size: float) -> Evidence:
    return Evidence(one["kind"], one["figure"], one["source"], one["about"], grade_entry(one, size))


@cache
def load_advice() -> dict[str, Advice]:
    """Return the rows of the table by situation."""
    rows = tomllib.loads((ASSETS / "advice.toml").read_text(encoding="utf-8"))
    return {name: Advice(name, **row | {"questions": tuple(row["questions"])}) for name, row in rows.items()}


@cache
def _entries() -> list[dict[str, Any]]:
    return json.loads((ASSETS / "evidence.json").read_text(encoding="utf-8"))["evidence"]


__all__ = ["NONE", "Advice", "Evidence", "grade_entry", "load_advice"]
