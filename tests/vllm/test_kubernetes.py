# SPDX-License-Identifier: Apache-2.0
"""The manifests under deploy/: of Kubernetes' schema, with what a cluster asks of a pod, and a server that starts."""

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


def generated() -> list[dict[str, Any]]:
    """The ConfigMaps that kustomize makes."""
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": one["name"], **one.get("options", {})},
         "data": {Path(file).name: (DEPLOY / file).read_text() for file in one["files"]}}
        for one in KUSTOMIZATION["configMapGenerator"]
    ]  # fmt: skip


def built() -> list[dict[str, Any]]:
    """Return the manifests that `kubectl apply -k` sends: made by kubectl, where there is one."""
    if shutil.which("kubectl") is None:
        return [*MANIFESTS, JOB, *generated()]
    return kustomized(DEPLOY)


def kustomized(folder: Path) -> list[dict[str, Any]]:
    ran = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(ran.stdout))


def after(flag: str) -> str:
    """The value of one of the server's arguments."""
    return CONTAINER["args"][CONTAINER["args"].index(flag) + 1]


@pytest.mark.parametrize("version", VERSIONS)
def test_they_keep_the_schema(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is a tool of `make test-vllm`")
    for one in built():
        validator.validate(one, version, strict=True)
    broken = json.loads(json.dumps(DEPLOYMENT))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 3
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_kustomize_makes_what_the_pod_mounts() -> None:
    kinds = sorted((one["kind"], one["metadata"]["name"]) for one in built())
    maps = ["tokenprune-dashboard", "tokenprune-offer"]
    assert kinds == [*(("ConfigMap", name) for name in maps), ("Deployment", "vllm"), ("Job", "vllm-weights"),
                     ("NetworkPolicy", "vllm"), ("PersistentVolumeClaim", "vllm-models"),
                     ("Service", "vllm")]  # fmt: skip
    # A name that changes with its content would leave a running pod with the old file.
    assert KUSTOMIZATION["generatorOptions"]["disableNameSuffixHash"] is True
    volumes = {one["name"]: one for one in POD["volumes"]}
    assert volumes["offer"]["configMap"]["name"] in maps
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert {one["name"] for one in CONTAINER["volumeMounts"]} == set(volumes)
    assert not any("subPath" in one for one in CONTAINER["volumeMounts"])
    (image,) = KUSTOMIZATION["images"]
    assert image["name"] == CONTAINER["image"] and image["newTag"] == f"v{compat.TESTED}"


def test_the_pod_is_bounded_and_not_root() -> None:
    pod, own = POD["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] > 0 and pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert not own["allowPrivilegeEscalation"] and own["capabilities"] == {"drop": ["ALL"]}
    assert own["readOnlyRootFilesystem"] and POD["automountServiceAccountToken"] is False
    limits, requests = CONTAINER["resources"]["limits"], CONTAINER["resources"]["requests"]
    assert set(limits) == set(requests) == {"cpu", "memory", "nvidia.com/gpu"}
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"]
    # Whatever it writes to, it may.
    written = {one["mountPath"] for one in CONTAINER["volumeMounts"] if not one.get("readOnly")}
    paths = [one["value"] for one in CONTAINER["env"] if str(one.get("value", "")).startswith("/")]
    assert len(paths) == 5 and all(any(path == at or path.startswith(f"{at}/") for at in written) for path in paths)


def test_requests_that_run_are_answered_before_the_pod_ends() -> None:
    """vLLM drops them otherwise; the pod is killed when its time is over."""
    (_, wait) = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    timeout = int(after("--shutdown-timeout"))
    assert timeout >= 60 and POD["terminationGracePeriodSeconds"] >= int(wait) + timeout + 10


def test_the_server_reaches_nothing_outside() -> None:
    """And has no key to the hub; another pod, which the policy leaves alone, brings its weights once."""
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert POLICY["spec"] == {"podSelector": {"matchLabels": labels}, "policyTypes": ["Egress"], "egress": []}
    assert after("--allowed-media-domains").endswith(".invalid") and after("--allowed-local-media-path") == "/mnt"
    env = {one["name"]: one for one in CONTAINER["env"]}
    assert env["HF_HUB_OFFLINE"]["value"] == "1" and "HF_TOKEN" not in env
    assert env["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "vllm", "key": "api-key"}
    loader = JOB["spec"]["template"]
    (container,) = loader["spec"]["containers"]
    assert loader["metadata"]["labels"] != labels and container["args"][1] == CONTAINER["args"][0]
    assert container["image"] == CONTAINER["image"] and loader["spec"]["securityContext"] == POD["securityContext"]
    (volume,) = [one for one in loader["spec"]["volumes"] if "persistentVolumeClaim" in one]
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert {one["name"]: one.get("value") for one in container["env"]}["HF_HOME"] == env["HF_HOME"]["value"]
    (waits,) = POD["initContainers"]
    assert 'Path("/models/ready").touch()' in container["args"][0] and "-e /models/ready" in waits["command"][2]
    for one in (container, waits):
        assert one["securityContext"] == CONTAINER["securityContext"] and "limits" in one["resources"]


def test_the_job_loads_the_weights(tmp_path: Path) -> None:
    (container,) = JOB["spec"]["template"]["spec"]["containers"]
    code = container["args"][0].replace("/models", str(tmp_path))
    hub = tmp_path / "huggingface_hub.py"
    hub.write_text("def snapshot_download(name):\n    assert name == 'org/model'")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, "org/model"], check=True, env=env)
    assert (tmp_path / "ready").is_file()


def test_the_operator_reads_the_same_alerts() -> None:
    """After a change of alerts.yaml: `python dev/prometheus_rule.py`."""
    (rule,) = yaml.safe_load_all((MONITORING / "alerts.yaml").read_text())
    assert rule["kind"] == "PrometheusRule" and rule["spec"] == yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    (pods,) = yaml.safe_load_all((MONITORING / "pods.yaml").read_text())
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert pods["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = pods["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == CONTAINER["ports"][0]["name"] and endpoint["path"] == "/metrics"
    assert f'job="{labels[pods["spec"]["jobLabel"]]}"' in (DEPLOY / "alerts.yaml").read_text()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl puts the runbook's address in")
def test_alerts_lead_to_the_runbook() -> None:
    found = {one["kind"]: one for one in kustomized(MONITORING)}
    assert set(found) == {"PodMonitor", "PrometheusRule"}
    assert all(one["metadata"]["labels"] == {"release": "prometheus"} for one in found.values())
    rules = [rule for group in found["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    urls = {rule["annotations"]["runbook_url"].partition("#")[0] for rule in rules}
    assert urls == {"https://docs.example.com/runbook.html"} and len(rules) == 12


def test_probes_service_and_scrape_ask_the_port() -> None:
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
    mount = next(one for one in CONTAINER["volumeMounts"] if one["name"] == "offer")
    assert setting["reload"] == f"{mount['mountPath']}/offer.json"
    offer = get_server_config(config(folder("qwen2_5_vl"), setting | {"reload": str(DEPLOY / "kubernetes/offer.json")}))
    assert args.served_model_name == ["served", *(f"served:{name}" for name in offer.names)]
    assert offer.rollout("default") == offer.rollout("fast") == 0.0 and offer.on_error("fast") == "full"


def test_a_config_map_that_changes_is_read_again(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A cluster puts a link to a folder of the day in place of the last one, at once."""

    def publish(day: str, text: str) -> None:
        (tmp_path / day).mkdir()
        (tmp_path / day / "offer.json").write_text(text)
        (tmp_path / "..next").symlink_to(day)
        os.replace(tmp_path / "..next", tmp_path / "..data")

    publish("..1", (DEPLOY / "kubernetes/offer.json").read_text())
    (tmp_path / "offer.json").symlink_to("..data/offer.json")
    file = str(tmp_path / "offer.json")
    made = processor(folder("qwen2_5_vl"), DIVPRUNE | {"reload": file}, served_model_name="map")
    model_config, engine = made.info.ctx.model_config, engine_parts(made)
    assert get_server_config(model_config).rollout("default") == 0.0
    publish("..2", '{"profiles": {"slow": {"keep": 0.5}}, "rollout": 0.05}')
    assert asyncio.run(reload.reload(engine))
    offer = get_server_config(model_config)
    assert offer.rollout("default") == 0.05 and offer.names == ["slow"]
