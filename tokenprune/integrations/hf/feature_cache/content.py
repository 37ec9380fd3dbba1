# SPDX-License-Identifier: Apache-2.0
"""Digest what the output of a vision encoder depends on: the content of its arguments, its weights and its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

_SIMPLE = (bool, int, float, str, bytes, torch.dtype, torch.device)
# What every module has, whatever it does.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class UnknownContentError(TypeError):
    """Something that cannot be hashed by its content."""


def digest(*values: Any) -> bytes:
    """Return a hash of `values` by their content: tensors (bytes, dtype, shape, device), plain values, and lists,
    tuples and dicts of these. Tensors of a device are brought to the host.

    It resists those who look for two images of one hash: what comes from a request is in it. Raises
    UnknownContentError for anything else.
    """
    state = hashlib.sha256()
    for value in values:
        _add(state, value)
    return state.digest()


def _add(state: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise UnknownContentError(f"a tensor of layout {value.layout} on {value.device}")
        state.update(f"tensor {value.dtype} {tuple(value.shape)} {value.device};".encode())
        state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif value is None or type(value) in _SIMPLE:
        text = f"{type(value).__name__} {value!r}".encode()
        state.update(b"%d:%s;" % (len(text), text))
    elif isinstance(value, (list, tuple)):
        state.update(f"list {len(value)};".encode())
        for one in value:
            _add(state, one)
    elif isinstance(value, dict):
        state.update(f"dict {len(value)};".encode())
        for name in sorted(value, key=str):
            _add(state, (name, value[name]))
    else:
        raise UnknownContentError(f"a {type(value).__name__}")


class Weights:
    """The weights of some modules, as far as is seen without reading them: equal to others as long as none was
    replaced, moved, cast, or written to under the eyes of autograd (`load_state_dict`, `copy_`, an optimizer's step).

    Held on to by weak references, so that no later weight gets an earlier one's address. What is written to
    `parameter.data` is not seen, nor to weights that accelerate offloads: between calls it has empty ones in their
    place, other ones after each.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tensors = [one for one in _tensors(modules) if not one.is_meta]
        self._refs = [StorageWeakRef(one.untyped_storage()) for one in tensors]
        self._seen = [
            (ref.cdata, _version(one), one.storage_offset(), one.dtype, one.device, one.shape)
            for ref, one in zip(self._refs, tensors, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights) and self._seen == other._seen


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    held = (chain(module._parameters.values(), module._buffers.values()) for module in modules)
    return [one for one in chain.from_iterable(held) if one is not None]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def learns(modules: Sequence[nn.Module]) -> bool:
    """Return whether what `modules` compute now differs from call to call, or gradients go through it to them."""
    return any(module.training for module in modules) or asks_for_gradients(_tensors(modules))


def asks_for_gradients(values: Iterable[Any]) -> bool:
    """Return whether gradients of one of `values`, those that are tensors, are to be computed."""
    return torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in values)


def settings(modules: Iterable[nn.Module], *configs: Any) -> str:
    """Write out the plain values that `modules` and their configs hold (attention implementation, layers read, LoRA
    adapters in use), which of them have hooks or a forward of others, and what torch is set to."""
    found: list[Any] = [torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()]
    found += [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    known = {id(config): config for config in configs}
    for number, module in enumerate(modules):
        values = {name: value for name, value in vars(module).items() if name not in _OF_ANY_MODULE}
        if isinstance(module, PreTrainedModel):  # notes how it was loaded, and what it did in its first call
            values = {name: value for name, value in values.items() if not name.startswith("_")}
        hooks = [key for held in (module._forward_pre_hooks, module._forward_hooks) for key in _of_others(held)]
        found.append((number, _plain_of(values), hooks, id(values["forward"]) if "forward" in values else None))
        config = values.get("config")
        if config is not None and hasattr(config, "__dict__"):
            known[id(config)] = config
    return repr([*found, *(_plain_of(vars(config)) for config in known.values())])


def _plain_of(values: dict[str, Any]) -> dict[str, Any]:
    # None and no value are one: a module may write down what it found in its first call.
    return {name: value for name, value in values.items() if value is not None and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, (str, int)) and _is_plain(one) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in _SIMPLE


def _of_others(hooks: dict[int, Any]) -> list[int]:
    # transformers hangs hooks of its own on a tower in its first call; they only note what passes.
    return [key for key, hook in hooks.items() if not getattr(hook, "__module__", "").startswith("transformers.")]
