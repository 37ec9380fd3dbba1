# SPDX-License-Identifier: Apache-2.0
"""Verdict on a run: the cheapest setting within an allowed loss, and how certain it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenprune.settings.max_visual_tokens import LIMITER
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.paired import compare_paired
from tokenprune_bench.point_changes import POINTS, count_decimals, format_change
from tokenprune_bench.results import COLLAPSE, MARKS, UNPATCHED, Results, Row, find_busy_load

EQUAL_COST = 0.01  # share of the unpatched tokens: settings within it cost the same
FEWEST = 4  # minimum number of questions: with fewer, one answer changes the score by more than a quarter
_MAX_RIVALS = 4
_EPSILON = 1e-9  # 0.9 - 0.91 < -0.01 in floating point


@dataclass(frozen=True)
class RunVerdict:
    """Recommended setting for one allowed loss.

    Attributes:
        points: Points of the metric that may be lost.
        row: Cheapest setting within the allowed loss, or None if every setting loses more.
        title: Heading with the allowed loss.
        answer: The setting as text.
        facts: Pairs of a name and a value: score, visual tokens, time and cache.
        doubt: Reason why the setting is not certain, or "".
        remarks: Further limits of the verdict.
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
        """Everything except the remarks, on one line."""
        facts = ", ".join(f"{name} {text}" for name, text in self.facts)
        return f"{self.title}: {self.answer}{f': {facts}.' if facts else ''} {self.doubt}".rstrip()

    @property
    def summary(self) -> str:
        """One sentence with the setting, its score and the certainty."""
        score = [f"{name} {text}" for name, text in self.facts[:1]]
        details = "; ".join([*score, *(["not certain"] if self.doubt else [])])
        return f"{self.title}: {self.answer}{f' ({details})' if details else ''}."


def find_verdicts(results: Results) -> list[RunVerdict]:
    """Return one verdict for each allowed loss in `POINTS`.

    The cheapest setting has the fewest visual tokens, averaged over the decoder's layers. Settings within 1 % of the
    unpatched model's tokens cost the same, and the highest score wins. Baselines take part.

    Returns:
        The verdicts. Empty for a run without scores. One verdict with the reason if the scores allow no conclusion.
    """
    base = results.baseline
    rows = [row for row in results.rows if row.method != UNPATCHED and row.tokens_average < base.tokens_average]
    if results.evidence_only:
        return []
    if rows and (reason := _explain_no_verdict(base)):
        return [RunVerdict(0, None, "No verdict", reason)]
    return [_build_verdict(results, rows, points) for points in POINTS]


def _build_verdict(results: Results, rows: list[Row], points: int) -> RunVerdict:
    title = f"Best at ≤ {_format_allowed(points)} lost"
    if not rows:
        return RunVerdict(points, None, title, "no setting of this run drops visual tokens")
    within = [row for row in rows if _compute_loss(row) <= points / 100 + _EPSILON]
    if not within:
        closest = min(rows, key=lambda row: (round(_compute_loss(row), 9), row.tokens_average))
        facts = (_score(results, closest), ("visual tokens", _format_tokens(results, closest)))
        return RunVerdict(points, None, title, f"none; {_format_setting(results, closest)} loses least", facts)
    best = _find_cheapest(results, within)
    facts = (
        _score(results, best),
        ("visual tokens", _format_tokens(results, best)),
        ("TTFT", _format_ttft(results, best)),
        ("KV cache", _format_kv_cache(best)),
    )
    remarks = (*_find_rivals(results, best, rows), *_find_flaws(results, best))
    doubt = _explain_doubt(results, best, within, points)
    return RunVerdict(points, best, title, _format_setting(results, best), facts, doubt, remarks)


def _explain_no_verdict(base: Row) -> str:
    """Return why the scores allow no conclusion, or ""."""
    if base.questions < FEWEST:
        return f"a verdict needs at least {FEWEST} questions, and this run has {base.questions}"
    if base.overall.value < COLLAPSE:
        return (
            f"the unpatched model scores {100 * base.overall.value:.3g} on {base.questions} questions, too low to "
            "measure a loss. Use questions that it can answer, or another model"
        )
    return ""


def _find_cheapest(results: Results, rows: list[Row]) -> Row:
    fewest = min(row.tokens_average for row in rows)
    limit = fewest + EQUAL_COST * results.baseline.tokens_average + _EPSILON
    candidates = [row for row in rows if row.tokens_average <= limit]
    # Equal scores: the faster setting, then the one with fewer tokens, then the first.
    return min(candidates, key=lambda row: (round(_compute_loss(row), 9), row.ttft_ratio or 1.0, row.tokens_average))


def _explain_doubt(results: Results, best: Row, within: list[Row], points: int) -> str:
    """Return why the loss of a setting is not certain, and the cheapest certain setting; "" if it is certain."""
    if _is_certain(best, points):
        return ""
    questions = f"{best.questions} question{'s'[: best.questions > 1]}"
    doubt = f"Not certain: {questions} are too few."
    if best.differences[UNPATCHED].low < -points / 100 - _EPSILON:
        doubt = f"Not certain: with {questions}, the interval reaches beyond {_format_allowed(points)}."
    if not (certain := [row for row in within if _is_certain(row, points)]):
        return f"{doubt} No other setting is certain."
    row = _find_cheapest(results, certain)
    return f"{doubt} Certain: {_format_setting(results, row)}, with {_format_tokens(results, row)}."


def _is_certain(row: Row, points: int) -> bool:
    """Return True if the interval of the loss is within the allowed loss, and there are enough questions.

    If none of n answers changes, the interval has zero width, but up to 3 / n of all answers may change (the rule of
    three).
    """
    return row.differences[UNPATCHED].low >= -points / 100 - _EPSILON and 3 / row.questions <= points / 100 + _EPSILON


def _find_rivals(results: Results, best: Row, rows: list[Row]) -> Iterator[str]:
    """Yield a remark with the settings that cost no more and do not differ significantly from the best."""
    answers, names = results.answers[best.method, best.keep], []
    limit = best.tokens_average + EQUAL_COST * results.baseline.tokens_average
    for row in sorted(rows, key=_compute_loss):
        if row is not best and row.tokens_average <= limit:
            difference = compare_paired(results.answers[row.method, row.keep], answers)
            if difference.low <= 0 <= difference.high:
                names.append(_format_setting(results, row))
    if names:
        more = f" and {len(names) - _MAX_RIVALS} more" if names[_MAX_RIVALS:] else ""
        yield f"Not significantly different at no higher cost: {', '.join(names[:_MAX_RIVALS])}{more}."


def _find_flaws(results: Results, best: Row) -> Iterator[str]:
    """Yield remarks on the limits of the best setting."""
    if best.differences[UNPATCHED].low <= 0 <= best.differences[UNPATCHED].high:
        yield "The interval includes 0: no loss is shown."
    if best.method in MARKS:
        yield f"`{best.method}` is a baseline: no method scores higher at this cost."
    if best.marks:
        names = " and ".join(f"`{name}`" for name, mark in MARKS.items() if mark in best.marks)
        yield f"Not shown to be better than {names} at the same keep."
    collapsed = [kind for kind, share in best.kinds.items() if share.collapsed]
    if collapsed:
        base = results.baseline.kinds
        shares = (f"{kind} {100 * base[kind].value:.0f} → {100 * best.kinds[kind].value:.0f} %" for kind in collapsed)
        yield f"Collapsed although the mean is good: {', '.join(shares)}."
    if best.ttft_ratio is not None and find_busy_load(results):
        yield "The machine was busy during the measurement, so the times are not reliable."


def _format_allowed(points: int) -> str:
    return f"{points} point{'s'[: points > 1]}"


def _compute_loss(row: Row) -> float:
    return -row.differences[UNPATCHED].difference


def _format_setting(results: Results, row: Row) -> str:
    unit = " tokens" if isinstance(row.keep, int) and row.keep_text == str(row.keep) else ""
    limit = results.max_visual_tokens
    limited = "" if limit is None or row.method == LIMITER else f" with max_visual_tokens={limit}"
    return f"{row.method} at {'target' if results.equal_cost else 'keep'} {row.keep_text}{unit}{limited}"


def _format_tokens(results: Results, row: Row) -> str:
    unpruned = results.baseline.tokens_average
    return f"{row.tokens_average:.0f} of {unpruned:.0f} ({100 * row.tokens_average / unpruned:.0f} %)"


def _format_ttft(results: Results, row: Row) -> str:
    unpatched_ms = results.unpatched_ms()
    if unpatched_ms is None or row.ttft_ratio is None:
        return "not measured"
    return f"{row.ttft_ratio * unpatched_ms:.4g} of {unpatched_ms:.4g} ms ({1 / row.ttft_ratio:.2f}×)"


def _format_kv_cache(row: Row) -> str:
    used, unpruned = row.stats["kv_bytes"], row.stats["kv_bytes_full"]
    if not unpruned:
        return "not known"
    per_question = 1024 * row.questions
    return f"{used / per_question:.0f} of {unpruned / per_question:.0f} KiB ({100 * used / unpruned:.0f} %)"


def _score(results: Results, row: Row) -> tuple[str, str]:
    difference = row.differences[UNPATCHED]
    interval = f"[{format_change(difference.low)}, {format_change(difference.high)}]"
    score = f"{100 * row.overall.value:.{count_decimals(difference.difference)}f}"
    title = METRICS[results.header.get("metric", "exact")].title
    return title, f"{score}, {format_change(difference.difference)} {interval}"
