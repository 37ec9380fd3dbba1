# SPDX-License-Identifier: Apache-2.0
"""The cost of timing a selection: writes to the worker's file, and events on the device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenprune.integrations.vllm.worker import clock
from tokenprune.integrations.vllm.worker.clock import Clock

CPU = torch.device("cpu")


class Timers:
    """Replaces `Timer` and the monotonic clock. The test advances the time and starts the callbacks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.started = 100.0, list[Any]()
        monkeypatch.setattr(clock, "Timer", self.create)
        monkeypatch.setattr(clock.time, "monotonic", lambda: self.now)

    def create(self, wait: float, act: Any) -> Any:
        return SimpleNamespace(wait=wait, act=act, daemon=False, start=lambda: self.started.append((wait, act)))


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    return Timers(monkeypatch)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    writes_so_far, original = list[bytes](), clock.os.pwrite

    def pwrite(file: int, text: bytes, offset: int) -> int:
        writes_so_far.append(text)
        return original(file, text, offset)

    monkeypatch.setattr(clock.os, "pwrite", pwrite)
    return writes_so_far


def select(timer: Clock, times: int, device: torch.device = CPU) -> None:
    for _ in range(times):
        with timer.timing("divprune", device):
            pass


def test_the_file_is_written_once_a_second(tmp_path: Path, timers: Timers, writes: list[bytes]) -> None:
    timer = Clock(str(tmp_path))
    select(timer, 50)
    assert len(writes) == len(timers.started) == 1, "the file is written for each image"
    timers.now += 1
    ((wait, write),) = timers.started
    write()
    assert wait == 1.0 and len(writes) == 2
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_bytes())["divprune"][1] == 50, "a delayed write is lost"
    timers.now += 1
    select(timer, 1)
    assert len(writes) == 3 and json.loads(file.read_bytes())["divprune"][1] == 51


def test_events_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    def event(enable_timing: bool) -> Any:
        events.append(enable_timing)
        return SimpleNamespace(record=lambda: None, query=lambda: True, elapsed_time=lambda end: 2.0)

    monkeypatch.setattr(torch.cuda, "Event", event)
    timer = Clock(str(tmp_path))
    select(timer, 5, torch.device("cuda"))
    assert events == [True, True]


def test_items_of_a_batch_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(clock, "log_event", lambda event, **fields: lines.append(fields))
    monkeypatch.setattr(clock.time, "perf_counter", iter((1.0, 1.6)).__next__)
    with Clock(str(tmp_path), log=True).timing("divprune", CPU, {"request": "a"}, {"request": "b"}):
        pass
    assert [(line["request"], line["ms"]) for line in lines] == [("a", 300.0), ("b", 300.0)]
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_bytes())["divprune"] == [pytest.approx(0.6), 2]
