# SPDX-License-Identifier: Apache-2.0
"""Detect whether the module call that a hook belongs to is still running.

PyTorch skips `always_call` hooks after a BaseException, and while compiling or exporting. A patch therefore cannot rely
on a hook at the end of a module call. It looks for the frame of the call on the stack of the thread instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

# Frames between the call of a module and a hook of a patch: this library, and torch.compile.
_BETWEEN = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent / "_dynamo"))
_MODULE_CALL = torch.nn.Module.__call__.__code__.co_filename


def find_module_frame() -> FrameType:
    """Return the frame of the module call whose hook is running."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    # `Module.__call__` consists of several functions. An error unwinds the inner functions before the last hooks run.
    while (caller := frame.f_back) is not None and caller.f_code.co_filename == _MODULE_CALL:
        frame = caller
    return frame


def is_running(frame: FrameType) -> bool:
    """Return True if `frame` is on the stack of this thread."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
