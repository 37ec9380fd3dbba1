# SPDX-License-Identifier: Apache-2.0
"""Counts of the workers, which have no page at /metrics: read from their files each time metrics are read."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import tempfile
from collections import Counter as Sums
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tokenprune.integrations.vllm.settings.configuration import METRICS_FOLDER

_PREFIX = "tokenprune-metrics-"
_locks: list[int] = []  # held until this process ends
SUMS = {
    "tokenprune:selection_seconds": (
        "Seconds in which the tokens of images and videos were chosen, after the vision tower, on the device.",
        ("model_name", "method"),
    ),
    "tokenprune:selections": (
        "Images and videos whose tokens were chosen; those that come from the encoder's cache are not chosen again.",
        ("model_name", "method"),
    ),
}


class _OfWorkers(Collector):
    """Adds up the workers' files (see worker/clock.py) each time metrics are read."""

    def __init__(self) -> None:
        self.folders: list[tuple[Path, str]] = []
        self.zeros: set[tuple[str, str]] = set()  # of model and method: those that may come

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        sums: dict[str, Sums[tuple[str, str]]] = {name: Sums(dict.fromkeys(self.zeros, 0)) for name in SUMS}
        for folder, model in self.folders:
            for file in folder.iterdir() if folder.is_dir() else ():
                try:
                    found = json.loads(file.read_bytes())
                except (OSError, ValueError):  # while it is being written for the first time
                    continue
                for method, values in found.items():
                    for name, value in zip(SUMS, values, strict=True):
                        sums[name][model, method] += value
        for name, (text, labels) in SUMS.items():
            family = CounterMetricFamily(name, text, labels=labels)
            for key, value in sums[name].items():
                family.add_metric(key, value)
            yield family


@cache
def get_worker_metrics() -> _OfWorkers:
    made = _OfWorkers()
    REGISTRY.register(made)
    return made


def create_worker_folder(model_config: Any) -> None:
    """Make the folder in which this model's workers write their sums; it is removed when this process ends."""
    folder = tempfile.mkdtemp(dir=_own_folder())
    setattr(model_config.multimodal_config, METRICS_FOLDER, folder)
    get_worker_metrics().folders.append((Path(folder), model_config.served_model_name))


@cache
def _own_folder() -> str:
    """Return this process's folder, which it holds locked as long as it runs; those of killed ones are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):  # another process may have taken it for one that was left
            _locks.append(lock)
            atexit.register(_remove, folder, os.getpid())
            return folder
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder whose process no longer runs, so that its lock is free; never a folder of another user."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError:
        return
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its process runs
        pass
    finally:
        os.close(lock)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not one that was forked
        shutil.rmtree(folder, ignore_errors=True)
