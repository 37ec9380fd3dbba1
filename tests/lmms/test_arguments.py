# SPDX-License-Identifier: Apache-2.0
"""Test which `--model_args` belong to tokenprune, and their parsed values. No model is loaded."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from lmms_eval.utils import simple_parse_args_string

import tokenprune
from tokenprune import Budget, BudgetError, OptionError, UnknownMethodError
from tokenprune.settings.saved import read_config
from tokenprune_bench.lmms_eval.arguments import ModelArguments, parse_arguments
from tokenprune_bench.lmms_eval.bases import TESTED

BASE = ("pretrained", "device", "dtype")


def parse(text: str, accepted: tuple[str, ...] = BASE, anything: bool = False) -> ModelArguments:
    return parse_arguments(simple_parse_args_string(text), "some_base", accepted, anything)


@pytest.mark.parametrize(
    "text, methods, keep",
    [
        ("method=dart", [tokenprune.method("dart")], None),
        ("method=dart,keep=0.25", [tokenprune.method("dart")], [Budget(keep=0.25)]),
        ("method=fastv,keep=64,layer=3", [tokenprune.method("fastv", layer=3)], [Budget(keep=64)]),
        ("method=random,keep=0.5,seed=7", [tokenprune.method("random", seed=7)], [Budget(keep=0.5)]),
        ("method=dart,exact=False,layer=1", [tokenprune.method("dart", exact=False, layer=1)], None),
        ("method=fastv,average_tokens=192", [tokenprune.method("fastv")], [Budget(average_tokens=192)]),
        (
            "method=divprune,kv_share=0.3,per=prompt",
            [tokenprune.method("divprune")],
            [Budget.from_kv_share(0.3, per="prompt")],
        ),
        (
            "method=divprune+fastv,keep=0.5+32,layer=3",
            [tokenprune.method("divprune"), tokenprune.method("fastv", layer=3)],
            [Budget(keep=0.5), Budget(keep=32)],
        ),
        (
            "method=divprune+fastv,keep=0.5,fastv.layer=1",
            [tokenprune.method("divprune"), tokenprune.method("fastv", layer=1)],
            [Budget(keep=0.5), Budget(keep=0.5)],
        ),
        ("method=divprune,per=frame", [tokenprune.method("divprune")], [Budget(keep=0.25, per="frame")]),
        ("method=pevlm,dense_layers=0+2", [tokenprune.method("pevlm", dense_layers=(0, 2))], None),
        ("method=pevlm,dense_layers=2", [tokenprune.method("pevlm", dense_layers=(2,))], None),
        ("method=view_select,views=left+front", [tokenprune.method("view_select", views=("left", "front"))], None),
    ],
)
def test_arguments_become_methods_and_budgets(text: str, methods: list[Any], keep: Any) -> None:
    setting = parse(f"pretrained=some/model,{text},device=cpu")
    keep = [Budget.from_keep(method.default_keep) for method in methods] if keep is None else keep
    assert setting.config.steps() == (methods, keep) and setting.methods == methods
    assert setting.rest == {"pretrained": "some/model", "device": "cpu"}


@pytest.mark.parametrize("name", ["none", "unpatched"])
def test_nothing_is_patched(name: str) -> None:
    assert parse(f"method={name},dtype=float32") == ModelArguments(None, {"dtype": "float32"})


def test_guard_goes_to_patch() -> None:
    assert parse("method=dart,keep=0.25,guard=auto").guard == "auto"


def test_an_argument_of_both_goes_to_the_base() -> None:
    setting = parse("method=fastv,layer=9,fastv.layer=3", accepted=("layer",))
    assert setting.rest == {"layer": 9}
    assert setting.methods == [tokenprune.method("fastv", layer=3)]


def test_a_base_that_accepts_any_argument_gets_the_unknown_arguments() -> None:
    setting = parse("method=fastv,layer=3,temperature=1", anything=True)
    assert setting.rest == {"temperature": 1}


@pytest.mark.parametrize(
    "text, error, words",
    [
        ("keep=0.25", OptionError, "method= is missing"),
        ("method=darts", UnknownMethodError, "did you mean 'dart'"),
        ("method=dart+fasv", UnknownMethodError, "did you mean 'fastv'"),
        ("method=dart+dart", OptionError, "has a method twice"),
        ("method=dart,keep=half", BudgetError, "'half'"),
        ("method=dart,keep=true", BudgetError, "True"),
        ("method=dart,keep=0.5+0.5", BudgetError, "2 entries for 1 methods"),
        ("method=dart,keep=0.5,average_tokens=64", BudgetError, "exactly one of keep"),
        ("method=dart,keep=0.5,per=row", BudgetError, "'row'"),
        ("method=fastv,layr=3", OptionError, "Unknown argument 'layr' for base=some_base: did you mean 'layer'"),
        ("method=fastv,pretraind=x", OptionError, "did you mean 'pretrained'"),
        ("method=fastv,kep=0.2", OptionError, "did you mean 'keep'"),
        ("method=divprune+fastv,divprune.layer=3", OptionError, "Unknown argument 'divprune.layer'"),
        ("method=dart+fastv,layer=3", OptionError, "is an option of dart and fastv. Write dart.layer=3"),
        ("method=none,keep=0.5", OptionError, "Leave out keep"),
        ("method=none,layer=3", OptionError, "Unknown argument 'layer'"),
        ("method=dart,config=tokenprune.json", OptionError, "Leave out method"),
        ("keep=0.5,config=tokenprune.json", OptionError, "Leave out keep"),
    ],
)
def test_invalid_arguments_raise(text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        parse(text)
    assert words in str(raised.value)


def test_a_tuned_configuration(tmp_path: Any) -> None:
    path = tmp_path / "tokenprune.json"
    path.write_text('{"schema": 1, "setting": {"method": "downsample", "keep": 0.25}}')
    setting = parse(f"config={path},guard=auto")
    assert (setting.config, setting.guard) == (read_config(path), "auto")
    assert setting.acts_on_pixels


def test_the_recipes_lines_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmms_eval.__main__ import parse_eval_args
    from lmms_eval.tasks import TaskManager

    page = (Path(__file__).parents[2] / "docs/measure/lmms-eval.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^python -m (lmms_eval .*)$", page, re.MULTILINE)
    tasks = set(TaskManager().all_tasks)
    kept = []
    for line in lines:
        monkeypatch.setattr("sys.argv", shlex.split(line))
        _, args = parse_eval_args()
        assert args.model == "tokenprune" and {args.tasks} <= tasks
        arguments = simple_parse_args_string(args.model_args)
        assert arguments.pop("base") in TESTED
        setting = parse_arguments(arguments, "some_base", (*BASE, "device_map"))
        kept.append(setting.config and setting.config.steps()[1])
    assert kept == [[Budget(keep=64)], [Budget(keep=0.25)], [Budget(average_tokens=192)], None]
