# SPDX-License-Identifier: Apache-2.0
"""Non-blocking transfers between host and device, and small caches.

A blocking copy, or reading one value, stalls the device. docs/results/speed.md lists the few synchronizations of this
library, and tests count them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def to_device(values: Sequence | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy host values to `device` without blocking. Do not modify them afterwards.

    Args:
        values: A sequence or a tensor.
        device: The target device.
        dtype: dtype for a sequence. Pass it for floats, which would otherwise get the process's default dtype.

    Examples:
        >>> to_device([3, 1], torch.device("cpu"))
        tensor([3, 1])
    """
    values = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    return values.to(device, non_blocking=True)


class FIFOCache:
    """Cache of the last `MAX_ENTRIES` computed values, shared by prompts of the same shape. Entries are read-only.

    A copy starts empty, so `copy.deepcopy(model)` does not share entries.

    Examples:
        >>> cache = FIFOCache()
        >>> cache.get("shape", lambda: 3), cache.get("shape", lambda: 4)
        (3, 3)
    """

    MAX_ENTRIES = 16

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value of `key`, or compute it with `make`."""
        value: T | None = self._entries.get(key)
        if value is None:
            with torch.inference_mode(False):  # inference tensors cannot be used in training later
                value = make()
            # A single assignment is safe between threads.
            self._entries = dict([*self._entries.items(), (key, value)][-self.MAX_ENTRIES :])
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class AsyncValues:
    """A small tensor that is copied to the host without blocking.

    Args:
        values: 1-D tensor on any device.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.count, self._values, self._event = len(values), values, None
        if values.device.type != "cpu" and (event := _create_event(values.device)) is not None:
            self._values = values.to("cpu", non_blocking=True)
            event.record(torch.accelerator.current_stream(values.device))
            self._event = event

    def is_ready(self) -> bool:
        """Return True once the copy has completed, so that `read` does not block."""
        return self._values.device.type == "cpu" and (self._event is None or self._event.query())

    def read(self) -> list[float]:
        """Return the values. Blocks until the copy has completed."""
        if not self.is_ready() and self._event is not None:
            self._event.synchronize()
        return self._values.tolist()

    def select(self, index: int) -> AsyncValues:
        """Return the value at `index`, which is ready when all values are."""
        selected = AsyncValues.__new__(AsyncValues)
        selected.__dict__ |= self.__dict__ | {"count": 1, "_values": self._values[index : index + 1]}
        return selected

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be copied.
        return self.__dict__ | {"_values": torch.tensor(self.read(), dtype=torch.float32, device="cpu"), "_event": None}


class JoinedValues(AsyncValues):
    """Concatenation of several `AsyncValues`."""

    def __init__(self, parts: Sequence[AsyncValues]) -> None:
        self.count, self.parts = sum(part.count for part in parts), list(parts)

    def is_ready(self) -> bool:
        return all(part.is_ready() for part in self.parts)

    def read(self) -> list[float]:
        return [value for part in self.parts for value in part.read()]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def _create_event(device: torch.device) -> torch.Event | None:
    """Return an event of the device, or None if it has none. Values then stay on the device until they are read."""
    try:
        return torch.Event(device=device)
    except (RuntimeError, NotImplementedError):
        return None
