# SPDX-License-Identifier: Apache-2.0
"""The base of all parts of a patch: they put hooks on a model, and take all of them away again."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import nn


class Attachable:
    """Base of the parts of a patch. A subclass installs everything in `_attach`, and only by the methods below. Entered
    as a context, a part is attached within."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self.hooked: list[Any] = []  # modules, while attached

    def attach(self) -> None:
        """Install all hooks; on any error those already installed are removed again."""
        try:
            self._attach()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Remove everything that `attach` installed, in reverse; nothing where that was done already."""
        self.hooked.clear()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _attach(self) -> None:
        raise NotImplementedError

    def on_detach(self, undo: Callable[[], object]) -> None:
        """Have `undo` called by `detach`."""
        self._undo.append(undo)

    def hook(self, register: Callable[..., Any], function: Callable, *, eager: bool = True, **options: Any) -> None:
        """Register `function` as a hook by `register(function, **options)`, until `detach`.

        eager: whether it runs outside of the graphs of torch.compile.
        """
        if eager:
            from tokenprune.integrations.shared.eager import run_eagerly  # torch, without which a patch can be planned

            function = partial(run_eagerly, function)
        self._undo.append(register(function, **options).remove)
        self.hooked.append(getattr(register, "__self__", None))

    def attach_part(self, part: Any) -> None:
        """Attach something that has `attach` and `detach` itself."""
        part.attach()
        self._undo.append(part.detach)
        self.hooked += getattr(part, "hooked", ())

    def wrap(self, module: nn.Module, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(method)` in place of the method `name` of the instance `module`. Several parts may wrap the same
        method, and go in any order: the others then stand on what is left."""
        # What torch.compile returns hands assignments on to the module in it, and holds nothing itself.
        module = getattr(module, "_orig_mod", module)
        # Partials, not closures, here and as `make`: a deep copy of the model gets its own.
        wrapped = module.__dict__.setdefault(_WRAPPED, {})
        if name not in wrapped:
            wrapped[name] = _Wrapped(module, name)
        self._undo.append(partial(wrapped[name].remove, make))
        wrapped[name].add(make)

    def swap_class(self, instance: Any, cls: type) -> None:
        """Make `instance` one of `cls`, a subclass of its own; it gets back the class that it has now."""
        self._undo.append(swap_class(instance, cls))


# Where a module keeps what is wrapped of it.
_WRAPPED = "_tokenprune_wrapped"


@dataclass(eq=False)
class _Wrapper:
    """A wrapper that one part put around a method. found: the value before it; own: True if that was the instance's
    own."""

    make: Callable[[Any], Any]
    found: Any
    own: bool
    value: Any


class _Wrapped:
    """One wrapped method of a module, and its wrappers, each over the one before it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.wrappers: list[_Wrapper] = []

    def add(self, make: Callable[[Any], Any]) -> None:
        found = getattr(self.module, self.name)
        value = make(found)
        self.wrappers.append(_Wrapper(make, found, self.name in self.module.__dict__, value))
        setattr(self.module, self.name, value)

    def remove(self, make: Callable[[Any], Any]) -> None:
        at = next(index for index, one in enumerate(self.wrappers) if one.make == make)
        gone = self.wrappers.pop(at)
        self._join(self.wrappers[at:], gone)
        if not self.wrappers:
            wrapped = self.module.__dict__[_WRAPPED]
            del wrapped[self.name]
            if not wrapped:
                delattr(self.module, _WRAPPED)

    def _join(self, above: list[_Wrapper], gone: _Wrapper) -> None:
        """Let the wrappers above one that goes stand on what was below it."""
        was, now, own = gone.value, gone.found, gone.own
        for one in above:
            if one.found is not was:
                return  # on a wrapper of somebody else, which holds on to what it stands on
            one.found, one.own = now, own
            was, one.value = one.value, one.make(now)
            now, own = one.value, True
        if self.name not in self.module.__dict__:
            return  # somebody took away what he had once put there himself, and ours with it
        if own:
            setattr(self.module, self.name, now)
        else:
            delattr(self.module, self.name)


def refuse_replica(module: nn.Module, original: nn.Module) -> None:
    """Raise UnsupportedSetupError if `module` shares the hooks of `original`, but has other submodules.

    The parts of a patch hold modules of the original, and would run its weights in place of the replica's.
    """
    if module._modules is not original._modules:
        from tokenprune.errors import UnsupportedSetupError

        raise UnsupportedSetupError(
            f"This {type(module).__name__} is a replica of the patched model, as nn.DataParallel makes it for each "
            "GPU. Use DistributedDataParallel (torchrun), or let the process see one GPU."
        )


def remove_wrappers(model: nn.Module) -> None:
    """Take away all that is wrapped of the modules of `model`, a copy: it has what its original has, but no part that
    would detach it."""
    for module in model.modules():
        for wrapped in list(module.__dict__.get(_WRAPPED, {}).values()):
            for one in list(wrapped.wrappers):
                wrapped.remove(one.make)


def swap_class(instance: Any, cls: type) -> Callable[[], None]:
    """Make `instance` one of `cls`, a subclass of its own, and return what gives back the class that it has now."""
    undo = partial(restore_class, instance, type(instance), cls)
    instance.__class__ = cls
    return undo


def restore_class(instance: Any, found: type, put: type) -> None:
    """Make `instance`, which was made one of `put`, one of the class `found` again."""
    # If another library replaced the class after us, leave it alone.
    if isinstance(instance, put):
        instance.__class__ = found


def get_hidden_states(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a block or layer of transformers, its hidden states."""
    return args[0] if args else kwargs["hidden_states"]


def replace_hidden_states(hidden: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of such a call with `hidden` in the place of its hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def change_output(change: Callable[[Any], Any], output: Any) -> Any:
    """Return the output of a block, a layer or a decoder with `change` applied to its hidden states."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    if hasattr(output, "last_hidden_state"):
        output.last_hidden_state = change(output.last_hidden_state)
        return output
    return change(output)


def get_thread_states() -> MutableMapping[Any, Any]:
    """Return the state of each part in this thread's forward; threads share the parts.

    A state ends with its part, since another part may later get the same id.
    """
    return _thread.__dict__.setdefault("states", WeakKeyDictionary())


_thread = threading.local()
