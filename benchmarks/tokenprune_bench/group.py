# SPDX-License-Identifier: Apache-2.0
"""The processes that share a benchmark, as `accelerate launch` or `torchrun` started them.

Not accelerate's PartialState: it takes NCCL where there are GPUs, sets the number of threads and stays for the whole
process; and ending a part of the work together, or learning that a process has ended, is not in it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenprune_bench.errors import RunError

# One process times the methods, and some questions take longer than others, while the rest wait.
_PATIENCE = datetime.timedelta(days=2)


@dataclass(frozen=True)
class Group:
    """rank: of this process, from 0. size: how many there are."""

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """Return the objects of all processes, in the order of their ranks; all must call, and wait for each other."""
        if self.size == 1:
            return [mine]
        import torch.distributed

        everything: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(everything, mine)
        except RuntimeError as error:
            raise RunError("another process of this run has ended: see what it said") from error
        return everything

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Open a context that all processes enter and leave together; a RunError in one is raised in all of them, so
        that no process waits for one that has stopped."""
        failure = None
        try:
            yield
        except RunError as error:
            failure = error
        messages = self.gather(None if failure is None else str(failure))
        if failures := [one for one in messages if one is not None]:
            raise failure or RunError(failures[0])


SINGLE_PROCESS = Group()


@contextmanager
def join_group() -> Iterator[Group]:
    """Join the group that the launcher's environment names, for as long as the context lasts; alone without one.

    Plain objects are exchanged, so that gloo serves on every device.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield SINGLE_PROCESS
        return
    import torch.distributed

    torch.distributed.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Group(torch.distributed.get_rank(), size)
    finally:
        torch.distributed.destroy_process_group()


def select_device(device: str | None) -> str | None:
    """Return the device of this process: the one that was asked for, else the one of its rank on this machine."""
    local = os.environ.get("LOCAL_RANK")
    if device is not None or local is None or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        return device or ("cpu" if local is not None else None)
    import torch

    return f"cuda:{int(local) % torch.cuda.device_count()}" if torch.cuda.is_available() else None
