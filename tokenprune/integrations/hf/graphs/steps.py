# SPDX-License-Identifier: Apache-2.0
"""Run a group of decoder layers on one new token per row, with keys and values in preallocated buffers.

A graph reads and writes fixed addresses, so the cache layers of the group must be views of its buffers. A layer that is
not such a view is copied into the buffers first. The caller keeps an ordinary cache: its tensors are views, and a step
writes only a slot that is not part of any view. Cropping, reordering or replacing the tensors of a layer therefore does
not change the buffers, and the next step copies the layer again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tokenprune.integrations.hf.graphs.capture import Captured, GraphPool, NotGraphedError, capture
from tokenprune.integrations.hf.graphs.replay import LayerCall, Layers, StaticInputs, get_hidden_value

Buffers = dict[int, tuple[Tensor, Tensor]]


class _BufferCache(DynamicCache):
    """Cache that writes the new keys and values to a slot of the buffers, and returns all slots."""

    def __init__(self, buffers: Buffers, slot: Tensor) -> None:
        super().__init__()
        self.buffers, self.slot = buffers, slot

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for buffer, states in zip(self.buffers[layer], (keys, values), strict=True):
            buffer.index_copy_(2, self.slot, states)
        return self.buffers[layer]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        raise NotGraphedError("the layers read the length of the cache")

    get_mask_sizes = get_query_offset = get_seq_length


@dataclass(eq=False)
class StepBucket:
    """Static inputs, outputs and buffers of a group of layers for one number of slots.

    Attributes:
        inputs: Static inputs of one token per row.
        mask: Static mask, shape (batch or 1, heads or 1, 1, slots), bool or additive.
        slot: Slot of the new token, shape (1,), int64.
        buffers: Keys and values of each layer, shape (batch, heads, slots, head width).
        captured: The layers. The output is the hidden states, shape (batch, 1, width).
    """

    inputs: StaticInputs
    mask: Tensor
    slot: Tensor
    buffers: Buffers
    captured: Captured
    _unused: list[int]
    _views: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = field(default_factory=dict)

    @classmethod
    def capture(
        cls, layers: Layers, call: LayerCall, cached: Sequence[Any], capacity: int, pool: GraphPool | None
    ) -> StepBucket:
        """Capture `layers` for caches of up to `capacity` slots.

        Args:
            layers: Forwards of the layers, by layer index.
            call: Arguments of the layers. Its mask is never None.
            cached: Cache layers of `layers`. They are moved into the buffers.
            capacity: Number of slots.
            pool: Memory pool, or None on a CPU.
        """
        assert call.mask is not None
        buffers = {
            index: (_allocate(layer.keys, capacity), _allocate(layer.values, capacity))
            for index, layer in zip(layers, cached, strict=True)
        }
        unused = [_count_references(buffer) for pair in buffers.values() for buffer in pair]
        inputs, slot = StaticInputs(call, 1), torch.zeros(1, dtype=torch.long, device=call.hidden.device)
        mask = call.mask.new_zeros((*call.mask.shape[:3], capacity))
        cache = _BufferCache(buffers, slot)
        bucket = cls(inputs, mask, slot, buffers, Captured((), lambda: None, 0), unused)
        bucket.move(cached)
        bucket._write_inputs(call, cached[0].keys.shape[2])
        bucket.captured = capture(lambda: (inputs.run_layers(layers, cache, mask),), pool)
        return bucket

    @property
    def bytes(self) -> int:
        buffers = sum(keys.nbytes + values.nbytes for keys, values in self.buffers.values())
        return buffers + self.mask.nbytes + self.inputs.bytes + self.captured.bytes

    def holds(self, cached: Sequence[Any]) -> bool:
        """Return whether the layers of a cache are the current views of the buffers."""
        return len(self._views) == len(self.buffers) and all(
            keys() is layer.keys and values() is layer.values
            for (keys, values), layer in zip(self._views.values(), cached, strict=True)
        )

    def is_unused(self) -> bool:
        """Return whether no tensor outside of the bucket shares memory with the buffers."""
        buffers = [buffer for pair in self.buffers.values() for buffer in pair]
        return all(map(int.__eq__, map(_count_references, buffers), self._unused))

    def move(self, cached: Sequence[Any]) -> None:
        """Copy the keys and values of cache layers into the buffers, and make the layers views of the buffers."""
        slots = cached[0].keys.shape[2]
        for index, layer in zip(self.buffers, cached, strict=True):
            for buffer, tensor in zip(self.buffers[index], (layer.keys, layer.values), strict=True):
                buffer[:, :, :slots].copy_(tensor)
                buffer[:, :, slots:].zero_()  # a mask does not remove NaN of an earlier cache
            self.set_view(index, layer, slots)

    def run(self, call: LayerCall, slots: int) -> Tensor:
        """Run the layers on one new token per row, and write its keys and values to slot `slots`.

        The caller calls `set_view` for each layer afterwards.

        Returns:
            Hidden states, shape (batch, 1, width). The next run does not change them.
        """
        self._write_inputs(call, slots)
        self.captured.replay()
        return self.captured.outputs[0].clone()

    def set_view(self, index: int, layer: Any, slots: int) -> None:
        """Make the cache layer of decoder layer `index` a view of the first `slots` slots."""
        keys, values = self.buffers[index]
        layer.keys, layer.values = keys[:, :, :slots], values[:, :, :slots]
        self._views[index] = weakref.ref(layer.keys), weakref.ref(layer.values)

    def _write_inputs(self, call: LayerCall, slots: int) -> None:
        assert call.mask is not None
        self.inputs.copy_(call)
        self.slot.fill_(slots)
        self.mask.fill_(get_hidden_value(self.mask))[..., : slots + 1] = call.mask


def count_buffer_bytes(cached: Sequence[Any], capacity: int) -> int:
    """Return the bytes of buffers of `capacity` slots for cache layers."""
    return sum((layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2] * capacity for layer in cached)


def _allocate(states: Tensor, slots: int) -> Tensor:
    return states.new_zeros((*states.shape[:2], slots, states.shape[3]))


def _count_references(tensor: Tensor) -> int:
    """Return the number of tensors with the storage of `tensor`, up to a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
