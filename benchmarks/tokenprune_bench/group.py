# SPDX-License-Identifier: Apache-2.0
"""Process group of a benchmark started with `accelerate launch` or `torchrun`.

accelerate's PartialState is not used: it selects NCCL on GPUs, sets the number of threads, and lasts for the whole
process. It also cannot end a stage in all processes together, or detect that a process has ended.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenprune_bench.errors import RunError

# The other processes wait while one process times the methods.
_TIMEOUT = datetime.timedelta(days=2)


@dataclass(frozen=True)
class Group:
    """Processes that share a benchmark.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """Return the objects of all processes in rank order. All processes must call it."""
        if self.size == 1:
            return [mine]
        import torch.distributed

        everything: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(everything, mine)
        except RuntimeError as error:
            raise RunError("Another process of this run has ended. See its output.") from error
        return everything

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Open a context that all processes enter and leave together.

        A RunError in one process is raised in all of them, so that no process waits for a stopped one.
        """
        failure = None
        try:
            yield
        except RunError as error:
            failure = error
        messages = self.gather(None if failure is None else str(failure))
        if failures := [message for message in messages if message is not None]:
            raise failure or RunError(failures[0])


SINGLE_PROCESS = Group()


@contextmanager
def join_group() -> Iterator[Group]:
    """Open the group of the launcher's environment, or a group of one process.

    Only plain objects are exchanged, so the gloo backend is used on every device.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield SINGLE_PROCESS
        return
    import torch.distributed

    torch.distributed.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield Group(torch.distributed.get_rank(), size)
    finally:
        torch.distributed.destroy_process_group()


def select_device(device: str | None) -> str | None:
    """Return the requested device, or the device of this process's local rank."""
    local = os.environ.get("LOCAL_RANK")
    if device is not None or local is None or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        return device or ("cpu" if local is not None else None)
    import torch

    return f"cuda:{int(local) % torch.cuda.device_count()}" if torch.cuda.is_available() else None
