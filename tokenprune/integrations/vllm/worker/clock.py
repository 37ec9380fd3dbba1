# SPDX-License-Identifier: Apache-2.0
"""Time spent on choosing tokens, reported to the process that answers at /metrics, and to the log."""

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

_SIZE = 4096  # bytes of the file, so that one write replaces all that was there
_EVERY = 1.0  # seconds between two writes


class Clock:
    """Add up seconds by method in a file of this process, and log each selection if the server logs.

    It never waits for the GPU: events on the stream time the selection, and a later call reports it once it is done.
    The file is written once a second at most, and when the process ends.

    folder: where the front end looks for such files (see front/metrics.py). With None, or a folder that this machine
    does not have, nothing is added up. log: True to log. Without either nothing is timed.
    """

    def __init__(self, folder: str | None, log: bool = False) -> None:
        self._file: int | None = None
        if folder and os.path.isdir(folder):
            self._file = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT, 0o600)
            atexit.register(self._write)
        self._log = log
        self._sums: dict[str, tuple[float, int]] = {}
        self._running: deque[tuple[list[dict[str, Any]], Any, Any]] = deque()
        self._spare: list[tuple[Any, Any]] = []  # events that have been read
        self._next = 0.0  # when the file may be written again
        self._due: Timer | None = None  # writes what came too soon

    @classmethod
    def from_config(cls, vllm_config: Any) -> Clock:
        """Return the clock of a worker of a server with a setting. Workers that share a model choose the same tokens,
        so only the first one reports."""
        from tokenprune.integrations.vllm.settings.configuration import METRICS_FOLDER
        from tokenprune.integrations.vllm.settings.server_config import get_server_config

        if vllm_config.parallel_config.rank != 0:
            return cls(None)
        model_config = vllm_config.model_config
        return cls(getattr(model_config.multimodal_config, METRICS_FOLDER, None), get_server_config(model_config).log)

    @contextmanager
    def timing(self, method: str, device: torch.device, *items: Mapping[str, Any]) -> Iterator[None]:
        """Time the selection of images or videos within the context. items: further fields of the log line of each."""
        of = [{"method": method, **one} for one in items or ({},)]
        if self._file is None and not self._log:
            yield
        elif device.type == "cuda":
            start, end = self._spare.pop() if self._spare else (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._running.append((of, start, end))
            self._collect()
        else:
            began = time.perf_counter()
            yield
            self._add(of, time.perf_counter() - began)

    def _collect(self) -> None:
        while self._running and self._running[0][2].query():
            of, start, end = self._running.popleft()
            self._add(of, start.elapsed_time(end) / 1000)
            self._spare.append((start, end))

    def _add(self, of: list[dict[str, Any]], seconds: float) -> None:
        for item in of if self._log else ():
            log_event("selection", **item, ms=round(seconds * 1000 / len(of), 3))
        if self._file is None:
            return
        method = of[0]["method"]
        before, count = self._sums.get(method, (0.0, 0))
        self._sums[method] = before + seconds, count + len(of)
        if self._due is not None:
            return
        if (wait := self._next - time.monotonic()) <= 0:
            self._write()
        else:
            self._due = Timer(wait, self._write)
            self._due.daemon = True
            self._due.start()

    def _write(self) -> None:
        assert self._file is not None
        self._due, self._next = None, time.monotonic() + _EVERY
        text = json.dumps(dict(self._sums)).encode()
        with suppress(OSError):  # the front end has gone, or the disk is full: answers go before metrics
            os.pwrite(self._file, text.ljust(-len(text) // _SIZE * -_SIZE), 0)
