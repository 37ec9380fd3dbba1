# SPDX-License-Identifier: Apache-2.0
"""Run with another default device or dtype than the model's, as a script may set them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tokenprune

_LIBRARY, _TRANSFORMERS = (os.path.join(os.path.dirname(module.__file__), "") for module in (tokenprune, transformers))
# A device that holds no values; a dtype foreign to a float32 model; and a dtype that the library requests explicitly.
DEFAULTS = {"meta": torch.device("meta"), "bfloat16": torch.bfloat16, "float64": torch.float64}


class _Refused(TorchDispatchMode):
    """Refuses tensors that library code creates with the default, since most do not change results on small inputs."""

    def __init__(self, default: torch.device | torch.dtype) -> None:
        super().__init__()
        self.default = default

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        values = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.numel()]
        if any(self.default in (x.device, x.dtype) for x in values) and (line := _line_of_library()):
            raise AssertionError(f"{line}: {function} took the default, {self.default}")
        return output


def _line_of_library() -> str | None:
    """Return the library line that runs the current operation, or None if transformers runs it."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith((_LIBRARY, _TRANSFORMERS)):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_LIBRARY):
        return None
    return f"{frame.f_code.co_filename.removeprefix(_LIBRARY)}:{frame.f_lineno}"


@contextmanager
def defaulting(name: str, watched: bool = True) -> Iterator[None]:
    """Set one of DEFAULTS as the process default. watched: refuse tensors that the library creates with it."""
    default, before = DEFAULTS[name], torch.get_default_dtype()
    watched = watched and default is not torch.float64  # the library creates some float64 tensors explicitly
    is_device = isinstance(default, torch.device)
    with default if is_device else nullcontext(), _Refused(default) if watched else nullcontext():
        torch.set_default_dtype(before if is_device else default)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
