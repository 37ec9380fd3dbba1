# SPDX-License-Identifier: Apache-2.0
"""A process whose default device or dtype is another one than the model's, as a script may make it."""

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
# A device that holds no values; a dtype that a float32 model has no use for, and one that the library asks for itself.
DEFAULTS = {"meta": torch.device("meta"), "bfloat16": torch.bfloat16, "float64": torch.float64}


class _Refused(TorchDispatchMode):
    """Refuses tensors of a default that the library's own lines make: most of them change no answer on small inputs."""

    def __init__(self, default: torch.device | torch.dtype) -> None:
        super().__init__()
        self.default = default

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        values = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor) and x.numel()]
        if any(self.default in (x.device, x.dtype) for x in values) and (line := _line_of_library()):
            raise AssertionError(f"{line}: {function} took the default, {self.default}")
        return made


def _line_of_library() -> str | None:
    """Return the line that asks for what runs now, None if transformers does."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith((_LIBRARY, _TRANSFORMERS)):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_LIBRARY):
        return None
    return f"{frame.f_code.co_filename.removeprefix(_LIBRARY)}:{frame.f_lineno}"


@contextmanager
def defaulting(name: str, watched: bool = True) -> Iterator[None]:
    """Make one of DEFAULTS the process's default. watched: refuse tensors that the library makes of it."""
    default, before = DEFAULTS[name], torch.get_default_dtype()
    watched = watched and default is not torch.float64  # the library makes some of these by name
    of_device = isinstance(default, torch.device)
    with default if of_device else nullcontext(), _Refused(default) if watched else nullcontext():
        torch.set_default_dtype(before if of_device else default)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
