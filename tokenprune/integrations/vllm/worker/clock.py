# SPDX-License-Identifier: Apache-2.0
"""Time spent on choosing tokens, reported to the process that answers at /metrics, and to the log."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tokenprune.integrations.vllm.log import tell

_SIZE = 4096  # bytes of the file, so that one write replaces all that was there


class Clock:
    """Add up seconds by method in a file of this process, and log each selection if the server logs.

    It never waits for the GPU: events on the stream time the selection, and a later call reports it once it is done.

    folder: where the front end looks for such files (see front/metrics.py). With None, or a folder that this machine
    does not have, nothing is added up. log: True to log. Without either nothing is timed.
    """

    def __init__(self, folder: str | None, log: bool = False) -> None:
        self._path = Path(folder) / str(os.getpid()) if folder and os.path.isdir(folder) else None
        self._log = log
        self._sums: dict[str, list[float]] = {}
        self._running: deque[tuple[dict[str, Any], Any, Any]] = deque()

    @classmethod
    def of(cls, vllm_config: Any) -> Clock:
        """Return the clock of a worker of a server with a setting. Workers that share a model choose the same tokens,
        so only the first one reports."""
        from tokenprune.integrations.vllm.setting.configuration import SECONDS, keys_of

        if vllm_config.parallel_config.rank != 0:
            return cls(None)
        model_config = vllm_config.model_config
        return cls(getattr(model_config.multimodal_config, SECONDS, None), keys_of(model_config).log)

    @contextmanager
    def timing(self, method: str, device: torch.device, **item: Any) -> Iterator[None]:
        """Time the selection of one image or video within the context. item: further fields of the log line."""
        item = {"method": method} | item
        if self._path is None and not self._log:
            yield
        elif device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._running.append((item, start, end))
            self._collect()
        else:
            began = time.perf_counter()
            yield
            self._add(item, time.perf_counter() - began)

    def _collect(self) -> None:
        while self._running and self._running[0][2].query():
            item, start, end = self._running.popleft()
            self._add(item, start.elapsed_time(end) / 1000)

    def _add(self, item: dict[str, Any], seconds: float) -> None:
        if self._log:
            tell("selection", **item, ms=round(seconds * 1000, 3))
        if self._path is None:
            return
        sums = self._sums.setdefault(item["method"], [0.0, 0])
        sums[0] += seconds
        sums[1] += 1
        text = json.dumps(self._sums).encode()
        try:
            with open(self._path, "r+b" if self._path.exists() else "wb", buffering=0) as file:
                file.write(text.ljust(-len(text) // _SIZE * -_SIZE))
        except OSError:  # the front end has gone, or the disk is full: answers go before metrics
            self._path = None
