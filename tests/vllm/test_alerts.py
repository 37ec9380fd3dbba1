# SPDX-License-Identifier: Apache-2.0
"""Each rule of deploy/alerts.yaml fires: counters of the plugin pass its threshold, and promtool evaluates scrapes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import REGISTRY

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from front_end import FrontEnd, engine_parts
from test_on_error import ENDS
from tokenprune.integrations.vllm.frontend import announce, items, metrics
from tokenprune.integrations.vllm.gateway import reload
from tokenprune.integrations.vllm.settings.configuration import METRICS_FOLDER
from tokenprune.integrations.vllm.worker import clock

FILE = Path(__file__).resolve().parents[2] / "deploy/alerts.yaml"
RULES = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
NAME, MINUTES = "qwen2_5_vl", 30
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on the path (Debian: the package prometheus) and none named by PROMTOOL"
)


@pytest.fixture(autouse=True)
def write_times_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write selection times at once, not once a second."""
    monkeypatch.setattr(clock, "_INTERVAL", 0.0)


class Server:
    """Front end, and the series that Prometheus would read from it, with a sample per minute."""

    def __init__(self, folder: Callable[[str], Path], setting: Any, name: str, tmp_path: Path) -> None:
        self.name, self.folder, self.series, self.minutes = name, tmp_path, {}, 0
        front = FrontEnd(folder, NAME, setting, name)
        self.ask, self.model_config, self.engine = front.ask, front.model_config, engine_parts(front.processor)
        self.clock = clock.Clock(getattr(self.model_config.multimodal_config, METRICS_FOLDER, None))
        self.vllm = {
            "vllm:num_requests_running": 1.0,
            'up{job="vllm"}': 1.0,
            **{
                f'http_requests_total{{handler="/v1/chat/completions", status="{status}"}}': 0.0
                for status in ("2xx", "5xx")
            },
            'http_requests_total{handler="/v1/x", status="5xx", instance="two"}': 0.0,
            **{f'vllm:time_to_first_token_seconds_bucket{{le="{le}"}}': 0.0 for le in ("1.0", "10.0", "+Inf")},
        }

    def add(self, name: str, by: float = 1.0) -> None:
        """Increase one of vLLM's series, which `name` identifies."""
        (key,) = [key for key in self.vllm if name in key and ("two" in name or "two" not in key)]
        self.vllm[key] += by

    def answer(self, status: str = "2xx", seconds: float = 0.5) -> None:
        """Count a request as vLLM does."""
        self.add(f'status="{status}"')
        for le in (le for le in ("1.0", "10.0", "+Inf") if seconds <= float(le)):
            self.add(f'le="{le}"')

    def choose(self, seconds: float) -> None:
        """Time a selection as a worker does."""
        with self.clock.timing("divprune", torch.device("cpu")):
            time.sleep(seconds)

    def scrape(self) -> None:
        values = {}
        for key, value in self.vllm.items():
            metric, _, key_labels = key.rstrip("}").partition("{")
            labels = [key_labels] if key_labels else []
            labels += [f'model_name="{self.name}"'] * metric.startswith("vllm:")
            labels += ['instance="one"'] * ("instance" not in key_labels)
            values[f"{metric}{{{', '.join(labels)}}}"] = value
        for sample in (sample for metric in REGISTRY.collect() for sample in metric.samples):
            if sample.name.startswith("tokenprune:") and sample.labels["model_name"] == self.name:
                labels = ", ".join(f'{key}="{value}"' for key, value in (sample.labels | {"instance": "one"}).items())
                values[f"{sample.name}{{{labels}}}"] = sample.value
        for key, value in values.items():
            if "_created" not in key:
                self.series.setdefault(key, ["_"] * self.minutes).append(f"{value:.6f}")
        self.minutes += 1

    def fires(self, *names: str) -> None:
        """Check that exactly these alerts fire at the end."""
        series = [{"series": key, "values": " ".join(values)} for key, values in self.series.items()]
        expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)]
        query = 'group by (alertname) (ALERTS{alertstate="firing"})'
        case = {"expr": query, "eval_time": f"{self.minutes - 1}m", "exp_samples": expected}
        test = {"interval": "1m", "input_series": series, "promql_expr_test": [case]}
        file = self.folder / "alerts-test.yaml"
        file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": [test]}))
        result = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def refuse(server: Server) -> None:
    with pytest.raises(ValueError, match="fsat"):
        server.ask(1, {"profile": "fsat"})


def keep(num_kept: int) -> Callable[[Server], object]:
    """Count `num_kept` of 100 tokens as kept: tiny images keep more than requested, a faulty method keeps fewer."""

    def count(server: Server) -> None:
        metrics.add_visual_tokens(server.model_config, ("divprune", "0.25"), 100, num_kept)

    return count


def break_method(server: Server) -> None:
    """Make the method fail for a request with an image that is not cached."""
    plan = items.PromptItem.make_plan

    def fail(self: Any, setting: Any) -> Any:
        return plan(self, setting) if setting.off else 1 / 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items.PromptItem, "make_plan", fail)
        server.ask(2)


def spoil(server: Server) -> None:
    (server.folder / "offer.json").write_text('{"profiles": {"fast": {"keep": 7.5}}}')
    assert not asyncio.run(reload.reload(server.engine))


# Per alert: the server's setting, and an event of each minute in addition to a served request.
CASES: dict[str, tuple[Any, Callable[[Server], object]]] = {
    "TokenpruneRefusals": (DIVPRUNE, refuse),
    "TokenpruneFailures": (DIVPRUNE | {"on_error": "full"}, break_method),
    "TokenpruneShadowFailures": (DIVPRUNE | {"rollout": 0.0}, break_method),
    "TokenpruneSelectionSlow": (DIVPRUNE, lambda server: server.choose(0.12)),
    "TokenpruneKeptAboveTarget": (DIVPRUNE, keep(50)),
    "TokenpruneKeptBelowTarget": (DIVPRUNE, keep(5)),
    "TokenpruneReloadRefused": (DIVPRUNE | {"reload": "offer.json"}, spoil),
    "TokenpruneOverloaded": (DIVPRUNE, lambda server: metrics.get_gauge(server.model_config, "overload_step").set(1)),
    "VllmDown": (DIVPRUNE, lambda server: server.vllm.update({'up{job="vllm"}': 0.0})),
    "VllmServerErrors": (DIVPRUNE, lambda server: server.answer("5xx")),
    "VllmFirstTokenSlow": (DIVPRUNE, lambda server: server.answer(seconds=9.0)),
}


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_only_this_alert_fires(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alert: str) -> None:
    setting, event = CASES[alert]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "offer.json").write_text("{}")
    server = Server(folder(NAME), setting, f"alarmed-{alert}", tmp_path)
    announce.announce(server.engine)
    for _ in range(MINUTES):
        server.scrape()
        server.ask(1)
        server.answer()
        event(server)
    server.fires(alert)


# Per case: the server's setting, and an event that a client can cause, or that happens once.
CALM: dict[str, tuple[Any, Callable[[Server, int], object]]] = {
    "a placeholder in a text": (DIVPRUNE | {"on_error": "full"}, lambda server, _: server.ask(1, prompt=ENDS)),
    "the same in shadow": (DIVPRUNE | {"rollout": 0.0}, lambda server, _: server.ask(1, prompt=ENDS)),
    "one failure": (
        DIVPRUNE | {"on_error": "full"},
        lambda server, minute: minute == MINUTES - 4 and break_method(server),
    ),
    "one error": (DIVPRUNE, lambda server, minute: minute == MINUTES - 4 and server.answer("5xx")),
    "others' errors": (DIVPRUNE, lambda server, _: server.add('instance="two"')),
}


@needs_promtool
@pytest.mark.parametrize("case", CALM)
def test_clients_fire_no_alert(folder: Any, tmp_path: Path, case: str) -> None:
    setting, event = CALM[case]
    server = Server(folder(NAME), setting, f"calm-{case}".replace(" ", "-"), tmp_path)
    announce.announce(server.engine)
    for minute in range(MINUTES):
        server.scrape()
        event(server, minute)
    server.fires()


@needs_promtool
def test_deleted_servers_are_down(tmp_path: Path) -> None:
    """Service discovery removes a deleted pod together with its series."""
    server = object.__new__(Server)
    server.folder, server.minutes = tmp_path, 20
    server.series = {'up{job="vllm"}': ["1", "1"]}
    server.fires("VllmDown")


@needs_promtool
def test_healthy_servers_fire_no_alert(folder: Any, tmp_path: Path) -> None:
    """No alert fires without requests or with served requests. Without `tokenprune:info` the plugin is off."""
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
    for minute in range(MINUTES):
        for override in ({}, {"profile": "ocr"}, {"keep": 0.5}, {"profile": "held"}):
            server.ask(1 + minute % 3, override)
        server.choose(0.001)
        if minute % 10 == 0:
            refuse(server)  # 3 of 123 requests
            assert asyncio.run(reload.reload(server.engine))
        server.scrape()
    server.fires()


@needs_promtool
def test_a_server_without_a_setting_is_off(folder: Any, tmp_path: Path) -> None:
    server = Server(folder(NAME), None, "unset", tmp_path)
    announce.announce(server.engine)
    for _ in range(9):
        server.scrape()
    server.fires("TokenprunePluginOff")


def test_each_rule_is_tested_and_in_the_runbook() -> None:
    assert [rule["alert"] for rule in RULES] == ["TokenprunePluginOff", *CASES]
    assert CHECKPOINTS[NAME].prompt(1).startswith(ENDS)
    page = (FILE.parent.parent / "docs/serving/runbook.md").read_text()
    heads = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in re.findall(r"^## (.+)$", page, re.M)}
    for rule in RULES:
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert file == "RUNBOOK" and anchor in heads, rule["alert"]
        assert f"`{rule['alert']}`" in page
