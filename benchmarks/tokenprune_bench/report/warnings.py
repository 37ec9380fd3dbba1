# SPDX-License-Identifier: Apache-2.0
"""Warnings that a reader of a benchmark must not overlook, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from tokenprune.models.model_config import describe_known_images
from tokenprune_bench.results import COLLAPSE, DRAWN_PREFIX, MARKS, UNPATCHED, Results, Row, find_busy_load

WIDE = 0.10  # an interval of the overall score wider than this is called wide
_READING = re.compile(r"\b(ocr|digits?|numbers?|words?|texts?|reading|doc(ument)?s?|charts?|infographics?)\b", re.I)
# `tables` says these below its first table, for pages that show the tables alone.
_IN_TABLES = ("busy", "skipped-methods", "skipped-rows")


class Level(IntEnum):
    """The severity of a warning; the worst come first."""

    BAD = 0
    CAUTION = 1
    NOTE = 2


@dataclass(frozen=True)
class RunWarning:
    """One thing to beware of.

    code: what it is, for programs. title: a few words. text: a sentence or two. items: what it is about, one line each.
    """

    code: str
    level: Level
    title: str
    text: str
    items: tuple[str, ...] = ()

    def line(self, most: int = 4) -> str:
        """Return it on one line, with no more than `most` items."""
        more = f"; and {len(self.items) - most} more" if len(self.items) > most else ""
        return f"{self.title}: {'; '.join(self.items[:most]) or self.text}{more}"


def find_warnings(results: Results) -> list[RunWarning]:
    """Return what to beware of in a run, the worst first.

    The baselines `random` and `downsample` are there to be beaten: nothing is said of them, but that one was not run.
    """
    rows = [row for row in results.rows if row.method not in (UNPATCHED, *MARKS)]
    if results.evidence_only:  # there are no scores
        return [*_unfinished(results), *_left_out(results)]
    found = [
        *_controls(results),
        *_unknown_images(results),
        *_unfinished(results),
        *_against_baselines(results, rows),
        *_collapsed(results.baseline, rows),
        *(() if find_busy_load(results) else _not_faster(rows)),  # nothing is concluded from times not to be relied on
        *_doubtful(results, rows),
        *_left_out(results),
    ]
    return sorted(found, key=lambda one: one.level)  # stable


def lines(results: Results) -> list[str]:
    """Return the warnings that the tables' own notes do not hold, one line each."""
    return [one.line() for one in find_warnings(results) if one.code not in _IN_TABLES]


def _controls(results: Results) -> Iterator[RunWarning]:
    items = [
        f"{control.name}: {kind} {100 * control.kinds[kind].value:.0f} %, chance {100 * control.chance[kind]:.0f} %"
        for control in results.controls
        for kind in control.passed
    ]
    if items:
        text = (
            "The model answers these kinds better than chance without what they ask about: they do not show what a "
            "method lets it see. Do not rank methods by them."
        )
        yield RunWarning("control-passed", Level.BAD, "A control does not fail", text, tuple(items))


def _unknown_images(results: Results) -> Iterator[RunWarning]:
    """Yield what `bench` says when a shipped model is asked about images of others."""
    env, data = results.header["environment"], results.header.get("data")
    if env.get("weights") and data and not data["name"].startswith(DRAWN_PREFIX):
        text = f"{env['model']} {describe_known_images(env['model'])}."
        yield RunWarning("unknown-images", Level.BAD, "The model does not know such images", text)


def _unfinished(results: Results) -> Iterator[RunWarning]:
    plan = results.header["plan"]
    of_old = 1 + len(plan.get("methods", ())) * len(plan.get("keeps", ()))
    wanted = results.header.get("rows", of_old)
    there = len(results.rows) + len(results.skipped)
    if there < wanted:
        text = f"{there} of {wanted} results are there. The same `tokenprune bench` command goes on where it stopped."
        yield RunWarning("unfinished", Level.BAD, "The run is not finished", text)


def _against_baselines(results: Results, rows: list[Row]) -> Iterator[RunWarning]:
    said = {"random": "tokens picked at random", "downsample": "a smaller image"}
    for name, mark in MARKS.items():
        if not any(row.method == name for row in results.rows):
            text = f"Without {said[name]} as a rival, nobody can say whether a method earns its overhead."
            yield RunWarning(f"no-{name}", Level.BAD, f"`{name}` was not run", text)
        behind = [row for row in rows if mark in row.marks]
        worse = [row for row in behind if row.differences[name].high < 0]
        if worse:
            text = f"At the same keep, {said[name]} get{'s' if name == 'downsample' else ''} more questions right."
            yield RunWarning(f"worse-than-{name}", Level.BAD, f"Worse than `{name}`", text, tuple(
                f"{_place(row)}: {_points(row.differences[name].difference)} points "
                f"[{_points(row.differences[name].low)}, {_points(row.differences[name].high)}]" for row in worse
            ))  # fmt: skip
        equal = [row for row in behind if row not in worse]
        if equal:
            text = (
                f"{results.baseline.questions} questions do not show that these answer better than {said[name]} at the "
                "same keep: they have not earned their overhead here."
            )
            title = f"Not shown to be better than `{name}`"
            yield RunWarning(f"not-better-than-{name}", Level.CAUTION, title, text, tuple(_by_method(equal)))


def _collapsed(base: Row, rows: list[Row]) -> Iterator[RunWarning]:
    kinds = {kind: None for row in rows for kind, share in row.kinds.items() if share.collapsed}
    reading = {kind for kind in kinds if _READING.search(kind.replace("_", " "))}
    more = f"by more than {100 * COLLAPSE:.0f} points against the unpatched model, whatever the mean says."
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
                items.append(f"{_place(row)}: {shares}")
        if items:
            yield RunWarning(code, Level.BAD, title, text, tuple(items))


def _not_faster(rows: list[Row]) -> Iterator[RunWarning]:
    slow = [row for row in rows if row.ttft_ratio is not None and row.ttft_ratio >= 1]
    if slow:
        text = "The first token comes no sooner than from the unpatched model: choosing costs what fewer tokens save."
        items = (f"{_place(row)}: {row.ttft_ratio:.2f} × the time of the unpatched" for row in slow)
        yield RunWarning("not-faster", Level.CAUTION, "Pruned, yet not faster", text, tuple(items))


def _doubtful(results: Results, rows: list[Row]) -> Iterator[RunWarning]:
    if busy := find_busy_load(results):
        text = f"The load was {busy[0]:.1f} on {busy[1]} cores. Do not rely on these times."
        yield RunWarning("busy", Level.CAUTION, "The machine was busy while times were taken", text)
    widest = max([results.baseline, *rows], key=lambda row: row.overall.high - row.overall.low)
    if (width := widest.overall.high - widest.overall.low) > WIDE:
        fewest = min(Counter(results.header["kind_of_question"]).values())
        text = (
            f"The 95 % interval of {_place(widest)} spans {100 * width:.0f} points; a kind has as few as "
            f"{fewest} question{'s' if fewest > 1 else ''}. Ask more of them before choosing between neighbours."
        )
        yield RunWarning("few-questions", Level.CAUTION, f"Only {widest.questions} questions", text)


def _left_out(results: Results) -> Iterator[RunWarning]:
    if rows := (results.header.get("data") or {}).get("skipped"):
        title = f"{len(rows)} row{'s'[: len(rows) > 1]} left out"
        yield RunWarning("skipped-rows", Level.CAUTION, title, "This part of the data could not be asked.", tuple(rows))
    if results.skipped:
        keeps: dict[tuple[str, str], list[str]] = {}
        for record in results.skipped:
            keeps.setdefault((record["method"], record["reason"]), []).append(f"{record['keep']:g}")
        items = tuple(f"{method} at {', '.join(some)}: {reason}" for (method, reason), some in keeps.items())
        text = "These did not run on this model and these questions."
        yield RunWarning("skipped-methods", Level.NOTE, "Methods left out", text, items)


def _place(row: Row) -> str:
    return row.method if row.method == UNPATCHED else f"{row.method} at {row.keep_text}"


def _by_method(rows: Iterable[Row]) -> list[str]:
    keeps: dict[str, list[str]] = {}
    for row in rows:
        keeps.setdefault(row.method, []).append(row.keep_text)
    return [f"{method} at {', '.join(some)}" for method, some in keeps.items()]


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
