# SPDX-License-Identifier: Apache-2.0
"""Tell whether tensors hold values that the host can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._C import _functorch, _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import is_fake

_TRACING_MODES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)


def has_unreadable_values(arguments: Iterable[Any]) -> bool:
    """Return True if the host cannot read some tensors among `arguments`, or the results of operations on them.

    This is so under torch.export, make_fx and FakeTensorMode, inside the transforms of torch.func, and on the meta
    device.
    """
    if _functorch.peek_interpreter_stack() is not None:
        return True
    for mode in _TRACING_MODES:
        if _get_dispatch_mode(mode) is not None:
            return True
    for value in arguments:  # a loop, because every call passes here
        if isinstance(value, Tensor) and (value.is_meta or (type(value) is not Tensor and is_fake(value))):
            return True
    return False
