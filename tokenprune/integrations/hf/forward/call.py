# SPDX-License-Identifier: Apache-2.0
"""The state of one forward pass of a patched model, and the stack of active calls of each thread."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.view import CacheView, build_view
from tokenprune.integrations.hf.forward.layer_inputs import LayerInputs, find_key_positions
from tokenprune.integrations.hf.forward.prompt_info import PromptInfo
from tokenprune.integrations.hf.forward.token_state import Layout, TokenState
from tokenprune.selection.segments import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.plan import Plan, Step
    from tokenprune.integrations.hf.forward.trace import Trace
    from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions
    from tokenprune.selection.method import Selection


# Maps the output of a base model with changed arguments back to the caller's rows.
RestoreOutput = Callable[[Any], Any]

_NO_PROMPT = PromptInfo({})
_NOTHING = torch.empty(0, 0, dtype=torch.long, device="cpu")
_NO_LAYOUT = Layout(_NOTHING, None, 0, [])
_NO_SEGMENTS = Segments([], [], [], _NOTHING, _NOTHING.bool(), [], [])
_NO_TOKENS = TokenState(_NO_SEGMENTS, _NO_LAYOUT)


@dataclass(eq=False)
class Call:
    """One forward of the base model. It is stored on a stack of its thread, never on the model.

    Attributes:
        arguments: Arguments of the base model's forward, as the adapter reads them.
        outputs: Output of the encoder for each modality.
        prompt: The prompt, read when images are encoded or passed as features.
        notes: Notes for the statistics.
        restore_output: See `Part.before_call`.
        cached: The decoder's cache.
        state: Tokens at the current layer. Each cut replaces it.
        merged: Step and selection of a vision tower, applied at the decoder's entry, or None.
        has_images: Whether the call has visual tokens. Only then `trace` is set.
        plan: The cuts to make, or None before they are planned.
        trace: The cuts made.
        groups: Inputs of the layers, one entry for each group of layers with the same tokens. Empty unless `active`.
        maskless: Layers that need no attention mask.
        busy: Layers that the engine always enters.
    """

    arguments: dict[str, Any]
    outputs: dict[str, Any] = field(default_factory=dict)
    prompt: PromptInfo = _NO_PROMPT
    notes: list[str] = field(default_factory=list)
    restore_output: RestoreOutput | None = None

    cached: CacheView = field(init=False)
    state: TokenState = _NO_TOKENS
    merged: tuple[Step, Selection] | None = None
    has_images: bool = False
    plan: Plan | None = None
    trace: Trace = field(init=False, repr=False)

    groups: list[LayerInputs] = field(default_factory=list)
    maskless: frozenset[int] = frozenset()
    busy: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.cached = build_view(self.arguments.get(compat.CACHE, self.arguments.get(compat.EARLIER_CACHE)))

    @property
    def active(self) -> bool:
        """True if tokens are missing: in the cache, or by cuts of this call."""
        return self.state.layout is not _NO_LAYOUT

    @property
    def past(self) -> int:
        """The logical length of the cache before the call."""
        return self.cached.past

    # -- the prompt

    def padding(self, length: int) -> Tensor | None:
        """Return the padding mask of the call's tokens, shape (batch, length), bool, or None without a mask."""
        return self.cached.padding(self.arguments.get("attention_mask"), length)

    # -- the cache

    def take_cache(self, cache: Any) -> None:
        """Set the decoder's cache, which may differ from the base model's."""
        if cache is not self.cached.cache:
            self.cached = build_view(cache)

    def save_to_cache(self) -> None:
        """Store the positions of the cached tokens on the cache."""
        cached = self.cached
        if self.active and (
            cached.reduction is not None or cached.decode is not None or not self.state.layout.is_uncut
        ):
            slots = [(group.first, group.columns) for group in self.groups]
            cached.save(cached.past + self.state.layout.length, slots, self.groups[-1].ragged)

    # -- which tokens a layer holds

    @property
    def cuts(self) -> frozenset[int]:
        """Layers with a cut at their input."""
        return frozenset() if self.plan is None else self.plan.cuts

    def cuts_at(self, layer: int) -> bool:
        """Return True if a method selects tokens at the input of `layer` (0: at the decoder's entry)."""
        return self.plan is not None and layer in self.plan.cuts and len(self.state.segments) > 0

    @cached_property
    def starts(self) -> frozenset[int]:
        """Layers that start a group of cached tokens."""
        reduction = self.cached.reduction
        return frozenset() if reduction is None else frozenset([first for first, _ in reduction.slots])

    def touches(self, layer: int, kwargs: dict[str, Any]) -> bool:
        """Return False if `layer` runs with `kwargs` unchanged and no part reads them."""
        if not self.groups:
            return False
        return layer in self.busy or not self.groups[-1].passes[kwargs.get("attention_mask") is not None]

    def group(self, layer: int, functions: MaskFunctions | None = None) -> LayerInputs:
        """Return the inputs of the layers from `layer` on, for the tokens of the current layout.

        Args:
            layer: Index of the first layer.
            functions: Functions that build the decoder's masks. Later groups use the first group's functions.
        """
        start, cached = self.groups[0] if self.groups else None, self.cached
        functions = functions if start is None else start.functions
        device = self.state.layout.index.device if start is None else start.columns.device
        columns = find_key_positions(layer, self.state.layout, cached.past, cached.reduction, device, cached.capacity)
        ragged = bool(self.groups) and self.groups[-1].ragged
        about = (cached.past, cached.reduction, start, cached.capacity, functions)
        return LayerInputs(layer, self.state.layout, columns, ragged, *about)


# -- the stack of active calls

# Frames between the call of a module and a hook of a patch: this library, and torch.compile.
_BETWEEN = (str(Path(__file__).parents[3]), str(Path(torch.__file__).parent / "_dynamo"))
_MODULE_CALL = torch.nn.Module.__call__.__code__.co_filename


@dataclass(eq=False)
class _Entry:
    """A call on the stack of a thread.

    Attributes:
        call: The call.
        frame: Frame of the base module's call, which runs while `call` is active.
        stack: All entries of the thread for the same engine, the innermost last.
        thread: Reference that is dead after the thread has ended.
    """

    call: Call
    frame: FrameType
    stack: list[_Entry]
    thread: weakref.ref[_Marker]


class _Marker:
    """Object that lives as long as its thread. `_Entry.thread` is a weak reference to it."""


class _ThreadCalls(threading.local):
    def __init__(self) -> None:
        self.stacks: dict[CallStack, list[_Entry]] = {}
        self.marker = _Marker()


_thread = _ThreadCalls()


class CallStack:
    """The active calls of one engine, in one stack per thread.

    A forward may end without its last hook: after a KeyboardInterrupt, an error during export, or with its thread.
    torch skips `always_call` hooks after a BaseException and while compiling or exporting. Every hook therefore calls
    `running`, which drops calls whose frame has left the stack. A copy of the model starts with an empty stack.

    Attributes:
        active: The calls of all threads. Compiled code only reads whether the list is empty.
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
        memberships: list[tuple[list[Any], Any]] = [
            (entry.stack, entry),
            (self.active, entry),
            (self.at_layers, entry.call),
        ]
        for entries, item in memberships:
            with suppress(ValueError):
                entries.remove(item)


def find_module_frame() -> FrameType:
    """Return the frame of the module call whose hook is running."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    # `Module.__call__` consists of several functions. An error unwinds the inner ones before the last hooks run.
    while (caller := frame.f_back) is not None and caller.f_code.co_filename == _MODULE_CALL:
        frame = caller
    return frame


def is_running(frame: FrameType) -> bool:
    """Return True if `frame` is on the stack of this thread."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
