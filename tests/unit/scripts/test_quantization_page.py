# SPDX-License-Identifier: Apache-2.0
"""Test the page on quantization and cache compression: its closed forms, and that its tables are current."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("quantization")


def test_closed_forms(script: Any) -> None:
    """Use Vicuna's 32 layers of width 4096 with MLPs of 11008, 64 text tokens and 2880 visual tokens."""
    table = script.closed_forms()[0]
    rows = {tuple(cell.text for cell in row[:4]): [cell.text for cell in row[4:]] for row in table.rows}
    matrices, tables = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 2 * 32064 * 4096
    token = 2 * 32 * 4096  # values per token
    unpruned, weights = 2 * token * (64 + 2880), 2 * (matrices + tables)
    assert rows["–", "bf16", "bf16", "–"] == [
        f"{weights / 2**30:.1f}", f"{unpruned / 2**20:.0f}", "100.0%", str(int((24 * 2**30 - weights) / unpruned))
    ]  # fmt: skip
    fastv = 2 * token * (64 + 2880 * (2 + 30 * 0.25) / 32)
    assert rows["fastv", "bf16", "bf16", "–"][1] == f"{fastv / 2**20:.0f}"
    smallest = token * (64 + 720) / 2 * (0.5 + 4 / 64)
    weights = matrices * (0.5 + 4 / 128) + 2 * tables
    assert rows["divprune", "int4", "int4", "half"] == [
        f"{weights / 2**30:.1f}", f"{smallest / 2**20:.0f}", f"{smallest / unpruned:.1%}",
        str(int((24 * 2**30 - weights) / smallest)),
    ]  # fmt: skip


def test_the_page_is_current(script: Any) -> None:
    path = ROOT / "benchmarks/results/cpu/quantization.jsonl"
    text = script.PAGE.read_text()
    for table in (*script.closed_forms(), script.measured(path)):
        assert script.to_markdown(table) in text, table.title
    _, lines = script.read(path)
    assert all(record["kv_bytes"] == record["kv_bytes_told"] for record in lines)
    assert [tuple(record[key] for key in ("method", "weights", "cache", "compressed")) for record in lines] == [
        tuple(vars(setting).values()) for setting in script.MEASURED
    ]
