# SPDX-License-Identifier: Apache-2.0
"""Hash everything that an encoder output depends on: arguments, weights and settings."""

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
# Attributes of every module.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class UnknownContentError(TypeError):
    """A value that cannot be hashed by its content."""


def digest(*values: Any) -> bytes:
    """Hash values by their content with SHA-256, because requests contain untrusted images.

    Args:
        *values: Tensors (bytes, dtype, shape and device are hashed), plain values, and nested lists, tuples and
            dicts. Device tensors are copied to the host.

    Raises:
        UnknownContentError: If a value has another type.
    """
    state = hashlib.sha256()
    for value in values:
        _update(state, value)
    return state.digest()


def _update(state: Any, value: Any) -> None:
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
        for element in value:
            _update(state, element)
    elif isinstance(value, dict):
        state.update(f"dict {len(value)};".encode())
        for name in sorted(value, key=str):
            _update(state, (name, value[name]))
    else:
        raise UnknownContentError(f"a {type(value).__name__}")


class Weights:
    """Identity of the weights of some modules, without reading their values.

    Two instances are equal if no weight was replaced, moved, cast, or written to with autograd's knowledge
    (`load_state_dict`, `copy_`, an optimizer step). Writes to `parameter.data` are not detected, and neither are writes
    to weights that accelerate offloads, because it replaces them by empty tensors between calls.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tensors = [tensor for tensor in _collect_weights(modules) if not tensor.is_meta]
        # Weak references prevent that a later weight gets the address of an earlier one.
        self._refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._identity = [
            (ref.cdata, _get_version(tensor), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.shape)
            for ref, tensor in zip(self._refs, tensors, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights) and self._identity == other._identity


def _collect_weights(modules: Iterable[nn.Module]) -> list[Tensor]:
    weights = (chain(module._parameters.values(), module._buffers.values()) for module in modules)
    return [tensor for tensor in chain.from_iterable(weights) if tensor is not None]


def _get_version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def is_training(modules: Sequence[nn.Module]) -> bool:
    """Return whether `modules` are in training mode, or their weights need gradients."""
    return any(module.training for module in modules) or needs_gradients(_collect_weights(modules))


def needs_gradients(values: Iterable[Any]) -> bool:
    """Return whether autograd is enabled and a tensor in `values` requires gradients."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def describe_settings(modules: Iterable[nn.Module], *configs: Any) -> str:
    """Return all settings that affect an encoder's output, as a string.

    They are the plain attributes of `modules` and their configs (attention implementation, LoRA adapters, ...),
    third-party hooks, replaced forwards, and the precision settings of torch.
    """
    state: list[Any] = [torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()]
    state += [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    all_configs = {id(config): config for config in configs}
    for index, module in enumerate(modules):
        values = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
        if isinstance(module, PreTrainedModel):  # its private attributes change during loading and the first call
            values = {name: value for name, value in values.items() if not name.startswith("_")}
        hooks = [key for hooks in (module._forward_pre_hooks, module._forward_hooks) for key in _find_foreign(hooks)]
        state.append((index, _select_plain(values), hooks, id(values["forward"]) if "forward" in values else None))
        config = values.get("config")
        if config is not None and hasattr(config, "__dict__"):
            all_configs[id(config)] = config
    return repr([*state, *(_select_plain(vars(config)) for config in all_configs.values())])


def _select_plain(values: dict[str, Any]) -> dict[str, Any]:
    # None is treated as missing, because a module may create an attribute during its first call.
    return {name: value for name, value in values.items() if value is not None and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, (str, int)) and _is_plain(element) for name, element in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in _SIMPLE


def _find_foreign(hooks: dict[int, Any]) -> list[int]:
    # transformers adds hooks to a tower during the first call, which only record outputs.
    return [key for key, hook in hooks.items() if not getattr(hook, "__module__", "").startswith("transformers.")]
