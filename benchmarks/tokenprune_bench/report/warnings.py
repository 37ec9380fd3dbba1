# SPDX-License-Identifier: Apache-2.0
"""Warnings about the results of a benchmark."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from tokenprune.models.model_config import describe_known_images
from tokenprune_bench.results import COLLAPSE, DRAWN_PREFIX, MARKS, UNPATCHED, Results, Row, find_busy_load

WIDE = 0.10  # width of the interval of the overall score that triggers a warning
_READING = re.compile(r"\b(ocr|digits?|numbers?|words?|texts?|reading|doc(ument)?s?|charts?|infographics?)\b", re.I)
# The notes of the first table contain these warnings.
_IN_TABLES = ("busy", "skipped-methods", "skipped-rows")


class Level(IntEnum):
    """Severity of a warning, the worst first."""

    BAD = 0
    CAUTION = 1
    NOTE = 2


@dataclass(frozen=True)
class RunWarning:
    """A warning.

    Attributes:
        code: Identifier for programs.
        level: Severity.
        title: Short title.
        text: One or two sentences.
        items: Cases, one line each.
    """

    code: str
    level: Level
    title: str
    text: str
    items: tuple[str, ...] = ()

    def line(self, max_items: int = 4) -> str:
        """Return the warning on one line, with at most `max_items` items."""
        more = f"; and {len(self.items) - max_items} more" if len(self.items) > max_items else ""
        return f"{self.title}: {'; '.join(self.items[:max_items]) or self.text}{more}"


def find_warnings(results: Results) -> list[RunWarning]:
    """Return the warnings of a run, the worst first. The baselines get no warnings, except if one was not run."""
    rows = [row for row in results.rows if row.method not in (UNPATCHED, *MARKS)]
    if results.evidence_only:  # no scores
        return [*_iter_unfinished_warnings(results), *_iter_skip_warnings(results)]
    warnings = [
        *_iter_control_warnings(results),
        *_iter_image_warnings(results),
        *_iter_unfinished_warnings(results),
        *_iter_baseline_warnings(results, rows),
        *_iter_collapse_warnings(results.baseline, rows),
        *(() if find_busy_load(results) else _iter_speed_warnings(rows)),  # busy times are not reliable
        *_iter_reliability_warnings(results, rows),
        *_iter_skip_warnings(results),
    ]
    return sorted(warnings, key=lambda warning: warning.level)  # stable


def format_warnings(results: Results) -> list[str]:
    """Return the warnings that the notes of the tables do not contain, one line each."""
    return [warning.line() for warning in find_warnings(results) if warning.code not in _IN_TABLES]


def _iter_control_warnings(results: Results) -> Iterator[RunWarning]:
    items = [
        f"{control.name}: {kind} {100 * control.kinds[kind].value:.0f} %, chance {100 * control.chance[kind]:.0f} %"
        for control in results.controls
        for kind in control.passed
    ]
    if items:
        text = (
            "The model answers these kinds better than chance although the evidence is missing. Do not rank methods by "
            "these kinds."
        )
        yield RunWarning("control-passed", Level.BAD, "A control does not fail", text, tuple(items))


def _iter_image_warnings(results: Results) -> Iterator[RunWarning]:
    """Yield a warning if the images differ from the training images of a shipped model."""
    env, data = results.header["environment"], results.header.get("data")
    if env.get("weights") and data and not data["name"].startswith(DRAWN_PREFIX):
        text = f"{env['model']} {describe_known_images(env['model'])}."
        yield RunWarning("unknown-images", Level.BAD, "The model does not know such images", text)


def _iter_unfinished_warnings(results: Results) -> Iterator[RunWarning]:
    plan = results.header["plan"]
    rows_of_old_runs = 1 + len(plan.get("methods", ())) * len(plan.get("keeps", ()))
    num_expected = results.header.get("rows", rows_of_old_runs)
    num_results = len(results.rows) + len(results.skipped)
    if num_results < num_expected:
        text = f"{num_results} of {num_expected} results exist. Run the same `tokenprune bench` command to continue."
        yield RunWarning("unfinished", Level.BAD, "The run is not finished", text)


def _iter_baseline_warnings(results: Results, rows: list[Row]) -> Iterator[RunWarning]:
    descriptions = {"random": "random tokens", "downsample": "a smaller image"}
    for name, mark in MARKS.items():
        if not any(row.method == name for row in results.rows):
            text = (
                f"Without {descriptions[name]} as a baseline, the results do not show whether a method is worth its "
                "overhead."
            )
            yield RunWarning(f"no-{name}", Level.BAD, f"`{name}` was not run", text)
        behind = [row for row in rows if mark in row.marks]
        worse = [row for row in behind if row.differences[name].high < 0]
        if worse:
            text = f"At the same keep, {descriptions[name]} get{'s' if name == 'downsample' else ''} a higher score."
            yield RunWarning(f"worse-than-{name}", Level.BAD, f"Worse than `{name}`", text, tuple(
                f"{_format_setting(row)}: {_format_points(row.differences[name].difference)} points "
                f"[{_format_points(row.differences[name].low)}, {_format_points(row.differences[name].high)}]"
                for row in worse
            ))  # fmt: skip
        equal = [row for row in behind if row not in worse]
        if equal:
            text = (
                f"{results.baseline.questions} questions do not show that these beat {descriptions[name]} at the "
                "same keep."
            )
            title = f"Not shown to be better than `{name}`"
            yield RunWarning(f"not-better-than-{name}", Level.CAUTION, title, text, tuple(_format_by_method(equal)))


def _iter_collapse_warnings(base: Row, rows: list[Row]) -> Iterator[RunWarning]:
    kinds = {kind: None for row in rows for kind, share in row.kinds.items() if share.collapsed}
    reading = {kind for kind in kinds if _READING.search(kind.replace("_", " "))}
    more = f"by more than {100 * COLLAPSE:.0f} points against the unpatched model, although the mean may be good."
    for code, title, text, mine in (
        ("ocr-collapse", "Reading is lost", f"Questions about text in the image fall {more}", reading),
        ("collapse", "A kind of question is lost", f"These kinds fall {more}", kinds.keys() - reading),
    ):
        items = []
        for row in rows:
            lost = [kind for kind, share in row.kinds.items() if share.collapsed and kind in mine]
            if lost:
                falls = [(kind, 100 * base.kinds[kind].value, 100 * row.kinds[kind].value) for kind in lost]
                shares = ", ".join(f"{kind} {before:.0f} → {after:.0f} %" for kind, before, after in falls)
                items.append(f"{_format_setting(row)}: {shares}")
        if items:
            yield RunWarning(code, Level.BAD, title, text, tuple(items))


def _iter_speed_warnings(rows: list[Row]) -> Iterator[RunWarning]:
    slow = [row for row in rows if row.ttft_ratio is not None and row.ttft_ratio >= 1]
    if slow:
        text = "The time to the first token is not shorter than unpatched: the selection takes as long as it saves."
        items = (f"{_format_setting(row)}: {row.ttft_ratio:.2f} × the unpatched time" for row in slow)
        yield RunWarning("not-faster", Level.CAUTION, "Pruned, but not faster", text, tuple(items))


def _iter_reliability_warnings(results: Results, rows: list[Row]) -> Iterator[RunWarning]:
    if busy := find_busy_load(results):
        text = f"The load was {busy[0]:.1f} on {busy[1]} cores. These times are not reliable."
        yield RunWarning("busy", Level.CAUTION, "The machine was busy while times were taken", text)
    widest = max([results.baseline, *rows], key=lambda row: row.overall.high - row.overall.low)
    if (width := widest.overall.high - widest.overall.low) > WIDE:
        fewest = min(Counter(results.header["kind_of_question"]).values())
        text = (
            f"The 95 % interval of {_format_setting(widest)} spans {100 * width:.0f} points; the smallest kind has "
            f"{fewest} question{'s' if fewest > 1 else ''}. Ask more questions to compare similar settings."
        )
        yield RunWarning("few-questions", Level.CAUTION, f"Only {widest.questions} questions", text)


def _iter_skip_warnings(results: Results) -> Iterator[RunWarning]:
    if rows := (results.header.get("data") or {}).get("skipped"):
        title = f"{len(rows)} row{'s'[: len(rows) > 1]} left out"
        yield RunWarning("skipped-rows", Level.CAUTION, title, "These rows of the data are not valid.", tuple(rows))
    if results.skipped:
        keeps: dict[tuple[str, str], list[str]] = {}
        for record in results.skipped:
            keeps.setdefault((record["method"], record["reason"]), []).append(f"{record['keep']:g}")
        items = tuple(f"{method} at {', '.join(some)}: {reason}" for (method, reason), some in keeps.items())
        text = "These methods do not support this model or these questions."
        yield RunWarning("skipped-methods", Level.NOTE, "Methods left out", text, items)


def _format_setting(row: Row) -> str:
    return row.method if row.method == UNPATCHED else f"{row.method} at {row.keep_text}"


def _format_by_method(rows: Iterable[Row]) -> list[str]:
    keeps: dict[str, list[str]] = {}
    for row in rows:
        keeps.setdefault(row.method, []).append(row.keep_text)
    return [f"{method} at {', '.join(some)}" for method, some in keeps.items()]


def _format_points(share: float) -> str:
    return f"{100 * share:+.1f}"
