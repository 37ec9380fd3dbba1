# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/llama_cpp_table.py: rows survive an aborted run, and the smaller image is the fastest
fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("llama_cpp_table")


def time_rows(tokens: int, **seconds: float) -> list[dict[str, Any]]:
    """Return rows of three rounds. The second round has other load, which cancels in a ratio."""
    settings = {"unpruned": ("unpruned", None), "pruned": ("divprune", 0.25), "half": ("image", 0.5)}
    settings |= {f"scale_{round(10 * scale)}": ("image", scale) for scale in (0.6, 0.7, 0.8, 0.9)}
    return [
        {"tokens": tokens, "round": turn, "setting": settings[name][0], "value": settings[name][1], "seconds": s * load}
        for turn, load in enumerate((1, 3, 1)) for name, s in seconds.items()
    ]  # fmt: skip


def test_an_aborted_run_continues(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(__version__="0"))
    monkeypatch.setattr(script, "FILE", tmp_path / "rows.jsonl")
    rows = script.Rows("answers", "demo_qwen", 60)
    rows.add(index=0, right=1)
    with script.FILE.open("a") as file:
        file.write('{"kind": "answers", "mod')  # interrupted while writing
    again = script.Rows("answers", "demo_qwen", 60)
    assert again.has(index=0) and not again.has(index=1) and not again.is_late
    again.add(index=1, right=0)
    other = script.Rows("answers", "demo_smol", 0)
    assert not other.rows and other.is_late
    kinds = [json.loads(line)["kind"] for line in script.FILE.read_text().splitlines()]
    assert kinds == ["run", "answers", "run", "answers", "run"]


def test_the_smaller_image_is_as_fast_as_the_pruned_prompt(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SCALES", (0.5, 0.6, 0.7, 0.8, 0.9))
    fast = {"half": 1.0, "scale_6": 1.5, "scale_7": 2.0, "scale_8": 2.5, "scale_9": 3.5}
    rows = time_rows(100, unpruned=4.0, pruned=2.0, **fast) + time_rows(400, unpruned=4.0, pruned=0.5, **fast)
    assert script.find_ratios(rows, 100)["divprune", 0.25] == 2.0
    assert script.find_scale(rows, 120) == 0.7
    assert script.find_scale(rows, 500) == 0.5  # every scale is slower


def test_each_setting_has_a_row(script: Any) -> None:
    rows = []
    for kind, right in (("word", 0), ("word", 1), ("count", 1), ("count", 1)):
        answers = {name: {"right": 1, "seconds": 1.0} for name in script.SETTINGS}
        rows.append({"question": kind, **answers, "same tokens": {"right": right, "seconds": 1.0}})
    table = script.write_answers(rows)
    assert table[0] == "|setting|first token|all (4)|`divprune` minus this|count (2)|word (2)|"
    assert len(table) == 2 + len(script.SETTINGS)
    assert table[4] == "|smaller image, same tokens|1.00x|75|+25 [+0, +75]|100|50|"
