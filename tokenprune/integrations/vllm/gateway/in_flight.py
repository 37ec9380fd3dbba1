# SPDX-License-Identifier: Apache-2.0
"""Requests in flight, by which the policy under load chooses a profile: of one API server, and of all on a host.

The API servers of one `vllm serve --api-server-count` share a folder for their metrics, which vLLM names in
`PROMETHEUS_MULTIPROC_DIR`. Each writes its own number into a file there, and adds those of the others to its own. A
file is locked as long as its process runs, so that what a killed one has left counts no longer.
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
_EVERY = 0.1  # seconds after which others know of a request that has ended


class SharedCount:
    """The numbers of the API servers that share a folder. Raises OSError where this process cannot write there; later
    faults of the disk cost no request, and what cannot be read counts as 0."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, f"{_PREFIX}{os.getpid()}{_SUFFIX}"
        self._file = os.open(folder / self._name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.write(0)

    def write(self, number: int) -> None:
        """Tell the others this process's own number."""
        with suppress(OSError):
            os.pwrite(self._file, number.to_bytes(_BYTES), 0)

    def count_others(self) -> int:
        """Return the sum of the numbers of the other processes that run."""
        files = self._folder.glob(f"{_PREFIX}*{_SUFFIX}")  # none where the folder has gone
        return sum(_read_running(file) for file in files if file.name != self._name)


def _read_running(path: Path) -> int:
    """Return the number in a file; 0 if its process has ended."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked, so its process runs
        return int.from_bytes(os.pread(file, _BYTES, 0))
    finally:
        os.close(file)
    return 0


@cache
def get_shared_count() -> SharedCount | None:
    """Return what this process shares with other API servers; None where there is nothing to share it by."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    try:
        return SharedCount(Path(folder)) if folder else None
    except OSError:
        return None


@dataclass
class RequestLoad:
    """Requests of one of the server's front ends: being rendered, and in the engine, running or waiting."""

    rendering: int = 0
    engine: Any = None  # a weak reference, which does not keep the engine alive
    policy: OverloadState | None = None
    shown: Any = None  # the model's config, once the step is at /metrics

    @property
    def num_own(self) -> int:
        """The requests in flight that this process has taken."""
        engine = self.engine and self.engine()
        return self.rendering + (engine.get_num_unfinished_requests() if engine is not None else 0)

    @property
    def in_flight(self) -> int:
        """The requests in flight on this host."""
        shared = get_shared_count()
        return self.num_own + (shared.count_others() if shared is not None else 0)

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request that is being rendered."""
        self.rendering += 1
        if (shared := get_shared_count()) is not None:
            shared.write(self.num_own)
        try:
            yield
        finally:
            self.rendering -= 1

    def share_count(self) -> None:
        """Tell the other API servers this one's number from now on, if there may be others: requests come by endpoints
        that count none, and end in the engine. It goes on as long as the event loop in which it is called."""
        if (shared := get_shared_count()) is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no server
            return
        shared.write(self.num_own)
        if self.shown is not None:
            metrics.get_gauge(self.shown, "overload_step").set(self.step())
        loop.call_later(_EVERY, self.share_count)

    def show_step(self, model_config: Any) -> None:
        """Show the step in force at /metrics from now on, of a server that has or had a policy."""
        if self.shown is None and get_server_config(model_config).overload is not None:
            self.shown, gauge = model_config, metrics.get_gauge(model_config, "overload_step")
            # Prometheus' client calls no function where several processes answer at /metrics together.
            gauge.set_function(self.step) if get_shared_count() is None else gauge.set(self.step())

    def step(self) -> int:
        """Return the step at which a request that chooses nothing would be served now. Nothing changes."""
        policy = self._policy(get_server_config(self.shown).overload)
        return 0 if policy is None else policy.get_step(self.in_flight, time.monotonic())

    def profile(self, server: ServerConfig) -> str:
        """Return the profile for a request that chooses none, which puts its step in force."""
        if (policy := self._policy(server.overload)) is None:
            return DEFAULT
        step = policy.take(self.in_flight, time.monotonic())
        return policy.rule.profiles[step - 1] if step else DEFAULT

    def _policy(self, rule: Overload | None) -> OverloadState | None:
        """Return the rule at work; None without a rule. Another rule begins anew."""
        if self.policy is None or self.policy.rule != rule:
            self.policy = None if rule is None else OverloadState(rule)
        return self.policy
