# SPDX-License-Identifier: Apache-2.0
"""`keep=1` is refused everywhere, because JSON and many programs write 1.0 as 1.

The two possible budgets stay distinct in copies and files. Combined methods report their joint share.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tokenprune
from basics import snapshot
from pruned import run_pruned
from tests.unit.api.test_budget import SHAPE
from tokenprune import Budget, BudgetError
from tokenprune.budgets import compute_joint_share
from tokenprune.budgets.schedule import plan_cuts
from tokenprune.cli import app
from tokenprune.integrations.vllm.settings.items import count_kept
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.settings import Setting
from tokenprune.settings.saved import read_config, write_config
from tokenprune_bench.app import snippets
from tokenprune_bench.lmms_eval.arguments import parse_arguments
from tokenprune_bench.plan import BenchPlan
from zoo import FAMILIES

AMBIGUOUS = r"Pass 1\.0.*Budget\(tokens=1\)"
ONE, ALL = {"method": "divprune", "keep": {"tokens": 1}}, {"method": "divprune", "keep": 1.0}


def test_settings_and_patch_reject_keep_1(tmp_path: Path, build) -> None:
    model, path = build(FAMILIES["llava"]), tmp_path / "tokenprune.json"
    before = snapshot(model)
    calls = [
        lambda: Budget(keep=1),
        lambda: BenchPlan(methods=("divprune",), keeps=(0.5, 1)),
        lambda: parse_setting({"method": "uniform", "keep": 0.5}, {"keep": 1}),
        *(lambda keep=keep: tokenprune.patch(model, ["divprune", "fastv"], keep=keep) for keep in (1, [0.5, 1])),
    ]
    for setting in (
        {"method": "divprune", "keep": 1},
        {"method": ["divprune", "fastv"], "keep": [0.5, 1]},
        {"method": "divprune", "keep": {"keep": 1}},
    ):
        path.write_text(json.dumps({"schema": 1, "setting": setting}))
        for read in (partial(read_config, setting), partial(read_config, path), partial(parse_setting, setting)):
            with pytest.raises(BudgetError, match=AMBIGUOUS):
                read()
    for call in calls:
        with pytest.raises(BudgetError, match=AMBIGUOUS):
            call()
    assert snapshot(model) == before


@torch.no_grad()
def test_share_1_and_one_token_are_applied(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, rows=1)
    for keep, expected in ((1.0, 36), (Budget(tokens=1), 1), (2, 2), (Budget(tokens=2), 2)):
        assert run_pruned(model, inputs, "divprune", keep)[1].visual_tokens_out == expected
    for setting, expected in ((ALL, 36), (ONE, 1)):
        with tokenprune.patched(model, config=setting):
            model(**inputs)
            assert tokenprune.stats(model).visual_tokens_out == expected
        assert count_kept(parse_setting(setting), 36) == expected


def test_one_token_stays_a_count_in_copies_and_plans() -> None:
    single, sixty_four = Budget(tokens=1), Budget(tokens=64)
    assert single != Budget(keep=1.0) and len({single, Budget(keep=1.0)}) == 2 and not single.is_identity()
    assert sixty_four == Budget(keep=64) and repr(sixty_four) == "Budget(keep=64)" and sixty_four.format_short() == "64"
    assert repr(single) == single.format_short() == "Budget(tokens=1)"
    assert copy.deepcopy(single) == pickle.loads(pickle.dumps(single)) == single
    assert dataclasses.replace(sixty_four, per="frame") == Budget(keep=64, per="frame")
    assert plan_cuts(4, [(0, 1.0)], single)[0].budget.resolve([9], layer=0, shape=SHAPE, text_tokens=0) == [1]
    both = {"tokens": 3, "keep": 4}
    for invalid in ({"tokens": 0}, {"tokens": 0.5}, {"tokens": True}, both, both | {"keep": 0.5}):
        with pytest.raises(BudgetError):
            Budget.from_json(invalid)


@pytest.mark.parametrize(
    "command", [["bench", "--methods", "divprune"], ["profile", "--methods", "divprune"], ["show", "x.png"], ["tune"]]
)
def test_commands_reject_keep_1(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--keep", "1"])
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and "1.0 to keep all tokens" in output and "Budget(tokens=1)" in output, result.output


def test_lmms_eval_rejects_keep_1() -> None:
    for keep in (1, "1", "0.5+1"):
        with pytest.raises(BudgetError, match=AMBIGUOUS):
            parse_arguments({"method": "divprune+fastv" if "+" in str(keep) else "divprune", "keep": keep}, "llava", [])
    assert parse_arguments({"method": "divprune", "tokens": 1}, "llava", []).config.steps()[1] == [Budget(tokens=1)]


def test_json_distinguishes_share_and_count(tmp_path: Path) -> None:
    path = tmp_path / "tokenprune.json"
    for setting, budget in ((ONE, Budget(tokens=1)), (ALL, Budget(keep=1.0))):
        write_config(path, Setting.from_json(setting))
        assert read_config(path).steps()[1] == [budget]
        parsed = json.loads(json.dumps(parse_setting(setting).to_json()))
        assert parse_setting(parsed) == parse_setting(setting)
    assert '"keep": 1.0' in path.read_text()
    several = {"method": ["dynres", "divprune"], "keep": [1.0, {"tokens": 1}]}
    assert parse_setting(parse_setting(several).to_json()) == parse_setting(several)
    for setting in (Setting.from_json(ALL), Setting.from_text("divprune", 1.0)):
        assert snippets.python(setting).endswith("keep=1.0)") and "--keep 1.0" in snippets.bench(setting, "m")


def test_joint_share_of_combined_methods() -> None:
    quarter, sixteen = Budget(keep=0.25), Budget(tokens=16)
    for budgets, tokens, share in (
        ([quarter], None, 0.25),
        ([quarter] * 2, None, 0.0625),
        ([], None, 1.0),
        ([quarter] * 2, 256, 16 / 256),
        ([Budget(keep=0.5)] * 2, 3, 1 / 3),
        ([quarter, sixteen], None, None),
        ([quarter, sixteen], 256, 1 / 16),
        ([sixteen, Budget(tokens=64)], 256, 1 / 16),
        ([quarter, Budget.from_kv_share(0.5)], 256, None),
    ):
        assert compute_joint_share(budgets, *([] if tokens is None else [tokens])) == share


@torch.no_grad()
def test_repr_shows_the_joint_share(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, rows=1)
    with tokenprune.patched(model, ["divprune", "fastv"], keep=0.5):
        assert "tokenprune: 2 methods, together keep=0.25" in repr(model)
        model(**inputs)
        stats = tokenprune.stats(model)
        assert stats.keep_ratio == compute_joint_share([Budget(keep=0.5)] * 2, 36) == 9 / 36
        assert "visual tokens 36 -> 9 (25.0%)" in repr(stats)
    for method, keep in (("divprune", 0.5), (["divprune", "fastv"], Budget(average_share=0.9))):
        with tokenprune.patched(model, method, keep=keep):
            assert "together" not in repr(model)
