# SPDX-License-Identifier: Apache-2.0
"""The active forward calls of a patched model, per thread."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from tokenprune.integrations.shared.frames import find_module_frame, is_running

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.context import Call


@dataclass(eq=False)
class _Entry:
    """A call on the stack of a thread.

    frame: The base module's call, which runs as long as `call` is active.
    stack: All entries of the thread for the same engine, the innermost last.
    thread: Dead once the thread has ended.
    """

    call: Call
    frame: FrameType
    stack: list[_Entry]
    thread: weakref.ref[_Marker]


class _Marker:
    """An object that lives as long as a thread."""


class _ThreadCalls(threading.local):
    def __init__(self) -> None:
        self.stacks: dict[CallStack, list[_Entry]] = {}
        self.marker = _Marker()


_thread = _ThreadCalls()


class CallStack:
    """The active calls of one engine. Every thread has a stack of its own.

    A call may end without notice (KeyboardInterrupt, an error during export, a thread that dies). Whatever enters the
    model therefore asks `running`, which drops calls whose forward has ended. A copy of the model starts with an empty
    stack.

    active: The calls of all threads. Compiled code reads whether the list is empty, and nothing else.
    at_layers: The active calls that may act at a decoder layer. While it is empty, a graph continues across layers.
    """

    def __init__(self) -> None:
        self.active: list[_Entry] = []
        self.at_layers: list[Call] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def current(self) -> Call | None:
        """Return the innermost call of this thread."""
        if not self.active:
            return None
        stack = _thread.stacks.get(self)
        if not stack:
            return None
        return stack[-1].call if len(stack) == 1 else self.running()

    def running(self) -> Call | None:
        """Drop the calls of this thread whose forward has ended, and return the innermost call that is left."""
        stack = _thread.stacks.get(self) or []
        while stack and not is_running(stack[-1].frame):
            self._drop(stack[-1])
        return stack[-1].call if stack else None

    def begin(self, call: Call) -> None:
        """Put `call` on the stack of this thread. Call it in a hook on the way into the base module."""
        if self.active:
            self.running()
            for entry in list(self.active):
                if entry.thread() is None:
                    self._drop(entry)
        stack = _thread.stacks.setdefault(self, [])
        entry = _Entry(call, find_module_frame(), stack, weakref.ref(_thread.marker))
        stack.append(entry)
        self.active.append(entry)

    def end(self, call: Call) -> bool:
        """Remove `call`, the innermost call of this thread, and return True.

        Call it in a hook on the way out of the base module. Return False if `call` began in another module call.
        """
        stack = _thread.stacks[self]
        entry = stack[-1]
        if entry.call is not call or entry.frame is not find_module_frame():
            return False
        self._drop(entry)
        if not stack:
            del _thread.stacks[self]
        return True

    def clear(self) -> None:
        """Remove all calls of all threads."""
        for entry in list(self.active):
            self._drop(entry)
        _thread.stacks.pop(self, None)

    def _drop(self, entry: _Entry) -> None:
        # Other threads change these lists too: each removal is a single step.
        places: list[tuple[list[Any], Any]] = [
            (entry.stack, entry),
            (self.active, entry),
            (self.at_layers, entry.call),
        ]
        for entries, item in places:
            with suppress(ValueError):
                entries.remove(item)
