# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way to a device or from it, without the host waiting for it.

Between a host and an accelerator everything is cheap but waiting: a plain copy, or the question for one number, lets
the device run dry. docs/results/speed.md lists the few times that the library does wait; tests count them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def to_device(values: Sequence | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return numbers of the host as a tensor on `device`. They must not be changed afterwards.

    dtype: of fractions in a list, which a process's default dtype would round.
    """
    values = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    return values.to(device, non_blocking=True)


class Recent:
    """Values by all that they follow from, the last `MOST` that were made: a prompt of the same shape finds them. They
    are not to be changed. A copy, as one of the model has, is empty."""

    MOST = 16

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for `key`; it is called where that is not known."""
        found: T | None = self._made.get(key)
        if found is None:
            with torch.inference_mode(False):  # a tensor made in inference could not serve training later
                found = make()
            # One assignment: threads share it.
            self._made = dict([*self._made.items(), (key, found)][-self.MOST :])
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class AsyncValues:
    """A small tensor on its way to the host, which does not wait for it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.count, self._values, self._event = len(values), values, None
        if values.device.type != "cpu" and (event := _event(values.device)) is not None:
            self._values = values.to("cpu", non_blocking=True)
            event.record(torch.accelerator.current_stream(values.device))
            self._event = event

    def ready(self) -> bool:
        """Return True once the values have arrived, so that reading them waits for nothing."""
        return self._values.device.type == "cpu" and (self._event is None or self._event.query())

    def read(self) -> list[float]:
        """Return the values; waits for them where they have not arrived."""
        if not self.ready() and self._event is not None:
            self._event.synchronize()
        return self._values.tolist()

    def only(self, index: int) -> AsyncValues:
        """Return one of the values, as late as all of them."""
        one = AsyncValues.__new__(AsyncValues)
        one.__dict__ |= self.__dict__ | {"count": 1, "_values": self._values[index : index + 1]}
        return one

    def __getstate__(self) -> dict[str, Any]:
        # An event cannot be copied.
        return self.__dict__ | {"_values": torch.tensor(self.read(), dtype=torch.float32, device="cpu"), "_event": None}


class JoinedValues(AsyncValues):
    """Values that came by several ways, one after the other."""

    def __init__(self, parts: Sequence[AsyncValues]) -> None:
        self.count, self.parts = sum(part.count for part in parts), list(parts)

    def ready(self) -> bool:
        return all(part.ready() for part in self.parts)

    def read(self) -> list[float]:
        return [value for part in self.parts for value in part.read()]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def _event(device: torch.device) -> torch.Event | None:
    """Return an event of the device, or None if it has none: then the values stay on the device until they are read."""
    try:
        return torch.Event(device=device)
    except (RuntimeError, NotImplementedError):
        return None
