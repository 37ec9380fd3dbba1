# SPDX-License-Identifier: Apache-2.0
"""Counters of visual tokens, without a server; test_server.py reads them at /metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, multiprocess

from conftest import DIVPRUNE
from front_end import TOTAL, FrontEnd, photos, samples, sum_stages
from tokenprune.integrations.vllm.frontend import worker_metrics
from tokenprune.integrations.vllm.settings.configuration import METRICS_FOLDER
from tokenprune.integrations.vllm.worker.clock import Clock


@pytest.mark.parametrize("name", ["mistral3", "llava_next", "internvl", "qwen3_vl"])
def test_requests_are_counted(folder: Callable[[str], Path], name: str) -> None:
    front = FrontEnd(folder, name, DIVPRUNE, name)
    images = photos(front.checkpoint)[1:]

    def ask(override: dict[str, Any] | None = None) -> tuple[int, tuple[float, ...]]:
        """Return the number of placeholders in the prompt, and the counted tokens."""
        before = sum_stages(TOTAL, name)
        placeholders = front.count(images, override)
        return placeholders, tuple(value - before[stage] for stage, value in sum_stages(TOTAL, name).items())

    unpruned, sums = ask({"off": True})
    assert sums == (unpruned, unpruned)
    for _ in range(2):
        num_kept, sums = ask()
        # Line breaks among an image's rows (Mistral 3) have placeholders, too.
        assert sums[0] == unpruned and sums[1] <= num_kept and sums[1] == pytest.approx(unpruned / 4, abs=2)
    if name != "internvl":
        for method in ("downsample", ["downsample", "uniform"]):
            num_kept, sums = ask({"method": method, "keep": 0.5})
            assert sums[0] == unpruned and sums[1] <= num_kept < unpruned
    before = samples(TOTAL, name)
    front.processor.get_dummy_mm_inputs({"image": 1})
    assert samples(TOTAL, name) == before
    num_requests = {("off", "1"): 1, ("divprune", "0.25"): 2}
    if name != "internvl":
        num_requests |= {("downsample", "0.5"): 1, ("downsample+uniform", "0.25"): 1}
    assert set(samples(TOTAL, name)) == {
        (keep, method, stage) for method, keep in num_requests for stage in ("in", "out")
    }
    requests = samples("tokenprune:requests_total", name)
    assert requests == {("key", "request"): sum(num_requests.values()) - 2, ("default", "default"): 2}


def test_refusals_are_counted_by_reason(folder: Callable[[str], Path]) -> None:
    from tokenprune.errors import OptionError

    setting = DIVPRUNE | {"profiles": {"fast": {"keep": 0.11}}, "min_keep": 0.1}
    front = FrontEnd(folder, "qwen2_5_vl", setting, "refusing")
    assert front.count(1, {"profile": "fast"}) < front.count(1, {}) < front.count(1, {"off": True})
    assert front.ask(1, {"profile": "fast"}) == front.ask(1, {"keep": 0.11})
    refused = [{"profile": "fsat"}, {"keep": 0.09}, {"profile": "fast", "keep": 0.09}, {"method": "divprun"}, [1]]
    for override in refused:
        with pytest.raises(ValueError):
            front.ask(1, override)
    with pytest.raises(OptionError, match="2 image placeholders"):
        front.ask(1, {}, front.checkpoint.prompt(2))
    assert samples("tokenprune:refusals_total", "refusing") == {
        ("profile",): 1, ("limit",): 2, ("setting",): 2, ("input",): 1,
    }  # fmt: skip
    assert samples("tokenprune:requests_total", "refusing") == {
        ("key", "fast"): 2, ("default", "default"): 1, ("key", "request"): 2,
    }  # fmt: skip


def test_selection_times_are_counted(tmp_path: Path) -> None:
    """Counts by method, from two processes that end in between. A folder of another machine is not an error."""
    model_config = SimpleNamespace(served_model_name="timed", multimodal_config=SimpleNamespace())
    worker_metrics.create_worker_folder(model_config)
    folder = getattr(model_config.multimodal_config, METRICS_FOLDER)
    assert samples("tokenprune:selections_total", "timed") == {}
    code = (
        "import sys, torch; from tokenprune.integrations.vllm.worker.clock import Clock; clock = Clock(sys.argv[1])\n"
        "for number in range(40):\n"
        "    with clock.timing(f'm{number % 2}', torch.device('cpu')): torch.zeros(9)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, folder], check=True)
    assert samples("tokenprune:selections_total", "timed") == {("m0",): 40, ("m1",): 40}
    seconds = samples("tokenprune:selection_seconds_total", "timed")
    assert set(seconds) == {("m0",), ("m1",)} and all(0 < value < 1 for value in seconds.values())
    (Path(folder) / "torn").write_bytes(b'{"m0": [1')
    assert samples("tokenprune:selections_total", "timed") == {("m0",): 40, ("m1",): 40}
    for absent in (None, str(tmp_path / "elsewhere")):
        with Clock(absent).timing("m0", torch.device("cpu")):
            pass
    assert not (tmp_path / "elsewhere").exists()


def test_several_processes_are_added_up(tmp_path: Path) -> None:
    """vLLM's API servers are such processes."""
    code = (
        "from types import SimpleNamespace; from tokenprune.integrations.vllm.frontend import metrics; "
        "metrics.add_visual_tokens(SimpleNamespace(served_model_name='m'), ('pool', '0.25'), 8, 0)"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    assert list(samples(TOTAL, "m", registry).values()) == [16, 0]


def test_folders_of_killed_servers_are_removed(tmp_path: Path) -> None:
    """The next server removes them, but keeps folders of running servers and of other programs."""
    code = (
        "import os, signal, sys, time; from types import SimpleNamespace\n"
        "from tokenprune.integrations.vllm.frontend import worker_metrics\n"
        "for name in ('one', 'two'):\n"
        "    config = SimpleNamespace(served_model_name=name, multimodal_config=SimpleNamespace())\n"
        "    worker_metrics.create_worker_folder(config)\n"
        "    print(config.multimodal_config.tokenprune_seconds, flush=True)\n"
        "sys.stdin.readline()"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    (tmp_path / "tokenprune-of-a-user").mkdir()

    def start() -> tuple[subprocess.Popen, list[Path]]:
        server = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return server, [Path(server.stdout.readline().strip()) for _ in range(2)]

    killed, abandoned = start()
    killed.kill()
    killed.wait()
    assert len(set(abandoned)) == 2 and all(folder.is_dir() for folder in abandoned)
    first, running = start()
    second, others = start()
    assert not any(folder.exists() for folder in abandoned) and all(folder.is_dir() for folder in running + others)
    for server in (first, second):
        server.communicate("\n")
    assert [folder.name for folder in tmp_path.iterdir()] == ["tokenprune-of-a-user"]
