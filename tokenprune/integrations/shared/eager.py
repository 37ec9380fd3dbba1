# SPDX-License-Identifier: Apache-2.0
"""Keep what a patch does out of the graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_eagerly(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; torch.compile traces neither it nor what it calls, and ends its graph here:
    choosing tokens asks the device how many there are, and keeps notes outside of tensors."""
    if torch.compiler.is_dynamo_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        return _untraced(function, *args, **kwargs)
    return function(*args, **kwargs)


_untraced = torch.compiler.disable(lambda f, *a, **k: f(*a, **k), reason="tokenprune chooses tokens outside of graphs")


def run_with_call(current: Callable[[], Any], function: Callable, *args: Any) -> Any:
    """Return `run_eagerly(function, call, *args)` where `current()` is a call, else None, as `run_in_call`."""
    call = current()
    return None if call is None else run_eagerly(function, call, *args)


def run_in_call(current: Callable[[], Any], function: Callable, *args: Any) -> Any:
    """Return `run_eagerly(function, *args)` where `current()` is a call, else None: the graph goes on there."""
    return None if current() is None else run_eagerly(function, *args)
