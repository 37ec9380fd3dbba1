# SPDX-License-Identifier: Apache-2.0
"""Base class of the parts of a patch. A part installs hooks on a model and removes all hooks on `detach`."""

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
    """Base class of the parts of a patch.

    A subclass installs its hooks in `_attach`, using only the methods of this class. As a context manager, a part is
    attached within the context.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self.hooked: list[Any] = []  # modules, while attached

    def attach(self) -> None:
        """Install all hooks. On an error, remove the hooks that were already installed."""
        try:
            self._attach()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Undo everything that `attach` installed, in reverse order. Do nothing if the part is not attached."""
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
        """Register a function that `detach` calls."""
        self._undo.append(undo)

    def hook(self, register: Callable[..., Any], function: Callable, *, eager: bool = True, **options: Any) -> None:
        """Register a hook until `detach`.

        Args:
            register: Method that registers the hook, such as `module.register_forward_hook`.
            function: The hook.
            eager: Whether the hook runs outside the graphs of torch.compile.
            **options: Keyword arguments of `register`.
        """
        if eager:
            # Imported here because the module imports torch, which planning a patch does not need.
            from tokenprune.integrations.shared.eager import run_eagerly

            function = partial(run_eagerly, function)
        self._undo.append(register(function, **options).remove)
        self.hooked.append(getattr(register, "__self__", None))

    def attach_part(self, part: Any) -> None:
        """Attach an object that has its own `attach` and `detach`."""
        part.attach()
        self._undo.append(part.detach)
        self.hooked += getattr(part, "hooked", ())

    def wrap(self, module: nn.Module, name: str, make: Callable[[Any], Any]) -> None:
        """Replace the method `name` of the instance `module` by `make(method)`.

        Several parts may wrap the same method and may detach in any order. The remaining wrappers are then rebuilt on
        the method below them.
        """
        # torch.compile returns a proxy that forwards assignments to its module.
        module = getattr(module, "_orig_mod", module)
        # Use partials instead of closures, here and for `make`, so that `deepcopy(model)` copies their arguments.
        wrapped = module.__dict__.setdefault(_WRAPPED, {})
        if name not in wrapped:
            wrapped[name] = _Wrapped(module, name)
        self._undo.append(partial(wrapped[name].remove, make))
        wrapped[name].add(make)

    def swap_class(self, instance: Any, cls: type) -> None:
        """Change the class of `instance` to `cls`, a subclass of its class, until `detach`."""
        self._undo.append(swap_class(instance, cls))


# Attribute of a module that holds its wrapped methods.
_WRAPPED = "_tokenprune_wrapped"


@dataclass(eq=False)
class _Wrapper:
    """A wrapper that one part put around a method.

    Attributes:
        make: Function that builds the wrapper from the method below it.
        below: The method that was wrapped.
        is_own: Whether `below` was an attribute of the instance, not of its class.
        value: The wrapper.
    """

    make: Callable[[Any], Any]
    below: Any
    is_own: bool
    value: Any


class _Wrapped:
    """A wrapped method of a module and its wrappers, from the innermost to the outermost."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.wrappers: list[_Wrapper] = []

    def add(self, make: Callable[[Any], Any]) -> None:
        below = getattr(self.module, self.name)
        value = make(below)
        self.wrappers.append(_Wrapper(make, below, self.name in self.module.__dict__, value))
        setattr(self.module, self.name, value)

    def remove(self, make: Callable[[Any], Any]) -> None:
        position = next(index for index, wrapper in enumerate(self.wrappers) if wrapper.make == make)
        removed = self.wrappers.pop(position)
        self._rebuild(self.wrappers[position:], removed)
        if not self.wrappers:
            wrapped = self.module.__dict__[_WRAPPED]
            del wrapped[self.name]
            if not wrapped:
                delattr(self.module, _WRAPPED)

    def _rebuild(self, above: list[_Wrapper], removed: _Wrapper) -> None:
        """Rebuild the wrappers above a removed wrapper on the method below it."""
        old, new, is_own = removed.value, removed.below, removed.is_own
        for wrapper in above:
            if wrapper.below is not old:
                return  # it wraps a wrapper of another library, which cannot be rebuilt
            wrapper.below, wrapper.is_own = new, is_own
            old, wrapper.value = wrapper.value, wrapper.make(new)
            new, is_own = wrapper.value, True
        if self.name not in self.module.__dict__:
            return  # another library restored the method that it had replaced, and removed our wrappers with it
        if is_own:
            setattr(self.module, self.name, new)
        else:
            delattr(self.module, self.name)


def refuse_replica(module: nn.Module, original: nn.Module) -> None:
    """Raise UnsupportedSetupError if `module` is a replica of `original`, as made by `nn.DataParallel`.

    A replica shares the hooks of the original but has other submodules. The parts of a patch hold modules of the
    original, so they would run the original's weights.
    """
    if module._modules is not original._modules:
        from tokenprune.errors import UnsupportedSetupError

        raise UnsupportedSetupError(
            f"This {type(module).__name__} is a replica that nn.DataParallel made of the patched model. Use "
            "DistributedDataParallel (torchrun), or make one GPU visible to the process."
        )


def remove_wrappers(model: nn.Module) -> None:
    """Remove all wrappers from the modules of `model`, a copy of a patched model.

    The copy has the wrappers of its original, but no part that would detach them.
    """
    for module in model.modules():
        for wrapped in list(module.__dict__.get(_WRAPPED, {}).values()):
            for wrapper in list(wrapped.wrappers):
                wrapped.remove(wrapper.make)


def swap_class(instance: Any, cls: type) -> Callable[[], None]:
    """Change the class of `instance` to `cls`, a subclass of its class, and return a function that undoes it."""
    undo = partial(restore_class, instance, type(instance), cls)
    instance.__class__ = cls
    return undo


def restore_class(instance: Any, original: type, swapped: type) -> None:
    """Change the class of `instance` from `swapped` back to `original`."""
    # Another library may have replaced the class since.
    if isinstance(instance, swapped):
        instance.__class__ = original


def get_hidden_states(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the hidden states from the arguments of a block or layer of transformers."""
    return args[0] if args else kwargs["hidden_states"]


def replace_hidden_states(hidden: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a block or layer with `hidden` as its hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def change_output(change: Callable[[Any], Any], output: Any) -> Any:
    """Apply `change` to the hidden states in the output of a block, a layer or a decoder, and return the output."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    if hasattr(output, "last_hidden_state"):
        output.last_hidden_state = change(output.last_hidden_state)
        return output
    return change(output)


def get_thread_states() -> MutableMapping[Any, Any]:
    """Return the dictionary from each part to its state in this thread's forward.

    Parts are shared by threads, so they keep the state of a forward here. Keys are weak references.
    """
    return _thread.__dict__.setdefault("states", WeakKeyDictionary())


_thread = threading.local()
