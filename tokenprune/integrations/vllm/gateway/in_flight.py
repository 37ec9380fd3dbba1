# SPDX-License-Identifier: Apache-2.0
"""Requests in flight of one API server and of all API servers on a host, for the overload policy.

The API servers of one `vllm serve --api-server-count` share a folder for metrics, `PROMETHEUS_MULTIPROC_DIR`. Each
writes its number into a file there and adds the numbers of the others to its own. A file is locked while its process
runs, so files of killed processes do not count.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenprune.integrations.vllm.frontend import metrics
from tokenprune.integrations.vllm.settings.keys import DEFAULT
from tokenprune.integrations.vllm.settings.overload import Overload, OverloadState
from tokenprune.integrations.vllm.settings.server_config import ServerConfig, get_server_config

_PREFIX, _SUFFIX = "tokenprune-in-flight-", ".count"  # prometheus_client reads *.db there
_BYTES = 8
_INTERVAL = 0.1  # seconds between publications


class SharedCount:
    """Numbers of requests of the API servers that share a folder.

    The constructor raises OSError if this process cannot write there. Later disk errors affect no request, and
    unreadable files count as 0.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, f"{_PREFIX}{os.getpid()}{_SUFFIX}"
        self._file = os.open(folder / self._name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.write(0)

    def write(self, count: int) -> None:
        """Publish the number of this process."""
        with suppress(OSError):
            os.pwrite(self._file, count.to_bytes(_BYTES), 0)

    def count_others(self) -> int:
        """Return the sum of the numbers of the other running processes."""
        files = self._folder.glob(f"{_PREFIX}*{_SUFFIX}")  # empty if the folder was removed
        return sum(_read_running(file) for file in files if file.name != self._name)


def _read_running(path: Path) -> int:
    """Return the number in a file, or 0 if its process has ended."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # the file is locked, so its process runs
        return int.from_bytes(os.pread(file, _BYTES, 0))
    finally:
        os.close(file)
    return 0


@cache
def get_shared_count() -> SharedCount | None:
    """Return the count shared with other API servers, or None if there is no shared folder."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    try:
        return SharedCount(Path(folder)) if folder else None
    except OSError:
        return None


@dataclass
class RequestLoad:
    """Requests of one front end: being rendered, and running or waiting in the engine."""

    rendering: int = 0
    engine: Any = None  # weak reference, which does not keep the engine alive
    policy: OverloadState | None = None
    shown: Any = None  # ModelConfig, once the step is shown at /metrics

    @property
    def num_own(self) -> int:
        """Number of requests in flight that this process has accepted."""
        engine = self.engine and self.engine()
        return self.rendering + (engine.get_num_unfinished_requests() if engine is not None else 0)

    @property
    def in_flight(self) -> int:
        """Number of requests in flight on this host."""
        shared = get_shared_count()
        return self.num_own + (shared.count_others() if shared is not None else 0)

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request that is being rendered in this context."""
        self.rendering += 1
        if (shared := get_shared_count()) is not None:
            shared.write(self.num_own)
        try:
            yield
        finally:
            self.rendering -= 1

    def share_count(self) -> None:
        """Publish this server's number periodically as long as the current event loop runs.

        A single write per request is not enough: other endpoints also add requests, and requests end in the engine.
        """
        if (shared := get_shared_count()) is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # not in a server
            return
        shared.write(self.num_own)
        if self.shown is not None:
            metrics.get_gauge(self.shown, "overload_step").set(self.step())
        loop.call_later(_INTERVAL, self.share_count)

    def show_step(self, model_config: Any) -> None:
        """Show the current overload step at /metrics from now on, if the server has an overload policy."""
        if self.shown is None and get_server_config(model_config).overload is not None:
            self.shown, gauge = model_config, metrics.get_gauge(model_config, "overload_step")
            # The Prometheus client does not support functions in multiprocess mode.
            gauge.set_function(self.step) if get_shared_count() is None else gauge.set(self.step())

    def step(self) -> int:
        """Return the overload step of a new request that selects no profile, without storing it."""
        policy = self._refresh_policy(get_server_config(self.shown).overload)
        return 0 if policy is None else policy.get_step(self.in_flight, time.monotonic())

    def profile(self, server: ServerConfig) -> str:
        """Return the profile of a new request that selects none. Stores its overload step as the current step."""
        if (policy := self._refresh_policy(server.overload)) is None:
            return DEFAULT
        step = policy.take(self.in_flight, time.monotonic())
        return policy.rule.profiles[step - 1] if step else DEFAULT

    def _refresh_policy(self, rule: Overload | None) -> OverloadState | None:
        """Return the state of a rule, or None without a rule. A changed rule starts anew."""
        if self.policy is None or self.policy.rule != rule:
            self.policy = None if rule is None else OverloadState(rule)
        return self.policy
