# SPDX-License-Identifier: Apache-2.0
"""Whether the host can read the values of a tensor, and checks that read them only where it does not wait."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
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


def reads_fast(x: Tensor) -> bool:
    """Return True if the host reads the values of `x` without waiting for a device, and outside of torch.compile."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# The next two functions repeat the condition of `reads_fast`, as a forward calls them dozens of times.
def is_all_true(mask: Tensor) -> bool:
    """Return True if the host reads a bool mask fast and all entries are True, so that a pass can be skipped."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.numpy().all())


def is_all_finite(x: Tensor) -> bool:
    """Return True if the host reads `x` fast and all entries are finite, so that a pass can be skipped."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return x.numel() == 0 or math.isfinite(torch.linalg.vector_norm(x, torch.inf).item())
