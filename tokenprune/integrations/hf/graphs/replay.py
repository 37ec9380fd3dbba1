# SPDX-License-Identifier: Apache-2.0
"""Run a group of decoder layers on a fixed number of tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.graphs.capture import Captured, GraphPool, capture

States = dict[int, tuple[Tensor, Tensor]]
Layers = Mapping[int, Callable[..., Any]]


class _Recorder(DynamicCache):
    """Cache that returns its inputs unchanged and records the keys and values of each layer in `states`."""

    def __init__(self) -> None:
        super().__init__()
        self.states: States = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.states[layer] = (keys, values)
        return keys, values


@dataclass(frozen=True)
class LayerCall:
    """Arguments of a layer that all layers of a group share.

    Attributes:
        hidden: Hidden states, shape (batch, length, width).
        tensors: Arguments with an entry per token: a tensor or a tuple of tensors, and its token dimension, by name.
        mask: Attention mask, shape (batch, heads, length, keys), bool or additive.
        plain: The other arguments, by name.
        caches: Whether keys and values are cached.
    """

    hidden: Tensor
    tensors: Mapping[str, tuple[Any, int]]
    mask: Tensor | None
    plain: Mapping[str, Any]
    caches: bool

    @property
    def key(self) -> Hashable:
        """Everything that a graph depends on, except the number of tokens and keys."""
        shapes = tuple(
            (name, *((_remove_dim(tensor.shape, dim), tensor.dtype, tensor.device) for tensor in _as_tuple(value)))
            for name, (value, dim) in self.tensors.items()
        )
        shape = (self.hidden.shape[0], self.hidden.shape[2], self.hidden.dtype, self.hidden.device)
        mask = None if self.mask is None else (self.mask.shape[:2], self.mask.dtype)
        return shape, shapes, mask, tuple(self.plain.items()), self.caches

    def get_tensors(self) -> list[Tensor]:
        """Return the hidden states and all tensors of `tensors`."""
        return [self.hidden, *chain.from_iterable(_as_tuple(value) for value, _ in self.tensors.values())]


class StaticInputs:
    """Static tensors for the inputs of a call, except the mask.

    Args:
        call: A call, whose values are copied.
        length: Number of tokens of the static tensors.

    Attributes:
        hidden: Static hidden states, shape (batch, length, width).
        arguments: Arguments of a layer, without hidden states, mask and cache.
    """

    def __init__(self, call: LayerCall, length: int) -> None:
        self.hidden = _pad(call.hidden, 1, length)
        tensors = {name: (_pad_all(value, dim, length), dim) for name, (value, dim) in call.tensors.items()}
        self.arguments = dict(call.plain) | {name: value for name, (value, _) in tensors.items()}
        others = [(tensor, dim) for value, dim in tensors.values() for tensor in _as_tuple(value)]
        self._tensors = [(self.hidden, 1), *others]
        self.bytes = sum(tensor.nbytes for tensor, _ in self._tensors)

    def copy_(self, call: LayerCall) -> None:
        """Copy the tensors of a call with at most as many tokens."""
        length = call.hidden.shape[1]
        for (static, dim), tensor in zip(self._tensors, call.get_tensors(), strict=True):
            static.narrow(dim, 0, length).copy_(tensor)
        # The padding may hold NaN from an earlier prompt, which a mask does not remove.
        self.hidden[:, length:].zero_()

    def run_layers(self, layers: Layers, cache: Any, mask: Tensor | None) -> Tensor:
        """Run `layers`, and return the hidden states of the last layer."""
        arguments = self.arguments | {compat.CACHE: cache} | ({} if mask is None else {"attention_mask": mask})
        states = self.hidden
        for forward in layers.values():
            output = forward(states, **arguments)
            states = output[0] if isinstance(output, tuple) else output
        return states


@dataclass(eq=False)
class Bucket:
    """Static inputs and outputs of a group of layers for one padded length.

    Attributes:
        inputs: Static inputs.
        mask: Static mask, shape (batch, heads, bucket, bucket), and its values for padding.
        captured: The layers. The outputs are the hidden states, shape (batch, bucket, width), and the keys and values
            of all layers, flattened and concatenated.
        shapes: Shapes of keys and values, (batch, heads, bucket, head width), by layer.
    """

    inputs: StaticInputs
    mask: tuple[Tensor, Tensor] | None
    captured: Captured
    shapes: dict[int, tuple[torch.Size, torch.Size]]

    @classmethod
    def capture(cls, layers: Layers, call: LayerCall, length: int, pool: GraphPool | None) -> Bucket:
        """Capture `layers` for `length` tokens. Inference mode must be off."""
        inputs = StaticInputs(call, length)
        mask = None if call.mask is None else _pad_mask(call.mask, length)
        shapes: dict[int, tuple[torch.Size, torch.Size]] = {}

        def run() -> tuple[Tensor, Tensor]:
            recorder = _Recorder()
            states = inputs.run_layers(layers, recorder if call.caches else None, None if mask is None else mask[0])
            flat = [tensor.flatten() for pair in recorder.states.values() for tensor in pair]
            shapes.update({layer: (keys.shape, values.shape) for layer, (keys, values) in recorder.states.items()})
            return states, torch.cat(flat) if flat else states.new_empty(0)

        return cls(inputs, mask, capture(run, pool), shapes)

    @property
    def bytes(self) -> int:
        return self.inputs.bytes + self.captured.bytes

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layers on a call with at most `bucket` tokens.

        Returns:
            Hidden states, shape (batch, length, width), and the keys and values of each layer. They are copies: the
            next run does not change them.
        """
        length = call.hidden.shape[1]
        self.inputs.copy_(call)
        if self.mask is not None and call.mask is not None:
            self.mask[0].copy_(self.mask[1])[..., :length, :length] = call.mask
        self.captured.replay()
        static, flat = self.captured.outputs
        hidden, flat = static[:, :length].clone(), flat.clone()
        parts = iter(flat.split([shape.numel() for pair in self.shapes.values() for shape in pair]))
        states = {
            layer: (next(parts).view(keys)[..., :length, :], next(parts).view(values)[..., :length, :])
            for layer, (keys, values) in self.shapes.items()
        }
        return hidden, states


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _remove_dim(shape: torch.Size, dim: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)


def _pad(value: Tensor, dim: int, length: int) -> Tensor:
    sizes = list(value.shape)
    sizes[dim] = length
    padded = value.new_zeros(sizes)
    padded.narrow(dim, 0, value.shape[dim]).copy_(value)
    return padded


def _pad_all(value: Any, dim: int, length: int) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_pad(tensor, dim, length) for tensor in value)
    return _pad(value, dim, length)


def get_hidden_value(mask: Tensor) -> bool | float:
    """Return the value of hidden keys in a mask, bool or additive."""
    return False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min


def _pad_mask(mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return a mask padded to `length`, and the mask of padding only. Padding attends to itself to avoid NaN."""
    hidden, visible = get_hidden_value(mask), mask.dtype == torch.bool
    empty = mask.new_full((length, length), hidden).fill_diagonal_(visible)
    padded = empty.expand(*mask.shape[:2], -1, -1).clone()
    padded[..., : mask.shape[-2], : mask.shape[-1]] = mask
    return padded, empty
