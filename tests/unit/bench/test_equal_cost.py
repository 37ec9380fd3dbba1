# SPDX-License-Identifier: Apache-2.0
"""Test equal cost: every method gets a setting with the same cost, or is left out with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import tokenprune
from each import each
from families import FAMILIES
from report_runs import BASE, GOOD, header
from tokenprune import Budget
from tokenprune.cli import app
from tokenprune.errors import BudgetError, OptionError
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.settings import Setting
from tokenprune.settings.cost import CostModel, Load
from tokenprune_bench.equal_cost import describe_setting, explain_miss, solve_setting
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.profiling.patched import build_escalation
from tokenprune_bench.report.compare import group_by_questions
from tokenprune_bench.report.drawing import FILE, FOLDER
from tokenprune_bench.report.runs import Run
from tokenprune_bench.results import summarise
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_bench.tables import build_tables
from tokenprune_demo.heldout import load_heldout

SHAPE = DecoderShape(layers=32, hidden=64, intermediate=128, heads=4, kv_heads=4, head_dim=16)
NO_PROMISE = {
    "dynres": "the number of tokens depends on the image's content",
    "view_select": "keeps or drops whole images",
    "pevlm": "removes no tokens",
    "ipcv": "removes no tokens",
    "escalate": "runs a second pass",
}
BY_WHOLE_LAYERS = ("vtw",)


def parse_setting(name: str) -> Setting:
    return build_escalation(1.0) if name == "escalate" else Setting.from_text(name)


# -- settings ----------------------------------------------------------------------------------------------------------


@each("name", [*tokenprune.available_methods(), "escalate"])
@each("share", [0.5, 0.25, 0.11])
def test_each_method_gets_a_setting_whose_closed_form_is_the_target(name: str, share: float) -> None:
    try:
        setting = solve_setting(parse_setting(name), share)
        methods, budgets = setting.steps()
        cost = CostModel(SHAPE).predict(Load((), 576), methods, budgets)
    except BudgetError as error:
        assert name in (*NO_PROMISE, "visipruner", "ivc_prune", "pact"), error
        assert name in str(error) or "cannot be reached by a cut at layer" in str(error)
        return
    assert name not in NO_PROMISE
    if name in BY_WHOLE_LAYERS:
        assert share * 576 - 18 < cost.tokens <= share * 576
    else:
        assert abs(cost.tokens - share * 576) <= 1


@pytest.mark.parametrize(("name", "why"), NO_PROMISE.items())
def test_a_method_without_a_predictable_cost_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(BudgetError, match=f"{name} has no setting for a layer average of 0.25: .*{why}"):
        solve_setting(parse_setting(name), 0.25)


def test_each_site_gets_the_matching_setting() -> None:
    # The `keep` of vscan is the average of its two cuts.
    keeps = {"fastv": {"keep": {"average_share": 0.25}}, "dymu": {"keep": 0.25, "exact": True}}
    for name in ("divprune", "vscan", "tome", *keeps):
        assert solve_setting(parse_setting(name), 0.25).to_json() == {"method": name} | keeps.get(name, {"keep": 0.25})


def test_a_run_with_another_cost_is_explained() -> None:
    assert explain_miss(parse_setting("vtw"), 0.5, 128, images=1, tokens=256) is None
    assert explain_miss(parse_setting("fastv"), 0.25, 65, images=1, tokens=256) is None
    assert explain_miss(parse_setting("fastv"), 0.25, 66, images=1, tokens=256)
    assert explain_miss(parse_setting("fastv"), 0.25, 2 * 65, images=2, tokens=2 * 256) is None
    assert "spent 0.167 of the visual" in explain_miss(parse_setting("vtw"), 0.25, 256 / 6, images=1, tokens=256)
    # 11 x 11 is the nearest square.
    assert explain_miss(parse_setting("downsample"), 0.5, 121, images=1, tokens=256) is None
    assert explain_miss(parse_setting("downsample"), 0.5, 100, images=1, tokens=256)


def test_a_setting_in_words() -> None:
    inside = {"method": "fastv", "keep": {"average_share": 0.5}}
    assert describe_setting(inside, [256, 256, 64], 256) == "average_share=0.5: 100 %, 25 % from layer 2"
    assert describe_setting({"method": "dymu", "keep": 0.25, "exact": True}, [64, 64], 256) == "keep=0.25, exact=True"


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    methods = ("fastv", "pyramiddrop", "sparsevlm", "vtw", "dymu", "divprune", "dynres", "visipruner")
    plan = BenchPlan(methods, keeps=(0.5, 0.25), seeds=(0,), repeats=0, equal_cost=True)
    questions = load_heldout(kinds=("word",), limit=1)
    return json.loads(json.dumps(list(Bench(load_model(device="cpu"), plan, questions=questions).records())))


def test_results_spend_the_target_and_skipped_methods_have_a_reason(records: list[dict[str, Any]]) -> None:
    spent = {
        (record["method"], record["keep"]): record["stats"]["visual_tokens_average"] / 256
        for record in records[2:]
        if record["record"] == "result"
    }
    reached = ("random", "pyramiddrop", "sparsevlm", "dymu", "divprune")
    for name, keep in [*((name, keep) for name in reached for keep in (0.5, 0.25)), ("fastv", 0.5), ("vtw", 0.5)]:
        assert spent.pop((name, keep)) == pytest.approx(keep, abs=1 / 256), name
    assert spent == {("downsample", 0.5): pytest.approx(121 / 256), ("downsample", 0.25): pytest.approx(64 / 256)}
    reasons = {
        (record["method"], record["keep"]): record["reason"] for record in records if record["record"] == "skipped"
    }
    assert reasons.keys() == {(name, keep) for name in ("dynres", "visipruner") for keep in (0.5, 0.25)} | {
        ("fastv", 0.25), ("vtw", 0.25)
    }  # fmt: skip
    assert "layer 2 of 6: the layers before it spend 0.333" in reasons["fastv", 0.25]
    assert "it spent 0.167" in reasons["vtw", 0.25]
    assert (
        "depends on the image's content" in reasons["dynres", 0.5] and "content decides" in reasons["visipruner", 0.5]
    )


def test_the_tables_show_the_setting_and_the_reached_share(records: list[dict[str, Any]]) -> None:
    first, settings, *others = build_tables(summarise(records))
    assert {table.columns[1] for table in (first, settings, *others)} == {"target"}
    rows = [tuple(cell.text for cell in row) for row in settings.rows]
    assert ("fastv", "0.5", "50.0 %", "average_share=0.5: 100 %, 25 % from layer 2") in rows
    assert ("downsample", "0.5", "47.3 %", "keep=0.5") in rows
    assert ("divprune", "0.25", "25.0 %", "keep=0.25") in rows
    assert any(note.startswith("Skipped fastv at target 0.25") for note in first.notes)
    assert not any("compare them with PRE_LLM methods" in note for note in first.notes)


# -- the command line --------------------------------------------------------------------------------------------------


def invoke_bench(*more: object) -> Result:
    fixed = "bench --equal-cost --repeats 0 --device cpu --keep 0.5".split()
    return CliRunner(env={"COLUMNS": "240"}).invoke(app, [*fixed, *map(str, more)])


def test_the_command_line_chooses_settings_and_draws_with_them(tmp_path: Path) -> None:
    (question,) = load_heldout(kinds=("word",), limit=1)
    data, run = tmp_path / "one.jsonl", tmp_path / "run"
    data.write_text(
        json.dumps({"image": str(question.path), "question": question.question, "answer": question.answer}) + "\n"
    )
    result = invoke_bench("--methods", "fastv,dynres", "--data", data, "--run", run, "--sample", 0, "--details")
    assert result.exit_code == 0, result.output
    assert "average_share=0.5: 100 %, 25 % from layer 2" in result.stdout
    assert "Skipped dynres at target 0.5: dynres has no setting" in result.stdout
    assert json.loads((run / "config.json").read_text())["equal_cost"] is True
    (sample,) = json.loads((run / FOLDER / FILE).read_text())["samples"]
    assert {method["method"]: method["kept"] for method in sample["methods"]} == {
        "random": 128, "downsample": 121, "fastv": 64,  # the count after its cut, not half of the tokens
    }  # fmt: skip
    again = CliRunner().invoke(app, ["bench", "--keep", "0.5", "--repeats", "0", "--device", "cpu", "--methods",
                                     "fastv,dynres", "--data", str(data), "--run", str(run)])  # fmt: skip
    assert again.exit_code != 0 and "equal_cost" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keep", "64"), "shares of the visual tokens, such as 0.25, not 64 tokens"),
        (("--keep", "1.5"), "keep=1.5 is not a valid share"),
        (("--keep", "0"), "keeps no token"),
        (("--keep", "many"), "many"),
        (("--methods", "pool+fastv"), "pool+fastv"),
    ],
)
def test_bad_targets_are_refused_before_any_work(arguments: tuple[str, ...], message: str) -> None:
    result = invoke_bench("--images", 1, "--methods", "pool", *arguments)
    assert result.exit_code != 0 and message in " ".join(result.output.split())


def test_a_plan_accepts_only_shares() -> None:
    with pytest.raises(OptionError, match="not 64 tokens"):
        BenchPlan(keeps=(0.5, 64), equal_cost=True)
    with pytest.raises(OptionError, match="is a stack"):
        BenchPlan(methods=("pool+fastv",), equal_cost=True)
    # A method that removes no tokens is refused at each target.
    rows = BenchPlan(methods=("pevlm",), keeps=(0.5, 0.25), equal_cost=True).rows()
    assert rows[-2:] == [("pevlm", 0.5), ("pevlm", 0.25)]


def test_runs_at_equal_cost_are_compared_only_with_each_other() -> None:
    plans = [dict(seeds=[0]), dict(seeds=[0], equal_cost=True), dict(seeds=[0], equal_cost=True)]
    runs = [Run(name, summarise([header(plan=plan), BASE, GOOD])) for name, plan in zip("abc", plans, strict=True)]
    assert [[run.name for run in group] for group in group_by_questions(runs)] == [["a"], ["b", "c"]]


# -- beside another method ---------------------------------------------------------------------------------------------


def test_in_a_stack_a_share_counts_the_tokens_that_arrive(build: Any) -> None:
    """36 tokens are pooled to 18. The share of three quarters means 18 in two of four layers, and 9 in the others."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    keep = [0.5, Budget(average_share=0.75)]
    with tokenprune.patched(model, ["pool", tokenprune.method("fastv", layer=2)], keep=keep):
        model(**inputs)
        stats = tokenprune.stats(model)
    images = stats.visual_tokens_in // 36
    assert stats.visual_tokens_per_layer == [18 * images, 18 * images, 9 * images, 9 * images]
    keep[1] = Budget(average_share=0.5)
    with (
        tokenprune.patched(model, ["pool", tokenprune.method("fastv", layer=2)], keep=keep),
        pytest.raises(BudgetError, match="cannot be reached by a cut at layer 2 of 4"),
    ):
        model(**inputs)
