# SPDX-License-Identifier: Apache-2.0
"""Methods with options, and stacks, on one line."""

from __future__ import annotations

from pathlib import Path

import pytest

import tokenprune
from each import each
from tokenprune.errors import OptionError, UnknownMethodError
from tokenprune.settings import Setting
from tokenprune.settings.one_line import split_methods


def spec(text: str) -> str:
    return Setting.from_text(text).validate().to_text()


@each(
    ("text", "parts"),
    [
        ("", ()),
        ("dart, tome ,", ("dart", "tome")),
        ("dart:pivot_text=0,pivot_image=8,tome", ("dart:pivot_text=0,pivot_image=8", "tome")),
        ("divprune+fastv:layer=3,query=all,uniform", ("divprune+fastv:layer=3,query=all", "uniform")),
        ("pevlm:dense_layers=[0,1],dart", ("pevlm:dense_layers=[0,1]", "dart")),
        ('dymu:thresholds="a,b.safetensors",dart', ('dymu:thresholds="a,b.safetensors"', "dart")),
    ],
)
def test_list_is_split_into_settings(text: str, parts: tuple[str, ...]) -> None:
    assert split_methods(text) == parts


@each(
    ("text", "setting"),
    [
        ("dart", {"method": "dart"}),
        ("dart:pivot_text=0", {"method": "dart", "pivot_text": 0}),
        ("dart: exact = False , layer = 3", {"method": "dart", "exact": False, "layer": 3}),
        (
            "divprune + fastv:layer=3,query=all",
            {"method": [{"method": "divprune"}, {"method": "fastv", "layer": 3, "query": "all"}]},
        ),
        ("fastv+dart:layer=3", {"method": [{"method": "fastv"}, {"method": "dart", "layer": 3}]}),
        ("sparsevlm:version=+", {"method": "sparsevlm", "version": "+"}),
        ("sparsevlm:version=1", {"method": "sparsevlm", "version": "1"}),  # a text, as its type says
        ("sparsevlm:version=++tome", {"method": [{"method": "sparsevlm", "version": "+"}, {"method": "tome"}]}),
        ("pevlm:dense_layers=[0,1]", {"method": "pevlm", "dense_layers": [0, 1]}),
        ("dymu:max_r=None", {"method": "dymu", "max_r": None}),
        ("sparsevlm:recycle=5e-1", {"method": "sparsevlm", "recycle": 0.5}),
    ],
)
def test_line_equals_patch_arguments(text: str, setting: dict) -> None:
    read = Setting.from_text(text)
    same = Setting.from_json(setting)
    assert read.to_json() == setting and same == read and hash(same) == hash(read)
    assert Setting.from_text(text, 0.5).to_json() == read.with_keep(0.5).to_json() == setting | {"keep": 0.5}
    assert Setting.from_text(read.to_text()) == read and Setting.from_text(read.to_text()).to_text() == read.to_text()
    assert [method.name for method in read.methods] == [*read.names] == read.name.split("+")
    assert [*read.names] == [
        one["method"] for one in ([setting] if isinstance(setting["method"], str) else setting["method"])
    ]


def test_setting_has_one_canonical_text() -> None:
    assert spec(" dart : layer=3 ,exact=False") == spec("dart:layer=3,exact=false") == "dart:layer=3,exact=false"
    assert spec('divprune+fastv:query="all"') == "divprune+fastv:query=all"
    assert spec("fastv+dart:layer=3") == "fastv+dart:layer=3"


@each(
    ("text", "error", "said"),
    [
        ("dartt", UnknownMethodError, "did you mean 'dart'"),
        ("divprune+dartt", UnknownMethodError, "did you mean 'dart'"),
        ("dart:pivottext=0", OptionError, "did you mean 'pivot_text'"),
        ("dart:pivot_text=some", OptionError, "must be an int"),
        ("dart:pivot_text=1.5", OptionError, "must be an int"),
        ("fastv:layer=0", OptionError, "int >= 1"),
        ("dart:pivot_text", OptionError, "is not an option. Write it as in"),
        ("dart:keep=0.5", OptionError, "Pass it as --keep"),
        ("dart:layer=2,layer=3", OptionError, "twice"),
        ("dart,pivot_text=0", OptionError, "is not a setting. Write it as in"),
        ("divprune+vispruner", OptionError, "both act at"),
        ("fastv+dart", OptionError, "both act at"),
        ("pevlm:dense_layers=[0,1", OptionError, "is not closed"),
        ("dymu:thresholds=none.safetensors", OptionError, "cannot read"),
        (":layer=3", OptionError, "is not a setting. Write it as in"),
    ],
)
def test_invalid_lines_are_rejected(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        spec(text)


def test_special_characters_are_quoted(tmp_path: Path) -> None:
    path = tmp_path / "a,b+c.safetensors"
    assert Setting.from_text(f'dymu:thresholds="{path}"').to_json() == {"method": "dymu", "thresholds": str(path)}


def test_missing_seeds_and_defaults_are_filled_in() -> None:
    read = Setting.from_text
    assert [read(text).draws_at_random for text in ("random", "random:seed=1", "dart")] == [True, False, False]
    for text, seed in (("random", 2), ("random:seed=1", 1)):
        filled = read(text, 0.5).with_defaults({}, seed=2).to_json()
        assert filled == {"method": "random", "keep": 0.5, "seed": seed}
    stack = read("random+fastv").with_defaults({}, seed=2).to_json()["method"]
    assert stack == [{"method": "random", "seed": 2}, {"method": "fastv"}]
    filled = read("fastv+dart:layer=4").with_defaults({"dart": {"layer": 3, "pivot_text": 0}}).to_json()["method"][1]
    assert filled == {"method": "dart", "layer": 4, "pivot_text": 0}


def test_settings_on_a_line_patch_a_model(model) -> None:
    with tokenprune.patched(model, config=Setting.from_text("divprune+fastv:layer=1", [0.5, 0.5])):
        assert "divprune(), keep=0.5" in repr(model) and "fastv(layer=1), keep=0.5" in repr(model)
