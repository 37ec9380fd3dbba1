# SPDX-License-Identifier: Apache-2.0
"""Time spent on token selection, reported to the process that serves /metrics, and to the log."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Timer
from typing import Any

import torch

from tokenprune.integrations.vllm.log import log_event

_SIZE = 4096  # bytes of the file: constant, so that each write replaces the previous content
_INTERVAL = 1.0  # seconds between two writes


class Clock:
    """Sums seconds by method in a file of this process, and logs each selection if the server logs.

    It never waits for the GPU: CUDA events time the selection, and a later call reports it once it is finished. The
    file is written at most once a second, and when the process ends. Without a folder and a log nothing is timed.

    Args:
        folder: Folder of the front end for such files (frontend/metrics.py). If it is None or does not exist on this
            machine, no sums are written.
        log: Whether to log.
    """

    def __init__(self, folder: str | None, log: bool = False) -> None:
        self._file: int | None = None
        if folder and os.path.isdir(folder):
            self._file = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT, 0o600)
            atexit.register(self._write)
        self._log = log
        self._sums: dict[str, tuple[float, int]] = {}
        self._running: deque[tuple[list[dict[str, Any]], Any, Any]] = deque()
        self._spare: list[tuple[Any, Any]] = []  # events for reuse
        self._next_write = 0.0  # earliest time of the next write
        self._timer: Timer | None = None  # writes sums that came before that time

    @classmethod
    def from_config(cls, vllm_config: Any) -> Clock:
        """Return the clock of a worker.

        Only the first worker reports, because workers that share a model choose the same tokens.
        """
        from tokenprune.integrations.vllm.settings.configuration import METRICS_FOLDER
        from tokenprune.integrations.vllm.settings.server_config import get_server_config

        if vllm_config.parallel_config.rank != 0:
            return cls(None)
        model_config = vllm_config.model_config
        return cls(getattr(model_config.multimodal_config, METRICS_FOLDER, None), get_server_config(model_config).log)

    @contextmanager
    def timing(self, method: str, device: torch.device, *items: Mapping[str, Any]) -> Iterator[None]:
        """Time the selection of images or videos within the context.

        Args:
            *items: Further fields of the log line of each item.
        """
        fields = [{"method": method, **item} for item in items or ({},)]
        if self._file is None and not self._log:
            yield
        elif device.type == "cuda":
            start, end = self._spare.pop() if self._spare else (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._running.append((fields, start, end))
            self._collect()
        else:
            began = time.perf_counter()
            yield
            self._add(fields, time.perf_counter() - began)

    def _collect(self) -> None:
        while self._running and self._running[0][2].query():
            fields, start, end = self._running.popleft()
            self._add(fields, start.elapsed_time(end) / 1000)
            self._spare.append((start, end))

    def _add(self, fields: list[dict[str, Any]], seconds: float) -> None:
        for item in fields if self._log else ():
            log_event("selection", **item, ms=round(seconds * 1000 / len(fields), 3))
        if self._file is None:
            return
        method = fields[0]["method"]
        before, count = self._sums.get(method, (0.0, 0))
        self._sums[method] = before + seconds, count + len(fields)
        if self._timer is not None:
            return
        if (wait := self._next_write - time.monotonic()) <= 0:
            self._write()
        else:
            self._timer = Timer(wait, self._write)
            self._timer.daemon = True
            self._timer.start()

    def _write(self) -> None:
        assert self._file is not None
        self._timer, self._next_write = None, time.monotonic() + _INTERVAL
        text = json.dumps(dict(self._sums)).encode()
        with suppress(OSError):  # the front end ended, or the disk is full: do not fail the request
            os.pwrite(self._file, text.ljust(-len(text) // _SIZE * -_SIZE), 0)
