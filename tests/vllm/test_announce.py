# SPDX-License-Identifier: Apache-2.0
"""Signs that the plugin is on: the line at startup, `tokenprune:info`, and counters before the first request."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, multiprocess

import tokenprune
from conftest import DIVPRUNE
from front_end import config, samples
from tokenprune.integrations.vllm import compat
from tokenprune.integrations.vllm.frontend import announce, metrics
from tokenprune.integrations.vllm.gateway import profiles

PROFILES = {"profiles": {"fast": {"keep": 0.11}, "ocr": {"off": True}}}
INFO = "tokenprune:info"


def get_facts(model_config: Any, v2: bool = False) -> dict[str, str]:
    return announce.collect_facts(SimpleNamespace(model_config=model_config, use_v2_model_runner=v2))


@pytest.mark.parametrize(
    ("setting", "setting_text", "profiles", "policy"),
    [
        (None, "none", "none", "none"),
        ({"off": True}, "off", "none", "none"),
        (DIVPRUNE | PROFILES | {"min_keep": 0.1}, "divprune 0.25", "fast,ocr", "min_keep 0.1"),
        ({"method": "uniform", "keep": 9}, "uniform 9 tokens", "none", "none"),
        (DIVPRUNE | {"keep": {"keep": 1.0, "age": [[0, 1.0], [1, 0.5]]}}, "divprune 1 by age", "none", "none"),
        ({"method": "dart", "layer": 1, "pivot_text": 0, "experimental_in_llm": True},
         "dart 0.25 in the language model", "none", "none"),
    ],
)  # fmt: skip
def test_facts(folder: Callable[[str], Path], setting: Any, setting_text: str, profiles: str, policy: str) -> None:
    actual = get_facts(config(folder("llava"), setting))
    hooks = "setting" if setting is None else "setting,profiles,cache"
    assert actual == {
        "version": tokenprune.__version__, "setting": setting_text, "profiles": profiles, "policy": policy,
        "vllm": compat.TESTED, "runner": "v1", "hooks": hooks,
    }  # fmt: skip
    assert set(actual) | {"model_name"} == set(metrics.GAUGES[INFO][1])
    line = announce.format_line(actual)
    assert line.count("\n") == 0 and f"vLLM {compat.TESTED} (tested), model runner v1" in line
    assert ("no tokens are pruned" in line) == (setting is None)
    assert get_facts(config(folder("llava"), setting), v2=True)["runner"] == "v2"


def test_missing_hooks_are_left_out(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.HOOKS, "cache", {"vllm.gone:Gone": ""})
    assert get_facts(config(folder("llava"), DIVPRUNE))["hooks"] == "setting,profiles"


class Engine(SimpleNamespace):
    """Namespace that supports weak references."""


def test_starting_engines_log_their_setting(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert announce.logger.name == "vllm.tokenprune"
    # Use a separate logger, because pytest may add handlers to vLLM's logger and to the root.
    monkeypatch.setattr(announce, "logger", logging.getLogger("of this test"))
    caplog.set_level(logging.INFO, "of this test")
    loaded = {"overload": {"in_flight": [9], "profiles": ["fast"]}}
    for name, setting in (("starting", DIVPRUNE | PROFILES | loaded), ("bare", None)):
        model_config = config(folder("llava"), setting, served_model_name=name)
        engine = Engine(
            vllm_config=SimpleNamespace(model_config=model_config), renderer=SimpleNamespace(),
            get_num_unfinished_requests=lambda: 0,
        )  # fmt: skip
        for act in (announce.announce, profiles.watch):
            act(engine)
    started, bare = [record.getMessage() for record in caplog.records if record.name == "of this test"]
    assert "is on: divprune 0.25, profiles: fast, ocr, policy: none;" in started and "loaded without a setting" in bare
    totals = {name: samples(f"tokenprune:{name}_total", "starting") for name in ("visual_tokens", "requests")}
    assert totals["visual_tokens"] == {
        (keep, method, stage): 0
        for keep, method in (("0.25", "divprune"), ("0.11", "divprune"), ("1", "off"))
        for stage in ("in", "out")
    }
    named = {(by, profile) for by in ("name", "key") for profile in ("default", "fast", "ocr")}
    assert set(totals["requests"]) == named | {("default", "default"), ("load", "fast"), ("key", "request")}
    assert set(totals["requests"].values()) == {0}
    failures = samples("tokenprune:failures_total", "starting")
    assert set(failures.values()) == {0} and {("full", "request"), ("refused", "request")} < failures.keys()
    assert samples("tokenprune:refusals_total", "starting") == {(reason,): 0 for reason in metrics.REASONS}
    assert samples("tokenprune:selections_total", "starting") == {("divprune",): 0}
    assert samples("tokenprune:selection_seconds_total", "starting") == {("divprune",): 0}
    assert samples("tokenprune:overload_step", "starting") == {(): 0}
    assert samples("tokenprune:overload_step", "bare") == {}
    assert list(samples(INFO, "starting").values()) == list(samples(INFO, "bare").values()) == [1]
    assert not any(samples(f"tokenprune:{name}_total", "bare") for name in ("visual_tokens", "requests", "refusals"))


def test_earlier_info_is_zero() -> None:
    model_config = SimpleNamespace(served_model_name="again")
    info = dict.fromkeys(metrics.GAUGES[INFO][1][1:], "x")
    for setting in ("one", "two", "one"):
        metrics.set_info(model_config, info | {"setting": setting})
        values = {labels[4]: value for labels, value in samples(INFO, "again").items()}
        assert [name for name, value in values.items() if value == 1] == [setting]
    assert values == {"one": 1, "two": 0}


def test_several_processes_report_one_info(tmp_path: Path) -> None:
    """vLLM's API servers are such processes."""
    code = (
        "from types import SimpleNamespace; from tokenprune.integrations.vllm.frontend import metrics; "
        f"metrics.set_info(SimpleNamespace(served_model_name='m'), dict.fromkeys(metrics.GAUGES['{INFO}'][1][1:], 'x'))"
    )
    for _ in range(2):
        environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    assert samples(INFO, "m", registry) == {("x",) * 7: 1}


def test_startup_functions_run_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    done: list[Any] = []
    monkeypatch.setattr(compat, "_acts", [])
    monkeypatch.setattr(AsyncLLM, "__init__", lambda self: done.append("started"))
    first, second = (lambda engine: done.append(1)), (lambda engine: done.append(2))
    for act in (first, second, first):
        compat.on_start(act)
    monkeypatch.setattr(AsyncLLM, "__del__", lambda self: None)
    AsyncLLM()
    assert done == ["started", 1, 2]
