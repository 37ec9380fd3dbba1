# SPDX-License-Identifier: Apache-2.0
"""Test experiments/capacity_errors.py: errors of `tokenprune capacity` on rows outside of its fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parents[3] / "benchmarks" / "experiments"


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("capacity_errors")


def test_a_fit_finds_the_assumptions_that_made_the_rates(script: Any) -> None:
    assumptions = {"compute": 0.5, "tower": 0.4, "each": 0.004, "launch": 0.02}
    rows = tuple(
        script.Row(row.server, row.keep, row.answer, row.predict(assumptions).rate, row.first)
        for row in script.read_rows()
    )
    fitted = script.fit(rows)
    assert all(row.predict(fitted).rate == pytest.approx(row.rate, rel=0.01) for row in rows)


def test_a_row_that_is_left_out_does_not_change_its_own_prediction(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = script.read_rows()
    changed = [script.Row(row.server, row.keep, row.answer, 9.0, 9.0) if index == 0 else row
               for index, row in enumerate(rows)]  # fmt: skip
    predictions = []
    for selected_rows in (rows, changed):
        monkeypatch.setattr(script, "read_rows", lambda: selected_rows)  # noqa: B023
        errors = script.compute_errors()[0]
        for kind in ("row", "server_out"):
            rate, first = errors[kind]
            predictions.append([(1 + rate) * selected_rows[0].rate, (1 + first) * selected_rows[0].first])
    assert predictions[:2] == [pytest.approx(values) for values in predictions[2:]]


def test_the_page_has_the_errors_of_the_committed_rows(script: Any) -> None:
    text = script.PAGE.read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    assert text.strip() == script.page()
    largest = {kind: max(abs(row[kind][0]) for row in script.compute_errors()) for kind in script.KINDS}
    assert largest["row"] < 0.1 < largest["server_out"] < 0.6
    page = script.PAGE.read_text()
    assert f"rates up to {largest['server_out']:.0%}".replace("%", " %") in page
