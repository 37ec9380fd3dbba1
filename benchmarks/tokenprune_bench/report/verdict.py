# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run: the setting that costs least within an allowed loss, and the certainty of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenprune_bench.metrics import METRICS
from tokenprune_bench.paired import compare_paired
from tokenprune_bench.point_changes import POINTS, count_decimals, format_change
from tokenprune_bench.results import COLLAPSE, MARKS, UNPATCHED, Results, Row, find_busy_load

ALIKE = 0.01  # of the unpatched model's tokens: settings that differ by no more cost the same
FEWEST = 4  # questions: with fewer, one answer is worth more than a quarter of the score
_NAMED = 4  # rivals, at most
_EPSILON = 1e-9  # 0.9 - 0.91 < -0.01 in floating point


@dataclass(frozen=True)
class RunVerdict:
    """The recommended setting for one allowed loss in points.

    points: that may be lost. row: the setting that costs least, None where each loses more. title: the question that
    is answered. answer: the setting, in words. facts: what it costs and scores, by name. doubt: what the interval
    leaves open; "" where it is within. remarks: what else to know.
    """

    points: int
    row: Row | None
    title: str
    answer: str
    facts: tuple[tuple[str, str], ...] = ()
    doubt: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """All but the remarks, on one line."""
        facts = ", ".join(f"{name} {text}" for name, text in self.facts)
        return f"{self.title}: {self.answer}{f': {facts}.' if facts else ''} {self.doubt}".rstrip()


def find_verdicts(results: Results) -> list[RunVerdict]:
    """Return what to take where one point may be lost, and where three may; none where nothing was scored, and one that
    says why where the answers show nothing.

    The cheapest setting has the fewest visual tokens, averaged over the decoder's layers; of those within a hundredth
    of the unpatched model's tokens from it, the one that scores highest is taken. Baselines take part.
    """
    base = results.baseline
    rows = [row for row in results.rows if row.method != UNPATCHED and row.tokens_average < base.tokens_average]
    if results.evidence_only:
        return []
    if rows and (unknown := _nothing_to_say(base)):
        return [RunVerdict(0, None, "Nothing is shown", unknown)]
    return [_verdict(results, rows, points) for points in POINTS]


def _verdict(results: Results, rows: list[Row], points: int) -> RunVerdict:
    allowed = f"{points} point{'s'[: points > 1]}"
    title = f"Best at ≤ {allowed} lost"
    if not rows:
        return RunVerdict(points, None, title, "nothing was run that leaves out visual tokens")
    within = [row for row in rows if _lost(row) <= points / 100 + _EPSILON]
    if not within:
        least = min(rows, key=lambda row: (round(_lost(row), 9), row.tokens_average))
        facts = (_score(results, least), ("visual tokens", _tokens(results, least)))
        return RunVerdict(points, None, title, f"none; {_place(results, least)} loses least", facts)
    best = _cheapest(results, within)
    facts = (
        _score(results, best),
        ("visual tokens", _tokens(results, best)),
        ("TTFT", _ttft(results, best)),
        ("KV cache", _kv(best)),
    )
    remarks = (*_rivals(results, best, rows), *_flaws(results, best))
    return RunVerdict(points, best, title, _place(results, best), facts, _doubt(results, best, within, points), remarks)


def _nothing_to_say(base: Row) -> str:
    """Return why no setting can be called the best, "" where one can be."""
    if base.questions < FEWEST:
        return f"{base.questions} question{'s were' if base.questions > 1 else ' was'} asked, and it takes {FEWEST}"
    if base.overall.value < COLLAPSE:
        return (
            f"the unpatched model scores {100 * base.overall.value:.3g} on {base.questions} questions, too little for "
            "a loss to show: take questions that it can answer, or another model"
        )
    return ""


def _cheapest(results: Results, rows: list[Row]) -> Row:
    least = min(row.tokens_average for row in rows)
    alike = [row for row in rows if _alike(results, row.tokens_average, least)]
    # Of equal scores the faster one, then the one with fewer tokens, then the first.
    return min(alike, key=lambda row: (round(_lost(row), 9), row.ttft_ratio or 1.0, row.tokens_average))


def _doubt(results: Results, best: Row, within: list[Row], points: int) -> str:
    if _shown(best, points):
        return ""
    asked, allowed = f"{best.questions} question{'s'[: best.questions > 1]}", f"{points} point{'s'[: points > 1]}"
    said = f"Not certain: {asked} are too few to tell."
    if best.differences[UNPATCHED].low < -points / 100 - _EPSILON:
        said = f"Not certain: with {asked}, the interval reaches beyond {allowed}."
    if not (shown := [row for row in within if _shown(row, points)]):
        return f"{said} No other setting is."
    sure = _cheapest(results, shown)
    return f"{said} Certain is {_place(results, sure)}, with {_tokens(results, sure)}."


def _shown(row: Row, points: int) -> bool:
    """Return True if the whole interval of the loss is within, and there are questions enough: where no answer of n
    changes, the interval has no width, and yet as many as 3 / n of all answers may change (the rule of three)."""
    return row.differences[UNPATCHED].low >= -points / 100 - _EPSILON and 3 / row.questions <= points / 100 + _EPSILON


def _rivals(results: Results, best: Row, rows: list[Row]) -> Iterator[str]:
    """Yield the settings that cost no more and do not differ significantly from the best."""
    ours, names = results.answers[best.method, best.keep], []
    most = best.tokens_average + ALIKE * results.baseline.tokens_average
    for row in sorted(rows, key=_lost):
        if row is not best and row.tokens_average <= most:
            gap = compare_paired(results.answers[row.method, row.keep], ours)
            if gap.low <= 0 <= gap.high:
                names.append(_place(results, row))
    if names:
        more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
        yield f"Not significantly different from it, and no dearer: {', '.join(names[:_NAMED])}{more}."


def _flaws(results: Results, best: Row) -> Iterator[str]:
    if best.differences[UNPATCHED].low <= 0 <= best.differences[UNPATCHED].high:
        yield "A difference of 0 is inside the interval: no loss is shown."
    if best.method in MARKS:
        yield f"`{best.method}` is a baseline: no method scores higher for as little."
    if best.marks:
        behind = " and ".join(f"`{name}`" for name, mark in MARKS.items() if mark in best.marks)
        yield f"It is not shown to be better than {behind} at the same keep."
    fallen = [kind for kind, share in best.kinds.items() if share.collapsed]
    if fallen:
        base = results.baseline.kinds
        shares = (f"{kind} {100 * base[kind].value:.0f} → {100 * best.kinds[kind].value:.0f} %" for kind in fallen)
        yield f"Lost whatever the mean says: {', '.join(shares)}."
    if best.ttft_ratio is not None and find_busy_load(results):
        yield "The machine was busy while times were taken: do not rely on this one."


def _lost(row: Row) -> float:
    return -row.differences[UNPATCHED].difference


def _alike(results: Results, one: float, other: float) -> bool:
    return abs(one - other) <= ALIKE * results.baseline.tokens_average + _EPSILON


def _place(results: Results, row: Row) -> str:
    unit = " tokens" if isinstance(row.keep, int) and row.keep_text == str(row.keep) else ""
    return f"{row.method} at {'target' if results.equal_cost else 'keep'} {row.keep_text}{unit}"


def _tokens(results: Results, row: Row) -> str:
    whole = results.baseline.tokens_average
    return f"{row.tokens_average:.0f} of {whole:.0f} ({100 * row.tokens_average / whole:.0f} %)"


def _ttft(results: Results, row: Row) -> str:
    whole = results.unpatched_ms()
    if whole is None or row.ttft_ratio is None:
        return "not taken"
    return f"{row.ttft_ratio * whole:.4g} of {whole:.4g} ms ({1 / row.ttft_ratio:.2f}×)"


def _kv(row: Row) -> str:
    ours, whole = row.stats["kv_bytes"], row.stats["kv_bytes_full"]
    if not whole:
        return "not known"
    return f"{ours / row.questions / 1024:.0f} of {whole / row.questions / 1024:.0f} KiB ({100 * ours / whole:.0f} %)"


def _score(results: Results, row: Row) -> tuple[str, str]:
    gap = row.differences[UNPATCHED]
    change = f"{format_change(gap.difference)} [{format_change(gap.low)}, {format_change(gap.high)}]"
    score = f"{100 * row.overall.value:.{count_decimals(gap.difference)}f}"
    return METRICS[results.header.get("metric", "exact")].title, f"{score}, {change}"
