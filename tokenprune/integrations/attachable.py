# SPDX-License-Identifier: Apache-2.0
"""What every part of a patch does: put hooks on a model, and take all of them away again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Attachable:
    """Base of the parts of a patch. A subclass installs everything in `_attach`, and only by the methods below."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Install all hooks; on any error those already installed are removed again."""
        try:
            self._attach()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Remove everything that `attach` installed, in reverse."""
        while self._undo:
            self._undo.pop()()

    def _attach(self) -> None:
        raise NotImplementedError

    def hook(self, handle: Any) -> None:
        """Keep the handle of a hook, to be removed."""
        self._undo.append(handle.remove)

    def attach_part(self, part: Any) -> None:
        """Attach something that has `attach` and `detach` itself."""
        part.attach()
        self._undo.append(part.detach)

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Put `value` on the instance `module`, over its class's attribute or somebody else's wrapper."""
        # Partials, not closures: a deep copy of the model gets its own.
        before = module.__dict__.get(name)
        self._undo.append(partial(delattr, module, name) if before is None else partial(setattr, module, name, before))
        setattr(module, name, value)


def hidden_states(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a block or layer of transformers is called with first."""
    return args[0] if args else kwargs["hidden_states"]


def with_hidden_states(hidden: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of such a call with others in their place."""
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def states() -> dict[Any, Any]:
    """What each part (by its id, or by a key with its id in it) knows of the forward that this thread is in: parts are
    shared by threads. What is left behind under an id can be met by a later part."""
    return _thread.__dict__.setdefault("states", {})


_thread = threading.local()
