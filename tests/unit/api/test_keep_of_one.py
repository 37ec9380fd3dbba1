# SPDX-License-Identifier: Apache-2.0
"""The integer 1 as `keep` is refused wherever one is read, because JSON and many programs write 1.0 so; and the two
budgets that it could mean stay apart in copies and in files. Several methods say what they keep together."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tokenprune
from basics import snapshot
from tokenprune import Budget, BudgetError, UnsupportedModelError
from tokenprune.budgets import compute_joint_share
from tokenprune.budgets.schedule import plan_cuts
from tokenprune.cli import app
from tokenprune.integrations.vllm.settings.items import count_kept
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.settings import Setting
from tokenprune.settings.saved import read_config, write_config
from tokenprune_bench.app import snippets
from tokenprune_bench.lmms_eval.arguments import parse_arguments
from tokenprune_bench.plan import BenchPlan
from zoo import FAMILIES

SHAPE = DecoderShape(layers=4, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4)
BOTH_WAYS = r"Pass 1\.0.*Budget\(tokens=1\)"
ONE, ALL = {"method": "divprune", "keep": {"tokens": 1}}, {"method": "divprune", "keep": 1.0}
SAID: dict[str, Any] = {
    "a setting": {"method": "divprune", "keep": 1},
    "one of several": {"method": ["divprune", "fastv"], "keep": [0.5, 1]},
    "an object": {"method": "divprune", "keep": {"keep": 1}},
    "after JavaScript": json.loads('{"method": "divprune", "keep": 1}'),
}


@pytest.mark.parametrize("setting", SAID.values(), ids=SAID)
def test_settings_reject_keep_1(setting: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenprune.json"
    path.write_text(json.dumps({"schema": 1, "setting": setting}))
    for given in (setting, path):
        with pytest.raises(BudgetError, match=BOTH_WAYS):
            read_config(given)
    with pytest.raises(BudgetError, match=BOTH_WAYS):
        parse_setting(setting)
    with pytest.raises(BudgetError, match=BOTH_WAYS):
        parse_setting({"method": "uniform", "keep": 0.5}, {"keep": 1})


def test_patch_rejects_keep_1(build) -> None:
    model = build(FAMILIES["llava"])
    was = snapshot(model)
    for keep in (1, [0.5, 1]):
        with pytest.raises(BudgetError, match=BOTH_WAYS):
            tokenprune.patch(model, ["divprune", "fastv"], keep=keep)
    with pytest.raises(BudgetError, match=BOTH_WAYS):
        Budget(keep=1)
    with pytest.raises(BudgetError, match=BOTH_WAYS):
        BenchPlan(methods=("divprune",), keeps=(0.5, 1))
    assert snapshot(model) == was


@torch.no_grad()
def test_share_1_and_one_token_are_applied(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(rows=1)
    for keep, left in ((1.0, 36), (Budget(tokens=1), 1), (2, 2), (Budget(tokens=2), 2)):
        with tokenprune.patched(model, "divprune", keep=keep):
            model(**inputs)
            assert tokenprune.stats(model).visual_tokens_out == left
    for setting, left in ((ALL, 36), (ONE, 1)):
        with tokenprune.patched(model, config=setting):
            model(**inputs)
            assert tokenprune.stats(model).visual_tokens_out == left
        assert count_kept(parse_setting(setting), 36) == left


@pytest.mark.parametrize(
    "command", [["bench", "--methods", "divprune"], ["profile", "--methods", "divprune"], ["show", "x.png"], ["tune"]]
)
def test_commands_reject_keep_1(command: list[str]) -> None:
    made = CliRunner().invoke(app, [*command, "--keep", "1"])
    said = " ".join(made.output.split())
    assert made.exit_code == 2 and "1.0 to keep all tokens" in said and "Budget(tokens=1)" in said, made.output


def test_lmms_eval_rejects_keep_1() -> None:
    for keep in (1, "1", "0.5+1"):
        with pytest.raises(BudgetError, match=BOTH_WAYS):
            parse_arguments({"method": "divprune+fastv" if "+" in str(keep) else "divprune", "keep": keep}, "llava", [])
    assert parse_arguments({"method": "divprune", "tokens": 1}, "llava", []).config.steps()[1] == [Budget(tokens=1)]


def test_json_distinguishes_share_and_count(tmp_path: Path) -> None:
    path = tmp_path / "tokenprune.json"
    for setting, budget in ((ONE, Budget(tokens=1)), (ALL, Budget(keep=1.0))):
        write_config(path, Setting.from_json(setting))
        assert read_config(path).steps()[1] == [budget]
        again = json.loads(json.dumps(parse_setting(setting).to_json()))
        assert parse_setting(again) == parse_setting(setting)
    assert '"keep": 1.0' in path.read_text()
    several = {"method": ["dynres", "divprune"], "keep": [1.0, {"tokens": 1}]}
    assert parse_setting(parse_setting(several).to_json()) == parse_setting(several)
    for setting in (Setting.from_json(ALL), Setting.from_text("divprune", 1.0)):
        assert snippets.python(setting).endswith("keep=1.0)") and "--keep 1.0" in snippets.bench(setting, "m")


def test_copies_are_equal() -> None:
    one, number = Budget(tokens=1), Budget(tokens=64)
    assert one != Budget(keep=1.0) and len({one, Budget(keep=1.0)}) == 2
    assert number == Budget(keep=64) and repr(number) == "Budget(keep=64)" and number.format_short() == "64"
    assert repr(one) == one.format_short() == "Budget(tokens=1)" and not one.is_identity()
    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), dataclasses.replace(one), eval(repr(one))):
        assert again == one
    assert dataclasses.replace(number, per="frame") == Budget(keep=64, per="frame")
    assert plan_cuts(4, [(0, 1.0)], one)[0].budget.resolve([9], layer=0, shape=SHAPE, text_tokens=0) == [1]
    both = {"tokens": 3, "keep": 4}
    for wrong in ({"tokens": 0}, {"tokens": 0.5}, {"tokens": True}, both, both | {"keep": 0.5}):
        with pytest.raises(BudgetError):
            Budget.from_json(wrong)


# -- what several methods keep together --------------------------------------------------------------------------------


def test_joint_share_of_combined_methods() -> None:
    quarter = Budget(keep=0.25)
    assert (
        compute_joint_share([quarter]) == 0.25
        and compute_joint_share([quarter] * 2) == 0.0625
        and compute_joint_share([]) == 1.0
    )
    assert (
        compute_joint_share([quarter] * 2, 256) == 16 / 256 and compute_joint_share([Budget(keep=0.5)] * 2, 3) == 1 / 3
    )
    number = Budget(tokens=16)
    assert compute_joint_share([quarter, number]) is None and compute_joint_share([quarter, number], 256) == 1 / 16
    assert compute_joint_share([Budget(tokens=16), Budget(tokens=64)], 256) == 1 / 16
    assert compute_joint_share([quarter, Budget.from_kv_share(0.5)], 256) is None


@torch.no_grad()
def test_repr_shows_the_joint_share(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(rows=1)
    with tokenprune.patched(model, ["divprune", "fastv"], keep=0.5):
        assert "tokenprune: 2 methods, together keep=0.25" in repr(model)
        model(**inputs)
        stats = tokenprune.stats(model)
        assert stats.keep_ratio == compute_joint_share([Budget(keep=0.5)] * 2, 36) == 9 / 36
        assert "visual tokens 36 -> 9 (25.0%)" in repr(stats)
    for method, keep in (("divprune", 0.5), (["divprune", "fastv"], Budget(average_share=0.9))):
        with tokenprune.patched(model, method, keep=keep):
            assert "together" not in repr(model)


# -- models that another module wraps ----------------------------------------------------------------------------------


def test_models_wrapped_for_several_devices_name_their_module(build, monkeypatch: pytest.MonkeyPatch) -> None:
    # The suite registers a device of its own, which has no memory.
    parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(parallel, "_get_available_device_type", lambda: None)
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    wrapped = nn.DataParallel(model)
    with pytest.raises(
        UnsupportedModelError, match=r"DataParallel wraps the model\. Patch the model before wrapping it"
    ):
        tokenprune.patch(wrapped, "divprune")
    with torch.no_grad(), tokenprune.patched(model, "divprune", keep=0.5):
        want = model(**inputs).logits
        assert torch.equal(nn.DataParallel(model)(**inputs).logits, want)
        assert tokenprune.stats(wrapped.module).keep_ratio == 0.5
