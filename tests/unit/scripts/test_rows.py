# SPDX-License-Identifier: Apache-2.0
"""Test rows of results: rows measured under load are marked, and files continue row by row."""

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
    """Return benchmarks/experiments/rows.py on a quiet machine with two cores."""
    module = script("rows")
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module, "_now", lambda: 1.0)
    return module


def build_options(**more: bool) -> argparse.Namespace:
    return argparse.Namespace(**{"allow_load": False, "resume": False, "missing": False} | more)


@each(
    ("row", "header", "loaded"),
    [
        ({"load": 2.0, "cpus": 2}, None, False),
        ({"load": 2.01, "cpus": 2}, None, True),
        ({"load": 3.0, "cpus": 4}, {"cpus": 2, "load": 9.0}, False),  # the row's values have priority
        ({}, {"cpus": 2, "load": 9.0}, True),
        ({"load": 1.0}, {"cpus": 2, "load": 9.0}, False),
        ({"timing": {"load": 3.1}, "environment": {"cores": 2}}, {}, True),  # format of `tokenprune bench`
        ({"timing": {"load": 1.1}, "environment": {"cores": 2}}, {}, False),
        ({"loaded": True}, None, True),
        ({}, {}, False),  # written before loads were recorded
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
    rows.Rows(path, FIRST, build_options(), code="a").measure("quiet", lambda: {"ms": 1})
    before, ran = path.read_text(), []

    def run() -> dict[str, Any]:
        ran.append(1)
        monkeypatch.setattr(rows, "_now", lambda: 3.5)
        return {"ms": 9}

    if when == "begin":
        monkeypatch.setattr(rows, "_now", lambda: 3.5)
    with pytest.raises(SystemExit, match=r"load is 3.5 on 2 cores.*--resume.*--allow-load"):
        rows.Rows(path, FIRST, build_options(resume=True), code="a").measure("busy", run)
    assert path.read_text() == before and len(ran) == (when == "end")
    rows.Rows(path, FIRST, build_options(resume=True, allow_load=True), code="a").measure("busy", run)
    _, (quiet, busy) = rows.read(path)
    assert "loaded" not in quiet and quiet["load"] == 1.5
    assert busy["loaded"] is True and busy["load"] == 3.5 and busy["cpus"] == 2
    assert rows.quiet(path)[1] == [quiet]


def test_a_run_continues_after_quiet_rows_of_the_same_measurement(rows: Any, tmp_path: Path) -> None:
    path, ran = tmp_path / "a.jsonl", []

    def measure(file: Any, key: Any) -> Any:
        return file.measure(key, lambda: ran.append(key) or [{"ms": 1}, {"ms": 2}])

    for key in (("a", 1), ("b", 2)):
        assert len(measure(rows.Rows(path, FIRST, build_options(resume=True), code="x", threads=1), key)) == 2
        assert key == ran[-1]  # rows are written at once, so another process can continue
    measure(rows.Rows(path, FIRST, build_options(resume=True), code="x", threads=1), ("a", 1))
    assert len(ran) == 2
    measure(rows.Rows(path, FIRST, build_options(missing=True), code="y", threads=1), ("a", 1))
    assert len(ran) == 2  # --missing accepts rows of other code
    measure(rows.Rows(path, FIRST, build_options(resume=True), code="y", threads=1), ("a", 1))
    assert len(ran) == 3 and len(rows.read(path)[1]) == 2  # --resume does not accept them
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["load"] = lines[2]["load"] = 7.0
    rows.write(path, lines)
    measure(rows.Rows(path, FIRST, build_options(resume=True), code="y", threads=1), ("a", 1))
    assert len(ran) == 4  # a loaded row is measured again
    measure(rows.Rows(path, FIRST, build_options(), code="y", threads=1), ("b", 2))
    assert [row["place"] for row in rows.read(path)[1]] == [["b", 2]] * 2  # without --resume the file is replaced


def test_committed_rows_of_a_loaded_machine_are_marked(rows: Any) -> None:
    """Check rows from before the scripts refused to write them, and rows of `tokenprune bench` by their load."""
    num_loaded = 0
    for path in [*(ROOT / "benchmarks/results/cpu").glob("*.jsonl"), ROOT / "benchmarks/results/encoder.jsonl"]:
        header, *records = (json.loads(line) for line in path.read_text().splitlines())
        for record in (header, *records):
            if "load" in record and record["load"] > record.get("cpus", header["cpus"]):
                num_loaded += 1
                assert record.get("loaded") is True, (path.name, record.get("method"))
            else:
                assert "loaded" not in record, (path.name, record.get("method"))
