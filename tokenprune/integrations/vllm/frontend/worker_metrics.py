# SPDX-License-Identifier: Apache-2.0
"""Metrics of the workers, read from their files. The workers themselves do not serve /metrics."""

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
        "Device seconds of token selection after the vision tower.",
        ("model_name", "method"),
    ),
    "tokenprune:selections": (
        "Images and videos whose tokens were selected. Hits of the encoder cache are not counted again.",
        ("model_name", "method"),
    ),
}


class _WorkerMetrics(Collector):
    """Sums the workers' files (see worker/clock.py) each time metrics are read."""

    def __init__(self) -> None:
        self.folders: list[tuple[Path, str]] = []
        self.zeros: set[tuple[str, str]] = set()  # (model, method) pairs to show as 0

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        sums: dict[str, Sums[tuple[str, str]]] = {name: Sums(dict.fromkeys(self.zeros, 0)) for name in SUMS}
        for folder, model in self.folders:
            for file in folder.iterdir() if folder.is_dir() else ():
                try:
                    values_by_method = json.loads(file.read_bytes())
                except (OSError, ValueError):  # the file is being written for the first time
                    continue
                for method, values in values_by_method.items():
                    for name, value in zip(SUMS, values, strict=True):
                        sums[name][model, method] += value
        for name, (text, labels) in SUMS.items():
            family = CounterMetricFamily(name, text, labels=labels)
            for key, value in sums[name].items():
                family.add_metric(key, value)
            yield family


@cache
def get_worker_metrics() -> _WorkerMetrics:
    """Return the collector of this process, registered on first use."""
    collector = _WorkerMetrics()
    REGISTRY.register(collector)
    return collector


def create_worker_folder(model_config: Any) -> None:
    """Create the folder for the sums of this model's workers. It is removed when this process ends."""
    folder = tempfile.mkdtemp(dir=_get_process_folder())
    setattr(model_config.multimodal_config, METRICS_FOLDER, folder)
    get_worker_metrics().folders.append((Path(folder), model_config.served_model_name))


@cache
def _get_process_folder() -> str:
    """Return the folder of this process, locked while the process runs. Folders of killed processes are removed."""
    for folder_of_other in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_unlocked(folder_of_other)
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):  # another process may have removed it before it was locked
            _locks.append(lock)
            atexit.register(_remove, folder, os.getpid())
            return folder
        os.close(lock)


def _remove_if_unlocked(folder: Path) -> None:
    """Remove a folder if its process has ended, that is, if its lock is free. Other users' folders are kept."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError:
        return
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # the process still runs
        pass
    finally:
        os.close(lock)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)
