# SPDX-License-Identifier: Apache-2.0
"""Detect decoder layers that CUDA graphs can replay, and changes that invalidate the graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

# Modules of other packages (adapters, quantizers) may depend on Python values that a graph does not replay.
_PACKAGES = {"torch", "transformers", "transformers_modules"}
# Hooks of transformers only record requested outputs. Hooks of tokenprune on a layer run outside of the graph.
_INSIDE, _ON_LAYERS = {"transformers"}, {"transformers", "tokenprune"}


class KnownModules:
    """Snapshot of the weights, modules and hooks of a decoder.

    Values written into a weight are not a change, because a graph reads weights by address.

    Attributes:
        eager_layers: Indices of layers with modules, hooks or methods that a graph would skip.
    """

    def __init__(self, decoder: Any) -> None:
        package = type(decoder).__module__.partition(".")[0]
        self.eager_layers = frozenset(
            index for index, layer in enumerate(decoder.layers) if _is_customized(layer, _PACKAGES | {package})
        )
        modules = list(decoder.layers.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._values = [values for module in modules for values in (module._parameters, module._buffers) if values]
        self._hooks = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self._attributes = [vars(module) for module in modules]
        # References keep the tensors alive, so that their addresses are not reused.
        self._tensors = [tensor for tensor in self._iter_values(self._values) if tensor is not None]
        self._snapshot = self._take_snapshot()

    def unchanged(self) -> bool:
        """Return whether no module, weight or hook was replaced, moved or added since the snapshot."""
        return self._take_snapshot() == self._snapshot

    @staticmethod
    def _iter_values(dicts: list[dict[str, Any]]) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, dicts))

    def _take_snapshot(self) -> tuple[Any, ...]:
        # Each prefill waits for this function, so it uses no Python loops.
        objects = list(map(id, chain(self._iter_values(self._children), self._iter_values(self._values))))
        addresses = list(map(Tensor.data_ptr, self._tensors))
        return objects, addresses, sum(map(len, self._hooks)), sum(map(len, self._attributes))


def _is_customized(layer: nn.Module, packages: set[str]) -> bool:
    """Return whether a layer has modules of other packages, foreign hooks, or replaced methods."""
    if "_hf_hook" in vars(layer):
        return True
    return any(
        type(module).__module__.partition(".")[0] not in packages
        or any(_get_package(hook) not in (_ON_LAYERS if module is layer else _INSIDE) for hook in _get_hooks(module))
        or (module is not layer and "forward" in vars(module))
        or "_tokenprune_taps" in vars(module)
        for module in layer.modules()
    )


def _get_hooks(module: nn.Module) -> Iterator[Any]:
    return chain(module._forward_pre_hooks.values(), module._forward_hooks.values())


def _get_package(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]
