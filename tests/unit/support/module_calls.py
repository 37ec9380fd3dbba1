# SPDX-License-Identifier: Apache-2.0
"""Record the inputs or outputs of a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def get_first_input(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


@contextmanager
def record_inputs(*modules: nn.Module, note: Callable[[tuple, dict], Any] = get_first_input) -> Iterator[list[Any]]:
    """Record `note(args, kwargs)` of each call of the modules within this context."""
    records: list[Any] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        records.append(note(args, kwargs))

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_outputs(*modules: nn.Module, note: Callable[[Any], Any] = lambda output: output) -> Iterator[list[Any]]:
    """Record `note(output)` of each call of the modules within this context."""
    records: list[Any] = []
    handles = [module.register_forward_hook(lambda m, args, out: records.append(note(out))) for module in modules]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replace_outputs(outputs: dict[nn.Module, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace the output of each module by a function of it within this context, before other hooks."""
    handles = [
        module.register_forward_hook(lambda m, args, out, change=change: change(out), prepend=True)
        for module, change in outputs.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
