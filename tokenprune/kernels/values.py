# SPDX-License-Identifier: Apache-2.0
"""Detection of tensors whose values the host cannot read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._C import _functorch, _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import is_fake

_TRACING_MODES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)


def has_unreadable_values(arguments: Iterable[Any]) -> bool:
    """Return True if the host cannot read some tensors in `arguments`, or results computed from them.

    This is the case under torch.export, make_fx and FakeTensorMode, in torch.func transforms, and on the meta device.
    """
    if _functorch.peek_interpreter_stack() is not None:
        return True
    for mode in _TRACING_MODES:
        if _get_dispatch_mode(mode) is not None:
            return True
    for value in arguments:  # a plain loop is faster than any(), and every forward calls this function
        if isinstance(value, Tensor) and (value.is_meta or (type(value) is not Tensor and is_fake(value))):
            return True
    return False
