# SPDX-License-Identifier: Apache-2.0
"""Test the report's verdict: the cheapest settings within one and three points, and their caveats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import report_runs
from report_runs import BASE, RIVALS, header, made, result, timing
from tests.unit.api.test_cli import call
from tokenprune_bench.report.page import make_page
from tokenprune_bench.report.verdict import RunVerdict, find_verdicts
from tokenprune_bench.results import RESULTS, summarise


def verdicts(*records: dict[str, Any], **changes: Any) -> list[RunVerdict]:
    return find_verdicts(made("", *records, **changes).results)


def build_swapped_result(method: str, keep: float, wrong: int) -> dict[str, Any]:
    """Return a result whose first questions are wrong, while `result` makes the last ones wrong."""
    unswapped = result(method, keep, 100, 100)
    return unswapped | dict(right=["0" * wrong + unswapped["right"][0][wrong:]])


def test_the_cheapest_within_one_point_and_within_three() -> None:
    one_point, three_points = verdicts(
        *RIVALS, result("half", 0.5, 99, 99, timing=timing(0.5)), result("third", 0.3, 97, 97), result("a", 0.1, 9, 9)
    )
    assert (one_point.row.method, three_points.row.method) == ("half", "third")
    assert one_point.answer == "half at keep 0.5" and three_points.title == "Best at ≤ 3 points lost"
    assert dict(one_point.facts) == {
        "visual tokens": "50 of 100 (50 %)",
        "TTFT": "20 of 40 ms (2.00×)",
        "KV cache": "0 of 0 KiB (25 %)",
        "accuracy %": "99.0, -1.0 [-2.5, +0.0]",
    }
    assert dict(three_points.facts)["TTFT"] == "not measured"
    assert one_point.line.startswith(
        "Best at ≤ 1 point lost: half at keep 0.5: accuracy % 99.0, -1.0 [-2.5, +0.0], visual"
    )
    # Six wrong of 200 questions are 3 points, and the limit is inclusive.
    assert verdicts(result("limit", 0.2, 97, 97))[1].row.method == "limit"
    assert verdicts(result("beyond", 0.2, 97, 96))[1].row is None
    tokens = made("", result("some", 16, 100, 100, tokens=16))
    assert find_verdicts(tokens.results)[0].answer == "some at keep 16 tokens"
    assert verdicts(result("a", 0.2, 99, 99), plan=dict(seeds=[0], equal_cost=True))[1].answer == "a at target 0.2"


def test_the_verdict_reports_that_no_setting_is_within_a_point() -> None:
    one_point, three_points = verdicts(*RIVALS, result("worse", 0.5, 80, 80), result("least", 0.25, 95, 95))
    assert one_point.row is None is three_points.row
    assert one_point.answer == "none; least at keep 0.25 loses least"
    assert one_point.facts == (("accuracy %", "95.0, -5.0 [-8.0, -2.5]"), ("visual tokens", "25 of 100 (25 %)"))


def test_the_verdict_names_ties() -> None:
    """At equal token counts the higher score wins. The verdict names ties, and no setting far below."""
    rivals = [build_swapped_result("equal", 0.25, 2), result("first", 0.25, 99, 99), result("near", 0.25, 98, 99)]
    one_point, _ = verdicts(*RIVALS, *rivals, result("dear", 0.5, 99, 99))
    assert one_point.row.method == "equal"  # the first in order
    assert "Not significantly different at no higher cost: first at keep 0.25, near at keep 0.25." in one_point.remarks
    faster = result("first", 0.25, 99, 99, timing=timing(0.5))
    assert verdicts(*RIVALS, rivals[0], faster)[0].row.method == "first"
    # One token of 100 is not another cost; two tokens are.
    close = result("close", 0.26, 100, 99, tokens=26), result("dear", 0.27, 100, 100, tokens=26.8)
    assert verdicts(*rivals, *close)[0].row.method == "close"
    many = [result(f"m{index}", 0.25, 99, 99) for index in range(8)]
    assert verdicts(*many)[0].remarks[0].endswith("m4 at keep 0.25 and 3 more.")


def test_the_interval_decides_the_certainty(monkeypatch: pytest.MonkeyPatch) -> None:
    same, cheap = result("same", 0.25, 100, 100), result("few", 0.1, 99, 99)
    one_point, three_points = verdicts(cheap, same)
    assert one_point.row.method == "few" and one_point.remarks[-1] == "The interval includes 0: no loss is shown."
    assert (
        one_point.doubt
        == "Not certain: with 200 questions, the interval reaches beyond 1 point. No other setting is certain."
    )
    assert three_points.doubt == "" and one_point.line.endswith(one_point.doubt)  # [-2.5, 0] shows a loss of at most 3
    # Without a single change the interval has zero width: 200 questions can show 3 points, but not one.
    one_point, three_points = verdicts(same)
    assert (
        one_point.doubt == "Not certain: 200 questions are too few. No other setting is certain."
        and three_points.doubt == ""
    )
    monkeypatch.setattr(report_runs, "QUESTIONS", 400)
    unpatched, same = result("unpatched", 1.0, 200, 200), result("same", 0.25, 200, 200)
    cheap, run_header = result("few", 0.1, 199, 198), header(kind_of_question="01" * 200)
    one_point, _ = find_verdicts(summarise([run_header, unpatched, cheap, same]))
    assert one_point.row.method == "few" and one_point.doubt == (
        "Not certain: with 400 questions, the interval reaches beyond 1 point. Certain: same at keep 0.25, with 25 "
        "of 100 (25 %)."
    )
    assert find_verdicts(summarise([run_header, unpatched, same]))[0].doubt == ""


def test_the_verdict_names_caveats() -> None:
    best = verdicts(*RIVALS[:1], result("downsample", 0.25, 100, 100), result("same", 0.25, 100, 100))[0]
    assert best.row.method == "downsample"
    assert "`downsample` is a baseline: no method scores higher at this cost." in best.remarks
    best_good = verdicts(result("random", 0.25, 99, 98), result("good", 0.25, 99, 99, timing=timing(0.5, load=9.0)))[0]
    assert best_good.row.method == "good"
    assert "Not shown to be better than `random` at the same keep." in best_good.remarks
    assert best_good.remarks[-1] == "The machine was busy during the measurement, so the times are not reliable."
    base, lost = result("unpatched", 1.0, 60, 60), result("lost", 0.25, 90, 30)
    verdict = find_verdicts(summarise([header(), base, lost]))[0]
    assert "Collapsed although the mean is good: word 60 → 30 %." in verdict.remarks


def test_an_empty_run_and_one_that_saves_nothing() -> None:
    for records in ([], [result("full", 1.0, 100, 100)]):
        for verdict in find_verdicts(summarise([header(), BASE, *records])):
            assert (
                verdict.row is None
                and verdict.answer == "no setting of this run drops visual tokens"
                and not verdict.facts
            )
    no_answers = summarise([header(evidence_only=True), BASE, *RIVALS])
    assert find_verdicts(no_answers) == []


def test_a_continued_run_has_the_same_verdict(tmp_path: Path) -> None:
    """Records in another order, and an interrupted last line."""
    records = [*RIVALS, result("half", 0.5, 99, 99, timing=timing(0.5)), result("third", 0.3, 97, 97)]
    expected = [verdict.line for verdict in verdicts(*records)]
    assert [verdict.line for verdict in verdicts(*reversed(records))] == expected
    lines = [json.dumps(record) for record in (header(), BASE, *records[::-1])]
    (tmp_path / RESULTS).write_text("\n".join(lines) + '\n{"record": "res')
    printed = " ".join(call("report", tmp_path, "--details").stdout.split())
    assert all(line in printed for line in expected)
    page = call("report", tmp_path, "--markdown").stdout
    assert f"- {expected[0]}\n" in page


def test_the_page_opens_with_the_verdict() -> None:
    page = make_page([made("", *RIVALS, result("half", 0.5, 99, 99))])
    offsets = [page.index(text) for text in ("half at keep 0.5", "<svg viewBox", 'id="warnings-1"', "<td")]
    assert offsets == sorted(offsets) and page.count("<h4>Best at") == 2
    assert ">TTFT</dt><dd>not measured<" in page.replace("\n", "")
    several = make_page([made("A", *RIVALS, result("half", 0.5, 99, 99)), made("B", *RIVALS)])
    assert several.index("A: Best at ≤ 1 point lost: half at keep 0.5") < several.index("<svg viewBox")
    assert 'class="verdict open"' in several
