# SPDX-License-Identifier: Apache-2.0
"""Tell which layers of a decoder are nothing but their own weights, and whether that changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

# Where modules may come from: those of others (adapters, quantizers) change what they do by values of their own.
_PACKAGES = {"torch", "transformers", "transformers_modules"}
# Hooks of transformers do nothing unless what they record is asked for, and ours on a layer run in any case.
_INSIDE, _ON_LAYERS = {"transformers"}, {"transformers", "tokenprune"}


class KnownModules:
    """The weights, modules and hooks of a decoder, as they were when this was made.

    alone: layers in which something acts that a graph would pass by. What is written into a weight is no change: a
    graph reads it where it lies.
    """

    def __init__(self, decoder: Any) -> None:
        own = type(decoder).__module__.partition(".")[0]
        self.alone = frozenset(
            index for index, layer in enumerate(decoder.layers) if _holds_more(layer, _PACKAGES | {own})
        )
        modules = list(decoder.layers.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._values = [held for one in modules for held in (one._parameters, one._buffers) if held]
        self._hooks = [hooks for one in modules for hooks in (one._forward_pre_hooks, one._forward_hooks)]
        self._attributes = [vars(one) for one in modules]
        self._held = [one for one in self._chained(self._values) if one is not None]  # so that no address is given anew
        self._seen = self._look()

    def unchanged(self) -> bool:
        """Return whether nothing was replaced, moved or hooked since."""
        return self._look() == self._seen

    @staticmethod
    def _chained(held: list[dict[str, Any]]) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, held))

    def _look(self) -> tuple[Any, ...]:
        """Return what would change. Each prefill waits for it, so that no loop here is Python's."""
        objects = list(map(id, chain(self._chained(self._children), self._chained(self._values))))
        addresses = list(map(Tensor.data_ptr, self._held))
        return objects, addresses, sum(map(len, self._hooks)), sum(map(len, self._attributes))


def _holds_more(layer: nn.Module, packages: set[str]) -> bool:
    """Return whether a layer has modules of other packages, hooks inside, hooks of others, or methods put in place."""
    if "_hf_hook" in vars(layer):
        return True
    return any(
        type(module).__module__.partition(".")[0] not in packages
        or any(_origin(hook) not in (_ON_LAYERS if module is layer else _INSIDE) for hook in _hooks(module))
        or (module is not layer and "forward" in vars(module))
        or "_tokenprune_taps" in vars(module)
        for module in layer.modules()
    )


def _hooks(module: nn.Module) -> Iterator[Any]:
    return chain(module._forward_pre_hooks.values(), module._forward_hooks.values())


def _origin(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]
