# SPDX-License-Identifier: Apache-2.0
"""Files of deploy/: dashboard and alerts query registered counters, and the parts refer to each other.

test_kubernetes.py tests the manifests, and test_alerts.py the events that fire alerts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import vllm
import yaml

from front_end import config
from tokenprune.integrations.vllm import compat
from tokenprune.integrations.vllm.frontend.metrics import COUNTERS, GAUGES
from tokenprune.integrations.vllm.frontend.worker_metrics import SUMS
from tokenprune.integrations.vllm.settings.server_config import get_server_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OURS = {f"{name}_total": set(labels) for name, (_, labels) in (COUNTERS | SUMS).items()}
OURS |= {name: set(labels) for name, (_, labels) in GAUGES.items()}
# Metrics of Prometheus itself, and of the package that counts HTTP requests in vLLM.
NOT_OURS = {"up": {"job"}, "http_requests_total": {"handler", "method", "status"}}
VALUES = {"stage": {"in", "out"}}


def load_dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana/dashboards/tokenprune.json").read_text())


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def list_queries() -> list[str]:
    return [target["expr"] for panel in load_dashboard()["panels"] for target in panel["targets"]]


def list_alerts() -> list[str]:
    return [rule["expr"] for group in read_yaml("alerts.yaml")["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", list_queries() + list_alerts())
def test_query_is_valid(query: str) -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is a tool of `make test-vllm`")
    parser.parse(query.replace("$__rate_interval", "5m"))
    with pytest.raises(ValueError):
        parser.parse(query.replace("$__rate_interval", "5m") + ")")


@pytest.mark.parametrize("query", list_queries() + list_alerts())
def test_query_uses_registered_metrics(query: str) -> None:
    """The plugin or vLLM registers the counters and labels, under the names that Prometheus exports."""
    names = rf"(?:vllm|tokenprune):\w+|{'|'.join(NOT_OURS)}"
    metrics = re.findall(rf"\b({names})\b(?:\{{([^}}]*)\}})?", query)
    assert metrics and len(metrics) == len(re.findall(r"\w+:|\bup\b|\bhttp_", query))
    loggers = (Path(vllm.__file__).parent / "v1/metrics/loggers.py").read_text()
    by = {label.strip() for group in re.findall(r"(?:by|on) \(([^)]*)\)", query) for label in group.split(",")}
    by -= {"instance"}  # added by the scrape
    for name, filters in metrics:
        labels = dict(re.findall(r'(\w+)[!=][=~]?"([^"]*)"', filters))
        if name in OURS:
            assert set(labels) | by <= OURS[name], name
        elif name in NOT_OURS:
            assert set(labels) | by <= NOT_OURS[name], name
            continue
        else:
            bare = re.sub(r"_(total|bucket)$", "", name)
            assert f'name="{bare}"' in loggers, name
            assert set(labels) <= {"model_name"} and by <= {"le", "model_name"}
        assert labels.get("model_name") == ("$model" if query in list_queries() else None)
        for label, values in VALUES.items():
            assert labels.get(label, min(values)) in values


def test_vllms_server_counts_requests_by_status() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    app = FastAPI()
    attach_router(app)

    @app.get("/v1/fail")
    def fail() -> Any:
        raise ZeroDivisionError

    with TestClient(app, raise_server_exceptions=False) as client:
        client.get("/v1/fail")
        page = client.get("/metrics").text
    (line,) = re.findall(r"^http_requests_total\{(.*/v1/fail.*)\} 1\.0$", page, re.M)
    assert dict(re.findall(r'(\w+)="([^"]*)"', line)) == {"handler": "/v1/fail", "method": "GET", "status": "5xx"}


def test_every_counter_is_shown() -> None:
    shown = set(re.findall(r"tokenprune:\w+", " ".join(list_queries())))
    assert shown == set(OURS) - {"tokenprune:info"}  # a text, for people and for `tokenprune serve-check`


@pytest.mark.parametrize("name", ["runbook", "start", "reference", "capacity"])
def test_page_names_registered_metrics(name: str) -> None:
    page = DEPLOY.parent / f"docs/serving/{name}.md"
    named = set(re.findall(r"tokenprune:\w+", page.read_text()))
    assert named <= set(OURS), named - set(OURS)
    assert named or name == "capacity"


def test_panels_do_not_cover_each_other() -> None:
    panels = load_dashboard()["panels"]
    boxes = [panel["gridPos"] for panel in panels]
    rows = [range(box["y"], box["y"] + box["h"]) for box in boxes]
    cells = [
        (x, y) for box, row in zip(boxes, rows, strict=True) for x in range(box["x"], box["x"] + box["w"]) for y in row
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_parts_find_each_other() -> None:
    services = read_yaml("compose.yaml")["services"]
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    used = [panel["datasource"] for panel in load_dashboard()["panels"] + load_dashboard()["templating"]["list"]]
    assert {source_ref["uid"] for source_ref in used} == {source["uid"]} and source["url"] == "http://prometheus:9090"
    (job,) = read_yaml("prometheus.yaml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert read_yaml("prometheus.yaml")["rule_files"] == ["alerts.yaml"]
    assert "./alerts.yaml:/etc/prometheus/alerts.yaml:ro" in services["prometheus"]["volumes"]
    assert target == "vllm:8000" and {"vllm", "prometheus", "grafana"} == set(services)
    (provider,) = read_yaml("grafana/provisioning/dashboards/tokenprune.yaml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"] if volume.startswith("."))
    assert mounts == {
        "./grafana/provisioning": "/etc/grafana/provisioning", "./grafana/dashboards": provider["options"]["path"],
    }  # fmt: skip
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert not volume.startswith(".") or (DEPLOY / volume.split(":")[0]).exists()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["restart"] == "unless-stopped"
    build = services["vllm"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Containerfile")


def test_the_image_is_of_the_tested_version() -> None:
    (base,) = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if line.startswith("FROM")]
    assert base.endswith(f":v{compat.TESTED}")


def test_the_images_commands_run_in_order(tmp_path: Path) -> None:
    """They run without an image builder, with the packages of this environment and the package index."""
    source, venv = tmp_path / "src", tmp_path / "venv"
    ignored = (DEPLOY.parent / "deploy/Containerfile.dockerignore").read_text().splitlines()[1:]
    shutil.copytree(
        DEPLOY.parent, source, ignore=shutil.ignore_patterns(*(pattern.removeprefix("**/") for pattern in ignored))
    )
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "image.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    folder, ran = tmp_path, 0
    for line in (DEPLOY / "Containerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        rest = rest.replace("/src", shlex.quote(str(source)))
        assert word in ("#", "FROM", "WORKDIR", "COPY", "RUN", "")
        if word == "WORKDIR":
            folder = source if rest != "/" else tmp_path
        elif word == "RUN":
            env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            subprocess.run(rest, shell=True, cwd=folder, env=env | {"PATH": path}, check=True)
            ran += 1
    assert ran == 2 and not any(source.iterdir())
    (installed,) = packages.glob("tokenprune_vlm-*.dist-info")
    assert "vllm.general_plugins" in (installed / "entry_points.txt").read_text()
    assert (packages / "tokenprune/integrations/vllm/plugin.py").is_file()


def test_the_servers_command_starts(folder: Any) -> None:
    """Its arguments and its setting parse, with a model of the family that it names."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    service = read_yaml("compose.yaml")["services"]["vllm"]
    command = [
        str(argument).replace("${MEDIA_DOMAIN:-none.invalid}", "none.invalid") for argument in service["command"]
    ]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    assert args.served_model_name == ["served", "served:normal", "served:fast", "served:full"]
    assert (args.shutdown_timeout, service["stop_grace_period"]) == (90, "2m")
    assert args.allowed_media_domains == ["none.invalid"] and args.allowed_local_media_path == "/mnt"
    offer = get_server_config(config(folder("qwen2_5_vl"), args.mm_processor_kwargs["tokenprune"]))
    assert [f"served:{name}" for name in offer.names] == args.served_model_name[1:]
    assert (offer.overload.steps, offer.overload.profiles) == ((16, 64), ("normal", "fast"))


def test_the_recipes_server_starts(folder: Any) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    page = (DEPLOY.parent / "docs/serving/start.md").read_text()
    pattern = r"^vllm serve ([^`]*--served-model-name.*?)^```$"
    command = re.search(pattern, page.replace("\\\n", " "), re.DOTALL | re.MULTILINE)[1]
    model, *rest = shlex.split(command)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *rest])
    offer = get_server_config(config(folder("qwen2_5_vl"), args.mm_processor_kwargs["tokenprune"]))
    first, *others = args.served_model_name
    assert [f"{first}:{name}" for name in offer.names] == others == ["qwen:fast", "qwen:ocr"]
    assert (offer.setting().keep, offer.rules["default"].min_keep) == (0.25, 0.1)
