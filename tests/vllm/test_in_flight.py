# SPDX-License-Identifier: Apache-2.0
"""Requests in flight over all API servers of a host, which the policy under load counts."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

import slow_steps
from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from front_end import config, samples
from server import CALL, Server, serve_with_several_engines, write_messages
from test_server import NAME
from tokenprune.integrations.vllm.gateway import in_flight
from tokenprune.integrations.vllm.gateway.in_flight import RequestLoad, SharedCount
from tokenprune.integrations.vllm.settings.server_config import get_server_config, set_server_config

OTHER = """
import sys
from pathlib import Path
from tokenprune.integrations.vllm.gateway.in_flight import SharedCount
SharedCount(Path(sys.argv[1])).write(int(sys.argv[2]))
print("written", flush=True)
sys.stdin.read()
"""


def run_other_server(folder: Path, count: int) -> subprocess.Popen:
    """Start the process of another API server, which only writes its number of requests."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    return process


def test_counts_of_running_processes_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").write_bytes(b"of prometheus")
    shared_count = SharedCount(tmp_path)
    shared_count.write(5)
    assert shared_count.count_others() == 0
    processes = [run_other_server(tmp_path, 3), run_other_server(tmp_path, 70_000)]
    assert shared_count.count_others() == 70_003
    processes[1].kill()
    processes[1].wait()
    assert shared_count.count_others() == 3, "a killed process still counts"
    processes[0].communicate()
    assert shared_count.count_others() == 0


def test_deleted_folder_does_not_fail_requests(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    shared_count = SharedCount(folder)
    shutil.rmtree(folder)
    assert shared_count.count_others() == 0
    os.close(shared_count._file)
    shared_count.write(3)


def test_shared_count_includes_all_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also requests of uncounted endpoints, and at once a request that is being rendered."""
    shared_count, engine_state = SharedCount(tmp_path), SimpleNamespace(running=0)
    monkeypatch.setattr(in_flight, "get_shared_count", lambda: shared_count)
    load = RequestLoad(engine=lambda: SimpleNamespace(get_num_unfinished_requests=lambda: engine_state.running))

    def read_count() -> int:
        return int.from_bytes((tmp_path / shared_count._name).read_bytes())

    async def run() -> None:
        load.share_count()
        engine_state.running = 1
        await asyncio.sleep(0.5)
        assert read_count() == 1
        with load.count_request():
            assert read_count() == 2
        engine_state.running = 0
        await asyncio.sleep(0.5)
        assert read_count() == 0

    load.share_count()  # without an event loop it returns at once
    asyncio.run(run())


def test_without_a_folder_nothing_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in (None, str(tmp_path / "none")):
        in_flight.get_shared_count.cache_clear()
        monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
        if folder:
            monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", folder)
        assert in_flight.get_shared_count() is None
    in_flight.get_shared_count.cache_clear()
    assert RequestLoad(rendering=2).in_flight == 2


RULE = {"in_flight": [4], "profiles": ["fast"], "rise": 0, "dwell": 5}
STEP = "tokenprune:overload_step"


@pytest.mark.parametrize("shared", [False, True])
def test_step_is_current(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Also without new requests. Readers do not change the step, and a loop updates a shared count."""
    count = SharedCount(tmp_path) if shared else None
    monkeypatch.setattr(in_flight, "get_shared_count", lambda: count)
    monkeypatch.setattr(in_flight.time, "monotonic", lambda: now)
    name = f"stepping {shared}"
    setting = DIVPRUNE | {"profiles": {"fast": {"keep": 0.11}}}
    model_config = config(folder(NAME), setting | {"overload": RULE}, served_model_name=name)
    load, now, running = RequestLoad(), 100.0, 9
    load.engine = lambda: SimpleNamespace(get_num_unfinished_requests=lambda: running)

    def step() -> float:
        async def share() -> None:
            load.share_count()

        asyncio.run(share())
        (value,) = samples(STEP, name).values()
        return value

    load.show_step(model_config)
    assert load.profile(get_server_config(model_config)) == "fast" and step() == 1
    running = 0
    assert step() == 1, "a step is in force for a while"
    now = 106.0
    assert step() == 0 and load.policy.step == 1
    running = 9
    assert step() == 1
    set_server_config(model_config, get_server_config(config(folder(NAME), setting)))
    assert step() == 0 and load.profile(get_server_config(model_config)) == "default"


def connect(server: Server) -> openai.OpenAI:
    """Return a client with a separate connection."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=CALL, max_retries=0)


def count_prompt_tokens(server: Server) -> int:
    """Return the prompt length of a request with an image, which either API server may answer."""
    messages: Any = write_messages(CHECKPOINTS[NAME].images(1, seed=1), "what? ")
    with connect(server) as api_client:
        usage = api_client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
    assert usage is not None
    return usage.prompt_tokens


@pytest.fixture
def server(folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Server]:
    overload = {"in_flight": [6], "profiles": ["fast"], "rise": 0, "dwell": 0}
    setting = DIVPRUNE | {"profiles": {"fast": {"keep": 0.11}}, "overload": overload}
    arguments = ["--api-server-count", "2", *slow_steps.ARGUMENTS]
    with serve_with_several_engines(folder(NAME), tmp_path, setting, *arguments) as running:
        yield running


@pytest.mark.thorough
def test_two_api_servers_follow_one_load(server: Server) -> None:
    """Six streams are spread over two servers, and each server counts all of the streams."""
    unloaded = {count_prompt_tokens(server) for _ in range(8)}
    assert len(unloaded) == 1, "reduced less by one of the servers"
    clients = [connect(server) for _ in range(6)]  # separate connections, which either server may accept
    more: dict[str, Any] = {"max_tokens": slow_steps.LONG, "extra_body": {"ignore_eos": True}}
    streams = [
        stream_client.completions.create(model="tiny", prompt="go on ", stream=True, **more)
        for stream_client in clients
    ]
    for stream in streams:
        next(iter(stream))
    under_load = [count_prompt_tokens(server) for _ in range(8)]
    assert len(set(under_load)) == 1 and under_load[0] < min(unloaded), server.story(
        f"{under_load}, alone {unloaded}, step {server.counted(STEP)}"
    )
    for stream in streams:
        stream.close()
    end = time.monotonic() + CALL
    while {count_prompt_tokens(server) for _ in range(8)} != unloaded:
        assert time.monotonic() < end, server.story("streams that were dropped still count")
