# SPDX-License-Identifier: Apache-2.0
"""Every rule of deploy/alerts.yaml fires once on purpose: the plugin's own counters are driven past its threshold,
scraped each minute, and evaluated by Prometheus' promtool."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import REGISTRY

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from test_on_error import ENDS
from test_rollout_counts import asking
from tokenprune.integrations.vllm.front import announce, metrics, reload
from tokenprune.integrations.vllm.setting.configuration import SECONDS
from tokenprune.integrations.vllm.worker.clock import Clock

FILE = Path(__file__).resolve().parent.parent / "deploy/alerts.yaml"
RULES = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
NAME, MINUTES = "qwen2_5_vl", 30
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on the path (Debian: the package prometheus) and none named by PROMTOOL"
)


class Server:
    """A front end, and what Prometheus would have read of it, minute by minute."""

    def __init__(self, folder: Path, setting: Any, name: str, tmp_path: Path) -> None:
        self.name, self.place, self.series, self.minutes = name, tmp_path, {}, 0
        made, self.ask = asking(folder, NAME, setting, name)
        self.model_config = made.info.ctx.model_config
        vllm_config = SimpleNamespace(model_config=self.model_config, use_v2_model_runner=False)
        renderer = SimpleNamespace(get_mm_processor=lambda: made)
        self.engine = SimpleNamespace(vllm_config=vllm_config, renderer=renderer)
        self.clock = Clock(getattr(self.model_config.multimodal_config, SECONDS, None))

    def choose(self, seconds: float) -> None:
        """Do what a worker does for an image."""
        with self.clock.timing("divprune", torch.device("cpu")):
            time.sleep(seconds)

    def scrape(self) -> None:
        found = {f'vllm:num_requests_running{{model_name="{self.name}", instance="one"}}': 1.0}
        for sample in (one for metric in REGISTRY.collect() for one in metric.samples):
            if sample.name.startswith("tokenprune:") and sample.labels["model_name"] == self.name:
                labels = ", ".join(f'{key}="{value}"' for key, value in (sample.labels | {"instance": "one"}).items())
                found[f"{sample.name}{{{labels}}}"] = sample.value
        for key, value in found.items():
            if "_created" not in key:
                self.series.setdefault(key, ["_"] * self.minutes).append(f"{value:.6f}")
        self.minutes += 1

    def fires(self, *names: str) -> None:
        """Check that at the end these alerts fire, and no others."""
        series = [{"series": key, "values": " ".join(values)} for key, values in self.series.items()]
        wanted = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)]
        query = 'group by (alertname) (ALERTS{alertstate="firing"})'
        case = {"expr": query, "eval_time": f"{self.minutes - 1}m", "exp_samples": wanted}
        test = {"interval": "1m", "input_series": series, "promql_expr_test": [case]}
        file = self.place / "alerts-test.yaml"
        file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": [test]}))
        ran = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def refuse(server: Server) -> None:
    with pytest.raises(ValueError, match="fsat"):
        server.ask(1, {"profile": "fsat"})


def keep(left: int) -> Callable[[Server], object]:
    """Have so many of 100 tokens stay: of tiny images more than asked for, of a method with a fault less."""

    def count(server: Server) -> None:
        for stage, tokens in (("in", 100), ("out", left)):
            metrics.count(server.model_config, stage, "divprune", "0.25", tokens)

    return count


def spoil(server: Server) -> None:
    (server.place / "offer.json").write_text('{"profiles": {"fast": {"keep": 7.5}}}')
    assert not reload.reload(server.engine)


# By alert: the server's setting, and what happens each minute beside a request as it should be.
CASES: dict[str, tuple[Any, Callable[[Server], object]]] = {
    "TokenpruneRefusals": (DIVPRUNE, refuse),
    "TokenpruneFailures": (DIVPRUNE | {"on_error": "full"}, lambda server: server.ask(1, prompt=ENDS)),
    "TokenpruneShadowFailures": (DIVPRUNE | {"rollout": 0.0}, lambda server: server.ask(1, prompt=ENDS)),
    "TokenpruneSelectionSlow": (DIVPRUNE, lambda server: server.choose(0.12)),
    "TokenpruneKeptAboveTarget": (DIVPRUNE, keep(50)),
    "TokenpruneKeptBelowTarget": (DIVPRUNE, keep(5)),
    "TokenpruneReloadRefused": (DIVPRUNE | {"reload": "offer.json"}, spoil),
    "TokenpruneOverloaded": (DIVPRUNE, lambda server: metrics.step(server.model_config, 1)),
}


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_it_fires_and_no_other(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alert: str) -> None:
    setting, happens = CASES[alert]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "offer.json").write_text("{}")
    server = Server(folder(NAME), setting, f"alarmed-{alert}", tmp_path)
    announce.announce(server.engine)
    for _ in range(MINUTES):
        server.scrape()
        server.ask(1)
        happens(server)
    server.fires(alert)


@needs_promtool
def test_none_fires_where_all_is_well(folder: Any, tmp_path: Path) -> None:
    """And before the first request; without `tokenprune:info` the plugin is off."""
    file = tmp_path / "offer.json"
    file.write_text('{"profiles": {"ocr": {"off": true}, "held": {"keep": 0.5, "rollout": 0.0}}}')
    server = Server(folder(NAME), DIVPRUNE | {"reload": str(file)}, "calm", tmp_path)
    for _ in range(9):
        server.scrape()
    server.fires("TokenprunePluginOff")
    server.series.clear()
    server.minutes = 0
    announce.announce(server.engine)
    for _ in range(9):
        server.scrape()
    server.fires()
    for number in range(MINUTES):
        for asked in ({}, {"profile": "ocr"}, {"keep": 0.5}, {"profile": "held"}):
            server.ask(1 + number % 3, asked)
        server.choose(0.001)
        if number % 10 == 0:
            refuse(server)  # 3 in 123
            assert reload.reload(server.engine)
        server.scrape()
    server.fires()


@needs_promtool
def test_a_server_without_a_setting_is_off(folder: Any, tmp_path: Path) -> None:
    server = Server(folder(NAME), None, "unset", tmp_path)
    announce.announce(server.engine)
    for _ in range(9):
        server.scrape()
    server.fires("TokenprunePluginOff")


def test_each_rule_is_tested_and_has_its_place_in_the_runbook() -> None:
    assert [rule["alert"] for rule in RULES] == ["TokenprunePluginOff", *CASES]
    assert CHECKPOINTS[NAME].prompt(1).startswith(ENDS)
    page = (FILE.parent.parent / "docs/runbook.md").read_text()
    heads = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in re.findall(r"^## (.+)$", page, re.M)}
    for rule in RULES:
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert file == "docs/runbook.md" and anchor in heads, rule["alert"]
        assert f"`{rule['alert']}`" in page
