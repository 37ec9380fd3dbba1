# SPDX-License-Identifier: Apache-2.0
"""Tell whether tensors hold values that the host can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch, _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import is_fake

_TRACING_MODES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)


def lack_values(arguments: Iterable[Any]) -> bool:
    """Return True if the host cannot read some tensors among `arguments`, or the results of operations on them.

    This is so under torch.export, make_fx and FakeTensorMode, inside the transforms of torch.func, and on the meta
    device.
    """
    if _functorch.peek_interpreter_stack() is not None:
        return True
    if any(_get_dispatch_mode(mode) is not None for mode in _TRACING_MODES):
        return True
    return any(_lacks_values(value) for value in arguments if isinstance(value, Tensor))


def _lacks_values(tensor: Tensor) -> bool:
    if type(tensor) is torch.Tensor:  # the common case
        return tensor.is_meta
    return tensor.is_meta or is_fake(tensor)
