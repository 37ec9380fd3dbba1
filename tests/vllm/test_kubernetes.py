# SPDX-License-Identifier: Apache-2.0
"""Manifests of deploy/: they match Kubernetes' schema, restrict the pod, and start a server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import DIVPRUNE
from front_end import config, engine_parts, processor
from tokenprune.integrations.vllm import compat
from tokenprune.integrations.vllm.gateway import reload
from tokenprune.integrations.vllm.settings.server_config import get_server_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes/server.yaml").read_text()))
DEPLOYMENT, POLICY, SERVICE, CLAIM = MANIFESTS
(JOB,) = yaml.safe_load_all((DEPLOY / "kubernetes/weights.yaml").read_text())
MONITORING = DEPLOY / "kubernetes/monitoring"
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
VERSIONS = ("1.29", "1.33")


def build_config_maps() -> list[dict[str, Any]]:
    """Return the ConfigMaps that kustomize generates."""
    return [
        {"apiVersion": "v1", "kind": "ConfigMap",
         "metadata": {"name": generator["name"], **generator.get("options", {})},
         "data": {Path(file).name: (DEPLOY / file).read_text() for file in generator["files"]}}
        for generator in KUSTOMIZATION["configMapGenerator"]
    ]  # fmt: skip


def build_manifests() -> list[dict[str, Any]]:
    """Return the manifests that `kubectl apply -k` sends, rendered by kubectl if it is installed."""
    if shutil.which("kubectl") is None:
        return [*MANIFESTS, JOB, *build_config_maps()]
    return run_kustomize(DEPLOY)


def run_kustomize(folder: Path) -> list[dict[str, Any]]:
    result = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(result.stdout))


def get_argument(flag: str) -> str:
    """Return the value of an argument of the server."""
    return CONTAINER["args"][CONTAINER["args"].index(flag) + 1]


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_schema(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is a tool of `make test-vllm`")
    for manifest in build_manifests():
        validator.validate(manifest, version, strict=True)
    broken = json.loads(json.dumps(DEPLOYMENT))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 3
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_kustomize_makes_what_the_pod_mounts() -> None:
    kinds = sorted((entry["kind"], entry["metadata"]["name"]) for entry in build_manifests())
    maps = ["tokenprune-dashboard", "tokenprune-offer"]
    assert kinds == [*(("ConfigMap", name) for name in maps), ("Deployment", "vllm"), ("Job", "vllm-weights"),
                     ("NetworkPolicy", "vllm"), ("PersistentVolumeClaim", "vllm-models"),
                     ("Service", "vllm")]  # fmt: skip
    # With a hash in its name, a changed ConfigMap would not reach a running pod.
    assert KUSTOMIZATION["generatorOptions"]["disableNameSuffixHash"] is True
    volumes = {entry["name"]: entry for entry in POD["volumes"]}
    assert volumes["offer"]["configMap"]["name"] in maps
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert {entry["name"] for entry in CONTAINER["volumeMounts"]} == set(volumes)
    assert not any("subPath" in entry for entry in CONTAINER["volumeMounts"])
    (image,) = KUSTOMIZATION["images"]
    assert image["name"] == CONTAINER["image"] and image["newTag"] == f"v{compat.TESTED}"


def test_the_pod_is_bounded_and_not_root() -> None:
    pod, container = POD["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] > 0 and pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert not container["allowPrivilegeEscalation"] and container["capabilities"] == {"drop": ["ALL"]}
    assert container["readOnlyRootFilesystem"] and POD["automountServiceAccountToken"] is False
    limits, requests = CONTAINER["resources"]["limits"], CONTAINER["resources"]["requests"]
    assert set(limits) == set(requests) == {"cpu", "memory", "nvidia.com/gpu"}
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"]
    # All paths that the server writes to are writable.
    writable = {entry["mountPath"] for entry in CONTAINER["volumeMounts"] if not entry.get("readOnly")}
    paths = [entry["value"] for entry in CONTAINER["env"] if str(entry.get("value", "")).startswith("/")]
    assert len(paths) == 5 and all(
        any(path == mount or path.startswith(f"{mount}/") for mount in writable) for path in paths
    )


def test_requests_that_run_are_answered_before_the_pod_ends() -> None:
    """vLLM drops requests after its timeout, and the cluster kills the pod after the grace period."""
    (_, wait) = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    timeout = int(get_argument("--shutdown-timeout"))
    assert timeout >= 60 and POD["terminationGracePeriodSeconds"] >= int(wait) + timeout + 10


def test_the_server_reaches_nothing_outside() -> None:
    """The server also lacks a key for the hub. Another pod, outside of the policy, downloads the weights once."""
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert POLICY["spec"] == {"podSelector": {"matchLabels": labels}, "policyTypes": ["Egress"], "egress": []}
    assert (
        get_argument("--allowed-media-domains").endswith(".invalid")
        and get_argument("--allowed-local-media-path") == "/mnt"
    )
    env = {entry["name"]: entry for entry in CONTAINER["env"]}
    assert env["HF_HUB_OFFLINE"]["value"] == "1" and "HF_TOKEN" not in env
    assert env["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "vllm", "key": "api-key"}
    loader = JOB["spec"]["template"]
    (container,) = loader["spec"]["containers"]
    assert loader["metadata"]["labels"] != labels and container["args"][1] == CONTAINER["args"][0]
    assert container["image"] == CONTAINER["image"] and loader["spec"]["securityContext"] == POD["securityContext"]
    (volume,) = [entry for entry in loader["spec"]["volumes"] if "persistentVolumeClaim" in entry]
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert {entry["name"]: entry.get("value") for entry in container["env"]}["HF_HOME"] == env["HF_HOME"]["value"]
    (waits,) = POD["initContainers"]
    assert 'Path("/models/ready").touch()' in container["args"][0] and "-e /models/ready" in waits["command"][2]
    for entry in (container, waits):
        assert entry["securityContext"] == CONTAINER["securityContext"] and "limits" in entry["resources"]


def test_the_job_loads_the_weights(tmp_path: Path) -> None:
    (container,) = JOB["spec"]["template"]["spec"]["containers"]
    code = container["args"][0].replace("/models", str(tmp_path))
    hub = tmp_path / "huggingface_hub.py"
    hub.write_text("def snapshot_download(name):\n    assert name == 'org/model'")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, "org/model"], check=True, env=env)
    assert (tmp_path / "ready").is_file()


def test_the_operator_reads_the_same_alerts() -> None:
    """Run `python dev/prometheus_rule.py` after a change of alerts.yaml."""
    (rule,) = yaml.safe_load_all((MONITORING / "alerts.yaml").read_text())
    assert rule["kind"] == "PrometheusRule" and rule["spec"] == yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    (pods,) = yaml.safe_load_all((MONITORING / "pods.yaml").read_text())
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert pods["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = pods["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == CONTAINER["ports"][0]["name"] and endpoint["path"] == "/metrics"
    assert f'job="{labels[pods["spec"]["jobLabel"]]}"' in (DEPLOY / "alerts.yaml").read_text()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl inserts the runbook's address")
def test_alerts_lead_to_the_runbook() -> None:
    by_kind = {manifest["kind"]: manifest for manifest in run_kustomize(MONITORING)}
    assert set(by_kind) == {"PodMonitor", "PrometheusRule"}
    assert all(manifest["metadata"]["labels"] == {"release": "prometheus"} for manifest in by_kind.values())
    rules = [rule for group in by_kind["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    urls = {rule["annotations"]["runbook_url"].partition("#")[0] for rule in rules}
    assert urls == {"https://docs.example.com/runbook.html"} and len(rules) == 12


def test_probes_service_and_scrape_use_the_port() -> None:
    (port,) = CONTAINER["ports"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert CONTAINER["startupProbe"]["periodSeconds"] * CONTAINER["startupProbe"]["failureThreshold"] >= 1200
    meta = DEPLOYMENT["spec"]["template"]["metadata"]
    assert meta["annotations"]["prometheus.io/port"] == str(port["containerPort"]) == "8000"
    assert meta["labels"] == SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"]


def test_the_servers_command_starts_in_shadow(folder: Any, tmp_path: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model, *rest = CONTAINER["args"]
    assert CONTAINER["command"] == ["vllm", "serve"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *rest])
    setting = args.mm_processor_kwargs["tokenprune"]
    mount = next(volume_mount for volume_mount in CONTAINER["volumeMounts"] if volume_mount["name"] == "offer")
    assert setting["reload"] == f"{mount['mountPath']}/offer.json"
    offer = get_server_config(config(folder("qwen2_5_vl"), setting | {"reload": str(DEPLOY / "kubernetes/offer.json")}))
    assert args.served_model_name == ["served", *(f"served:{name}" for name in offer.names)]
    assert offer.rollout("default") == offer.rollout("fast") == 0.0 and offer.on_error("fast") == "full"


def test_changed_config_map_is_reloaded(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A cluster replaces the link to the current folder atomically."""

    def publish(day: str, text: str) -> None:
        (tmp_path / day).mkdir()
        (tmp_path / day / "offer.json").write_text(text)
        (tmp_path / "..next").symlink_to(day)
        os.replace(tmp_path / "..next", tmp_path / "..data")

    publish("..1", (DEPLOY / "kubernetes/offer.json").read_text())
    (tmp_path / "offer.json").symlink_to("..data/offer.json")
    file = str(tmp_path / "offer.json")
    mm_processor = processor(folder("qwen2_5_vl"), DIVPRUNE | {"reload": file}, served_model_name="map")
    model_config, engine = mm_processor.info.ctx.model_config, engine_parts(mm_processor)
    assert get_server_config(model_config).rollout("default") == 0.0
    publish("..2", '{"profiles": {"slow": {"keep": 0.5}}, "rollout": 0.05}')
    assert asyncio.run(reload.reload(engine))
    offer = get_server_config(model_config)
    assert offer.rollout("default") == 0.05 and offer.names == ["slow"]
