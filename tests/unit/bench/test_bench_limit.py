# SPDX-License-Identifier: Apache-2.0
"""`tokenprune bench --max-visual-tokens`: rows, costs, output, and combinations that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokenprune
from report_runs import BASE, GOOD, header
from tokenprune.cli import app
from tokenprune.errors import BudgetError, OptionError
from tokenprune.selection.method import Site
from tokenprune_bench.plan import BenchPlan
from tokenprune_bench.report.compare import group_by_questions
from tokenprune_bench.report.runs import Run
from tokenprune_bench.results import summarise


def test_each_method_gets_at_most_the_limit(tmp_path: Path) -> None:
    """demo_vlm has 256 tokens per image. The limit leaves 64, and half of the limit is 32."""
    fixed = "bench --methods divprune,fastv --keep 0.5 --max-visual-tokens 64 --images 1 --repeats 0 --samples 1"
    result = CliRunner().invoke(app, [*fixed.split(), "--device", "cpu", "--run", str(tmp_path)])
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "methods get at most 64 visual tokens" in output
    assert "at keep 0.5 with max_visual_tokens=64" in output
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    rows = {(record["method"], record["keep"]): record for record in records[1:]}
    tokens = {key: record["stats"]["visual_tokens_out"] / record["questions"] for key, record in rows.items()}
    assert tokens == {
        ("unpatched", 1.0): 256, ("random", 0.5): 32, ("downsample", 64): 64, ("divprune", 0.5): 32, ("fastv", 0.5): 32,
    }  # fmt: skip
    assert {record["stats"]["visual_tokens_in"] / record["questions"] for record in rows.values()} == {256}
    ((sample,),) = [json.loads(path.read_text())["samples"] for path in (tmp_path / "samples").glob("*.json")]
    assert sample["tokens"] == 256 and {drawn["kept"] for drawn in sample["methods"]} == {32}
    other = CliRunner().invoke(app, [*fixed.replace("64", "128").split(), "--device", "cpu", "--run", str(tmp_path)])
    assert other.exit_code == 2 and "max_visual_tokens 64" in other.output


def test_methods_on_pixels_are_left_out_or_refused() -> None:
    sites = {tokenprune.method_info(name).cls.site for name in BenchPlan(max_visual_tokens=64).methods[2:]}
    assert Site.PRE_ENCODER not in sites and Site.PRE_LLM in sites
    with pytest.raises(OptionError, match="and so does dynres"):
        BenchPlan(("dynres",), max_visual_tokens=64)
    with pytest.raises(OptionError, match="escalate does not support --max-visual-tokens"):
        BenchPlan(("escalate",), max_visual_tokens=64)
    with pytest.raises(OptionError, match="Leave out --max-visual-tokens"):
        BenchPlan(("divprune",), max_visual_tokens=64, equal_cost=True)
    with pytest.raises(OptionError, match="limits images, and a question is about a video"):
        BenchPlan(("divprune",), max_visual_tokens=64, videos=True)
    with pytest.raises(BudgetError, match="max_visual_tokens=0"):
        BenchPlan(("divprune",), max_visual_tokens=0)


def test_runs_with_different_limits_are_not_compared() -> None:
    plans = [dict(seeds=[0], max_visual_tokens=limit) for limit in (None, 64, 64)]
    runs = [Run(name, summarise([header(plan=plan), BASE, GOOD])) for name, plan in zip("abc", plans, strict=True)]
    assert [[run.name for run in group] for group in group_by_questions(runs)] == [["a"], ["b", "c"]]
