# SPDX-License-Identifier: Apache-2.0
"""The parts of the vLLM plugin that do not import vLLM: settings, plans and selection. tests/vllm/ tests the engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tokenprune
import zoo
from each import each
from served_settings import served, served_methods
from tokenprune import Pruner, Site
from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError, TokenPruneError, UnknownMethodError
from tokenprune.integrations import vllm
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.towers.build import build_tower_part
from tokenprune.integrations.vllm.settings.configuration import check_model
from tokenprune.integrations.vllm.settings.items import OFF, count_kept, get_cache_key, settings_of_items
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.towers import served_tower
from tokenprune.methods import registry
from tokenprune.methods.encoder.pixelprune import PixelPrune
from tokenprune.methods.pixels.downsample import Downsample
from tokenprune.methods.pixels.dynres import DynRes
from tokenprune.methods.pre_llm.divprune import DivPrune
from tokenprune.methods.pre_llm.pool import Pool
from tokenprune.methods.pre_llm.random import Random
from tokenprune.methods.pre_llm.uniform import Uniform
from tokenprune.models.families import REFUSED_IN_VLLM, SERVED, SUPPORTED
from tokenprune.selection.method import Selection
from tokenprune.settings import IN_LLM

SERVER = {"method": "divprune", "keep": 0.25}
TWO = {"method": ["downsample", "divprune"], "keep": [0.4, 0.5]}


@each(
    ("layers", "expected"),
    [
        ((SERVER,), served(DivPrune(), 0.25)),
        ((SERVER, {"keep": 0.5}), served(DivPrune(), 0.5)),
        ((SERVER, {"off": True}), OFF),
        (({"off": True}, {"method": "pool"}), served(Pool(), 0.25)),
        (({"off": True}, SERVER), served(DivPrune(), 0.25)),
        ((SERVER, {"off": False}), served(DivPrune(), 0.25)),
        (({"method": "random", "seed": 3, "keep": 9}, {"keep": 5}), served(Random(3), 5)),
        # A new method keeps the budget but no options.
        (({"method": "random", "seed": 3, "keep": 9}, {"method": "uniform"}), served(Uniform(), 9)),
        (({"method": "random", "seed": 3}, {"method": "random"}), served(Random(3), 0.25)),
        (({"method": ["pool"]},), served(Pool(), 0.25)),
        # Pixel methods, with and without a method after the encoder, in any order.
        (({"method": "downsample"},), served(pixel_method=Downsample(), share=0.25)),
        ((SERVER, {"method": "dynres", "min_scale": 0.5}), served(pixel_method=DynRes(0.5), share=0.25)),
        ((SERVER, TWO), served(DivPrune(), 0.5, Downsample(), 0.4)),
        (
            ({"method": ["random", {"method": "dynres", "min_scale": 0.1}], "keep": 0.5},),
            served(Random(), 0.5, DynRes(0.1), 0.5),
        ),
        ((TWO, {"keep": 0.3}), served(DivPrune(), 0.3, Downsample(), 0.3)),
        ((TWO, {"keep": [0.3, 7]}), served(DivPrune(), 7, Downsample(), 0.3)),
        ((TWO, {"method": ["dynres", "divprune"]}), served(DivPrune(), 0.25, DynRes(), 0.25)),
        ((TWO, {"method": "pool"}), served(Pool(), 0.25)),
        ((SERVER, {"per": "frame"}, {"method": "pool"}), served(Pool(), 0.25, per="frame")),
        ((SERVER, {"per": "frame"}, {"per": "image"}), served(DivPrune(), 0.25)),
    ],
)
def test_later_layers_win(layers, expected) -> None:
    assert parse_setting(*layers) == expected


@each(
    ("setting", "error", "message"),
    [
        (7, OptionError, "must be an object"),
        ("divprune", OptionError, "must be an object"),
        (None, OptionError, "must be an object"),
        ({"method": "divprun"}, UnknownMethodError, "did you mean 'divprune'"),
        ({"method": 3}, UnknownMethodError, "unknown method"),
        ({"method": [["divprune"]]}, UnknownMethodError, "unknown method"),
        ({"method": []}, OptionError, "empty list"),
        ({"method": ["dynres", "divprune"], "min_scale": 0.5}, OptionError, "ambiguous for several methods"),
        ({"method": ["dynres", "divprune"], "keep": [0.5]}, BudgetError, "1 entries for 2 methods"),
        ({"method": ["dynres", {"method": "divprune", "keep": 0.5}]}, OptionError, "next to the methods"),
        ({"method": ["divprune", "pool"]}, OptionError, "both act at"),
        ({"method": ["downsample", "dynres"]}, OptionError, "both act at"),
        ({"method": ["dynres", "fastv"]}, OptionError, "true allows it, with limits"),
        ({"keep": [0.5, 0.25]}, BudgetError, "2 entries for 1 methods"),
        ({"per": "prompt"}, OptionError, 'must be "image" or "frame"'),
        ({"per": ["frame"]}, OptionError, 'must be "image" or "frame"'),
        ({"method": "dynres", "keep": 20}, BudgetError, "as a share"),
        ({"max_visual_tokens": 0}, BudgetError, "must be a number of tokens"),
        ({"max_visual_tokens": 64, "method": "dynres"}, OptionError, "and so does dynres"),
        ({"method": "dynres", "keep": 0.01}, BudgetError, "smaller min_scale"),
        ({"method": "dynres", "question_guard": True}, OptionError, "question_guard reads the question"),
        ({"keep": 0}, BudgetError, "keeps no token"),
        ({"keep": 1.5}, BudgetError, "not a valid share"),
        ({"keep": -3}, BudgetError, "keeps no token"),
        ({"keep": float("nan")}, BudgetError, "must be a finite number"),
        ({"keep": "0.5"}, BudgetError, "must be a number"),
        ({"keep": True}, BudgetError, "must be a number"),
        ({"keep": None}, BudgetError, "Pass a float"),
        ({"keep": {"flops_share": 0.5}}, BudgetError, "must be a number"),
        ({"off": 1}, OptionError, "true or false"),
        ({"off": True, "keep": 0.5}, OptionError, "excludes other keys"),
        ({"seed": 1}, OptionError, "no option 'seed'"),
        ({"method": "random", "seed": "x"}, OptionError, "must be an int"),
        ({"method": "random", "seed": [1]}, OptionError, "must be an int"),
        ({"padding": "x" * 5000}, OptionError, "characters"),
        ({"keep": object()}, OptionError, "must be a JSON value"),
        ({"method": "fastv"}, OptionError, "true allows it, with limits"),
        ({"method": "tome", "r": 3}, OptionError, "set before the tower runs.*Pass keep instead of r"),
        ({"method": "dymu"}, OptionError, "Pass exact=True"),
        ({"method": "dymu", "exact": True, "vtu": "expanded"}, OptionError, 'Use vtu="off"'),
        ({"method": "vscan"}, OptionError, "vscan with stage2=false"),
        ({"method": "view_select"}, OptionError, "Let clients leave out"),
        ({"method": "vispruner"}, OptionError, "it needs encoder_features"),
        ({"method": "flowcut"}, OptionError, "it needs encoder_flow"),
        ({"method": "prumerge", "exact": False}, OptionError, "vLLM must know it before"),
    ],
)
def test_bad_settings(setting, error, message) -> None:
    """Errors are ValueErrors, which a server answers with HTTP 400, and name the fix."""
    with pytest.raises(error, match=message) as caught:
        parse_setting(SERVER, setting)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TokenPruneError)


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_tower_facts_equal_the_hugging_face_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin derives the same tower facts from a config as the Hugging Face integration from the model."""
    model, method, calls = zoo.FAMILIES[name].build(), tokenprune.method("tome"), []
    monkeypatch.setattr(type(method), "check_served", lambda self, *facts: calls.append(facts))
    setting = parse_setting({"method": "tome", "keep": 0.5})
    parallel = SimpleNamespace(mm_encoder_tp_mode="weights")
    architecture = SUPPORTED[zoo.FAMILIES[name].kind].vllm.architecture
    model_config = SimpleNamespace(
        hf_config=model.config, architecture=architecture, dtype=torch.float32, multimodal_config=parallel
    )
    check_model(setting, model_config)
    expected = build_tower_part(get_adapter(model), method, Budget.from_keep(0.5)).reducer.layout.shape
    actual = served_tower(method, model.config)
    for fact in ("tokens", "protected", "blocks", "blocks_read", "unit"):
        assert getattr(actual, fact) == getattr(expected, fact), fact
    assert calls == [(type(expected.module).__name__, "float32", expected.blocks)]


def test_methods_that_read_the_tower_are_served() -> None:
    """A method is served if a trial selection keeps the promised count. Methods are not listed by name."""
    names = {"visionzip", "fastervlm", "prumerge", "prumerge_plus", "hiprune", "holov"}
    assert names <= set(served_methods())
    setting = {"method": "vispruner", "features": "projected", "keep": 0.3}
    assert parse_setting(SERVER, setting).method == registry.build("vispruner", {"features": "projected"})
    for name, options, message in (
        ("vispruner", {}, 'vispruner with features="projected"'),
        ("scope", {"features": "tower"}, 'scope with features="projected"'),
        ("divprune", {"center": "tower"}, 'divprune with center="standardised"'),
    ):
        with pytest.raises(OptionError, match=f"it needs encoder_features.*{message}"):
            parse_setting(SERVER, {"method": name, "keep": 0.3} | options)


def test_a_setting_without_a_method_is_refused() -> None:
    with pytest.raises(OptionError, match="names no method"):
        parse_setting({"keep": 0.5})
    with pytest.raises(OptionError, match="names no method"):
        parse_setting({"off": True}, {"keep": 0.5})
    for layers in (({"off": False},), ({"off": True}, {"off": False})):
        with pytest.raises(OptionError, match='"off": false requires a method'):
            parse_setting(*layers)
    for layers in ((SERVER, {"off": False}), ({"off": True}, SERVER | {"off": False})):
        assert parse_setting(*layers) == parse_setting(SERVER)


def test_settings_have_distinct_cache_keys() -> None:

    def key(*layers: dict) -> dict:
        return get_cache_key(parse_setting(*layers))

    assert key({"method": "random"}) == key({"method": "random", "seed": 0})
    keys = [key(SERVER, changes) for changes in ({}, {"keep": 0.5}, {"keep": 64}, {"off": True}, {"per": "frame"})]
    keys += [key({"method": "random", "seed": seed}) for seed in (0, 1)]
    keys += [key(TWO, changes) for changes in ({}, {"keep": 0.4}, {"method": "downsample", "keep": 0.4})]
    assert len({str(key) for key in keys}) == len(keys)
    assert all(key["algorithm"] for key in keys)
    dynres = {"method": "dynres", "min_scale": 0.3}
    for setting in ({"method": "random", "seed": 5}, TWO, dynres, {"off": True}, TWO | {"per": "frame"}):
        assert parse_setting(parse_setting(setting).to_json()) == parse_setting(setting)


@each("count", [1, 2, 7, 16, 576, 1225])
@each("keep", [0.001, 0.25, 0.999, 1.0, 1, 64, 10_000])
def test_kept_counts_follow_the_budget(count: int, keep: float) -> None:
    expected = min(count, keep) if isinstance(keep, int) else min(count, max(1, round(keep * count)))
    assert count_kept(served(DivPrune(), keep), count) == expected


def test_methods_that_cannot_be_served_are_refused() -> None:
    """A method is refused if its kept count does not follow from the shape."""

    @registry.register("moody")
    @dataclass(frozen=True)
    class Moody(Pruner):
        """Keep tokens with a positive first feature."""

        def select(self, tokens) -> Selection:
            return Selection((tokens.hidden[..., 0] > 0) & tokens.mask)

    @registry.register("reader")
    @dataclass(frozen=True)
    class Reader(Pruner):
        """Score tokens by similarity to the text."""

        def score(self, tokens):
            return tokens.hidden @ tokens.text.hidden.mean(1)

    @registry.register("twofold")
    @dataclass(frozen=True)
    class Twofold(Pruner):
        """Prune at two stages."""

        def stages(self, budget, layers):
            return [(DivPrune(), budget), (registry.build("fastv", {}), budget)]

    try:
        with pytest.raises(OptionError, match="acts at several stages"):
            parse_setting({"method": "twofold", "keep": 0.5})
        with pytest.raises(OptionError, match="must depend only on the shape"):
            parse_setting({"method": "moody", "keep": 0.5})
        with pytest.raises(OptionError, match="it reads the text"):
            parse_setting({"method": "reader", "keep": 0.5})
        assert not {"moody", "reader", "twofold"} & set(served_methods())
    finally:
        for name in ("moody", "reader", "twofold"):
            registry._METHODS.pop(name)


@pytest.mark.parametrize("declared", [{"chooses_count": True}, {"min_tokens": 0}])
@pytest.mark.parametrize("site", [Site.PRE_LLM, Site.IN_LLM])
def test_content_dependent_counts_are_refused(declared: dict, site: Site) -> None:
    name = "by_sight"
    needs = ("keys",) if site is Site.IN_LLM else ()

    @registry.register(name, site=site, needs=needs)
    @dataclass(frozen=True)
    class BySight(Uniform):
        """Uniform selection that declares a content-dependent count."""

        layer: int = 2

    for attribute, value in declared.items():
        setattr(BySight, attribute, value)
    try:
        with pytest.raises(OptionError, match="the number of kept tokens depends on the content"):
            parse_setting({"method": name, "keep": 0.5} | ({IN_LLM: True} if site is Site.IN_LLM else {}))
        assert name not in served_methods() and name not in served_methods(in_llm=True)
    finally:
        registry._METHODS.pop(name)


REFUSED_METHODS = [
    name
    for name in registry.available_methods()
    if registry.method_class(name).site is Site.PRE_LLM and name not in served_methods()
]


@each("name", REFUSED_METHODS)
def test_errors_name_options_that_make_a_method_servable(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_setting({"method": name})
    method = registry.build(name, {})
    message = str(caught.value)
    for options in (method.query_free, method.fallback_options, {**method.query_free, **method.fallback_options}):
        try:
            parse_setting({"method": name, **options})
        except OptionError:
            continue
        assert any(f"{option}={json.dumps(value)}" in message for option, value in options.items()), message
        break
    else:
        # A single option is not enough. A suggested option must lead to a different error.
        for option, value in {**method.query_free, **method.fallback_options}.items():
            if f"{option}={json.dumps(value)}" in message:
                with pytest.raises(OptionError) as again:
                    parse_setting({"method": name, option: value})
                assert str(again.value) != message


def test_pixelprune_is_served() -> None:
    """The front end has the pixels, so it can compute the kept count. Models are checked elsewhere."""
    setting = parse_setting({"method": "pixelprune", "keep": 0.5, "threshold": 0.02})
    assert setting.method == PixelPrune(threshold=0.02) and not setting.keeps_all_tokens
    assert parse_setting(setting.to_json()) == setting
    assert parse_setting({"method": "pixelprune"}).keep == 1_000_000
    assert "pixelprune" in served_methods() and "pixelprune" not in served_methods(in_llm=True)
    with pytest.raises(OptionError, match=r"per=.*not pixelprune"):
        parse_setting({"method": "pixelprune", "per": "frame"})


def test_no_architecture_is_both_served_and_refused() -> None:
    assert not set(SERVED) & set(REFUSED_IN_VLLM)
    assert all(row.vllm.models and row.vllm.budget for row in SERVED.values())


def test_nothing_else_imports_vllm() -> None:
    modules = ["tokenprune", "tokenprune.cli", "tokenprune.integrations.hf.engine.engine"]
    names = ("settings.parse", "settings.plan", "selection.before_llm", "plugin", "worker.runner")
    modules += [f"tokenprune.integrations.vllm.{name}" for name in names]
    code = f"import sys; sys.modules['vllm'] = None; import {', '.join(modules)}; tokenprune.available_methods()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_package_docstring_names_existing_files() -> None:
    """Each file and function that the docstring of the vllm package names must exist."""
    folder = Path(vllm.__file__).parent
    references = re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", vllm.__doc__ or "")
    assert len(references) >= 12
    for file, name in references:
        text = (folder / file).read_text()
        assert not name or re.search(rf"^(?:class |def )?{name}\b", text, re.MULTILINE), f"{file} has no {name}"


def test_video_methods_leave_images_unpruned() -> None:
    """Their cache keys equal the keys of a server without pruning."""
    evs = parse_setting({"method": "evs", "keep": 0.5})
    assert settings_of_items(evs, "image", 2) == (OFF,) * 2 and settings_of_items(evs, "video", 1) == (evs,)
    assert get_cache_key(settings_of_items(evs, "image", 1)[0]) == get_cache_key(parse_setting({"off": True}))
    smaller = parse_setting({"method": ["downsample", "evs"], "keep": [0.5, 0.5]})
    assert settings_of_items(smaller, "image", 1)[0] == parse_setting({"method": "downsample", "keep": 0.5})
