# SPDX-License-Identifier: Apache-2.0
"""Rows of results are of a quiet machine, or marked; files of results go on row by row."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from each import each

ROOT = Path(__file__).parents[3]
FIRST = {"cpus": 2, "load": 1.0}


@pytest.fixture
def rows(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/experiments/rows.py, on a quiet machine of two cores."""
    module = script("rows")
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module, "_now", lambda: 1.0)
    return module


def given(**more: bool) -> argparse.Namespace:
    return argparse.Namespace(**{"allow_load": False, "resume": False, "missing": False} | more)


@each(
    ("row", "header", "loaded"),
    [
        ({"load": 2.0, "cpus": 2}, None, False),
        ({"load": 2.01, "cpus": 2}, None, True),
        ({"load": 3.0, "cpus": 4}, {"cpus": 2, "load": 9.0}, False),  # the row's own goes first
        ({}, {"cpus": 2, "load": 9.0}, True),
        ({"load": 1.0}, {"cpus": 2, "load": 9.0}, False),
        ({"timing": {"load": 3.1}, "environment": {"cores": 2}}, {}, True),  # of `tokenprune bench`
        ({"timing": {"load": 1.1}, "environment": {"cores": 2}}, {}, False),
        ({"loaded": True}, None, True),
        ({}, {}, False),  # of before loads were noted
    ],
)
def test_loaded_is_a_load_above_the_cores(rows: Any, row: dict, header: dict | None, loaded: bool) -> None:
    assert rows.is_loaded(row, header) is loaded


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_loaded_row_is_not_written_unless_it_is_marked(
    rows: Any, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(rows, "_now", lambda: 1.5)
    rows.Rows(path, FIRST, given(), code="a").measure("quiet", lambda: {"ms": 1})
    before, ran = path.read_text(), []

    def run() -> dict[str, Any]:
        ran.append(1)
        monkeypatch.setattr(rows, "_now", lambda: 3.5)
        return {"ms": 9}

    if when == "begin":
        monkeypatch.setattr(rows, "_now", lambda: 3.5)
    with pytest.raises(SystemExit, match=r"load is 3.5 on 2 cores.*--resume.*--allow-load"):
        rows.Rows(path, FIRST, given(resume=True), code="a").measure("busy", run)
    assert path.read_text() == before and len(ran) == (when == "end")
    rows.Rows(path, FIRST, given(resume=True, allow_load=True), code="a").measure("busy", run)
    _, (quiet, busy) = rows.read(path)
    assert "loaded" not in quiet and quiet["load"] == 1.5
    assert busy["loaded"] is True and busy["load"] == 3.5 and busy["cpus"] == 2
    assert rows.quiet(path)[1] == [quiet]


def test_it_goes_on_after_the_quiet_rows_of_the_same_measurement(rows: Any, tmp_path: Path) -> None:
    path, ran = tmp_path / "a.jsonl", []

    def measure(file: Any, place: Any) -> Any:
        return file.measure(place, lambda: ran.append(place) or [{"ms": 1}, {"ms": 2}])

    for place in (("a", 1), ("b", 2)):
        assert len(measure(rows.Rows(path, FIRST, given(resume=True), code="x", threads=1), place)) == 2
        assert place == ran[-1]  # it was written at once: another process goes on
    measure(rows.Rows(path, FIRST, given(resume=True), code="x", threads=1), ("a", 1))
    assert len(ran) == 2
    measure(rows.Rows(path, FIRST, given(missing=True), code="y", threads=1), ("a", 1))
    assert len(ran) == 2  # --missing takes rows of other code
    measure(rows.Rows(path, FIRST, given(resume=True), code="y", threads=1), ("a", 1))
    assert len(ran) == 3 and len(rows.read(path)[1]) == 2  # --resume does not
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["load"] = lines[2]["load"] = 7.0
    rows.write(path, lines)
    measure(rows.Rows(path, FIRST, given(resume=True), code="y", threads=1), ("a", 1))
    assert len(ran) == 4  # a loaded row is measured anew
    measure(rows.Rows(path, FIRST, given(), code="y", threads=1), ("b", 2))
    assert [one["place"] for one in rows.read(path)[1]] == [["b", 2]] * 2  # without --resume the file is new


def test_committed_rows_of_a_loaded_machine_are_marked(rows: Any) -> None:
    """Those of before scripts refused them; what `tokenprune bench` wrote is told by its own load."""
    found = 0
    for path in [*(ROOT / "benchmarks/results/cpu").glob("*.jsonl"), ROOT / "benchmarks/results/encoder.jsonl"]:
        header, *records = (json.loads(line) for line in path.read_text().splitlines())
        for one in (header, *records):
            if "load" in one and one["load"] > one.get("cpus", header["cpus"]):
                found += 1
                assert one.get("loaded") is True, (path.name, one.get("method"))
            else:
                assert "loaded" not in one, (path.name, one.get("method"))
