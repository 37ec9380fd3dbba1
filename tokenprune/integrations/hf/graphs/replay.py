# SPDX-License-Identifier: Apache-2.0
"""Run a group of decoder layers on a fixed number of tokens. On a GPU a run is the replay of one CUDA graph."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.graphs.settings import Graphs

States = dict[int, tuple[Tensor, Tensor]]


class NotGraphedError(Exception):
    """A call or a group of layers cannot use graphs. The message is the reason."""


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
        mask: Attention mask, shape (batch, heads, length, length), bool or additive.
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
        """Everything that a graph depends on, except the number of tokens."""
        shapes = tuple(
            (name, *((_without(tensor.shape, dim), tensor.dtype, tensor.device) for tensor in _as_tuple(value)))
            for name, (value, dim) in self.tensors.items()
        )
        shape = (self.hidden.shape[0], self.hidden.shape[2], self.hidden.dtype, self.hidden.device)
        mask = None if self.mask is None else (self.mask.shape[:2], self.mask.dtype)
        return shape, shapes, mask, tuple(self.plain.items()), self.caches


class _Pool:
    """Memory pool and capture stream of the graphs of one device, and an event at the end of the last replay."""

    def __init__(self, device: torch.device) -> None:
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.done = torch.cuda.Event()

    def begin(self) -> None:
        """Let the current stream wait for the last replay, which may belong to another thread."""
        self.done.wait(torch.cuda.current_stream(self.stream.device))

    def end(self) -> None:
        self.done.record(torch.cuda.current_stream(self.stream.device))


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)


@dataclass(eq=False)
class Bucket:
    """Static inputs and outputs of a group of layers for one padded length.

    Attributes:
        inputs: Static input tensors and their token dimensions. The first is the hidden states.
        mask: Static mask, shape (batch, heads, bucket, bucket), and its values for padding.
        hidden: Static output of the last layer, shape (batch, bucket, width).
        flat: Keys and values of all layers, flattened and concatenated.
        shapes: Shapes of keys and values, (batch, heads, bucket, head width), by layer.
        replay: Computes the outputs from the current inputs.
        bytes: Memory of the bucket.
    """

    inputs: list[tuple[Tensor, int]]
    mask: tuple[Tensor, Tensor] | None
    hidden: Tensor
    flat: Tensor
    shapes: dict[int, tuple[torch.Size, torch.Size]]
    replay: Callable[[], None]
    bytes: int

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layers on a call with at most `bucket` tokens.

        Returns:
            Hidden states, shape (batch, length, width), and the keys and values of each layer. They are copies: the
            next run does not change them.
        """
        length = call.hidden.shape[1]
        for (static, dim), tensor in zip(self.inputs, _get_tensors(call), strict=True):
            static.narrow(dim, 0, length).copy_(tensor)
        # The padding may hold NaN from an earlier prompt, which a mask does not remove.
        self.inputs[0][0][:, length:].zero_()
        if self.mask is not None and call.mask is not None:
            self.mask[0].copy_(self.mask[1])[..., :length, :length] = call.mask
        self.replay()
        hidden, flat = self.hidden[:, :length].clone(), self.flat.clone()
        parts = iter(flat.split([shape.numel() for pair in self.shapes.values() for shape in pair]))
        states = {
            layer: (next(parts).view(keys)[..., :length, :], next(parts).view(values)[..., :length, :])
            for layer, (keys, values) in self.shapes.items()
        }
        return hidden, states


def _get_tensors(call: LayerCall) -> list[Tensor]:
    return [call.hidden, *chain.from_iterable(_as_tuple(value) for value, _ in call.tensors.values())]


class Buckets:
    """LRU cache of captured buckets within the limits of `graphs`.

    Threads take turns through `lock`. A copy starts empty, so `deepcopy(model)` does not share graphs.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.lock, self.captured = graphs, threading.RLock(), 0
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()
        self._refused: dict[Hashable, str] = {}  # a failed capture is not repeated in each call
        self._pool: _Pool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Buckets:
        return type(self)(copy.deepcopy(self.graphs, memo))

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self._buckets.values())

    def clear(self) -> None:
        """Free all buckets."""
        with self.lock:
            self._buckets.clear()
            self._refused.clear()
            self._pool = None

    def run(self, layers: Mapping[int, Callable[..., Any]], call: LayerCall) -> tuple[Tensor, States]:
        """Run `layers` on a call, and capture their graph first if it is new.

        Args:
            layers: Forwards of a group of layers, by layer index.
            call: Arguments of the first layer.

        Returns:
            Hidden states and key-value states, as `Bucket.run`.

        Raises:
            NotGraphedError: If the layers cannot be captured.
        """
        with self.lock:
            if not call.hidden.is_cuda:
                return self._get(layers, call).run(call)
            if self._pool is None or self._pool.stream.device != call.hidden.device:
                self.clear()
                self._pool = _Pool(call.hidden.device)
            self._pool.begin()
            try:
                return self._get(layers, call).run(call)
            finally:
                self._pool.end()

    def _get(self, layers: Mapping[int, Callable[..., Any]], call: LayerCall) -> Bucket:
        """Return the bucket of a call, captured if it is new."""
        length = self.graphs.bucket(call.hidden.shape[1])
        casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
        key = (tuple(layers), length, call.key, casts, torch.get_float32_matmul_precision())
        if key in self._refused:
            raise NotGraphedError(self._refused[key])
        if key not in self._buckets:
            try:
                bucket = _capture(layers, call, length, self._pool)
            except RuntimeError as error:
                self._refuse(key, f"layers could not be captured ({str(error).strip().partition(chr(10))[0]})", error)
            if bucket.bytes > self.graphs.bytes:
                self._refuse(key, f"a graph of {bucket.bytes} bytes is more than bytes={self.graphs.bytes}")
            self._buckets[key] = bucket
            self.captured += 1
        self._buckets.move_to_end(key)
        while len(self._buckets) > self.graphs.max_graphs or self.bytes > self.graphs.bytes:
            self._buckets.popitem(last=False)
        return self._buckets[key]

    def _refuse(self, key: Hashable, reason: str, error: Exception | None = None) -> NoReturn:
        self._refused[key] = reason
        raise NotGraphedError(reason) from error


def _capture(layers: Mapping[int, Callable[..., Any]], call: LayerCall, length: int, pool: _Pool | None) -> Bucket:
    """Return the bucket of `layers` for `length` tokens."""
    # Inference tensors could not be written to outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        hidden = _pad(call.hidden, 1, length)
        tensors = {name: (_pad_all(value, dim, length), dim) for name, (value, dim) in call.tensors.items()}
        mask = None if call.mask is None else _pad_mask(call.mask, length)
        latest: dict[str, Any] = {"mask": mask}

        def run_layers() -> None:
            recorder, states = _Recorder(), hidden
            arguments = dict(call.plain) | {name: value for name, (value, _) in tensors.items()}
            if mask is not None:
                arguments["attention_mask"] = mask[0]
            cache = {compat.CACHE: recorder if call.caches else None}
            for forward in layers.values():
                output = forward(states, **arguments, **cache)
                states = output[0] if isinstance(output, tuple) else output
            flat = [tensor.flatten() for pair in recorder.states.values() for tensor in pair]
            shapes = {layer: (keys.shape, values.shape) for layer, (keys, values) in recorder.states.items()}
            latest.update(hidden=states, flat=torch.cat(flat) if flat else states.new_empty(0), shapes=shapes)

        inputs = [(hidden, 1), *((tensor, dim) for value, dim in tensors.values() for tensor in _as_tuple(value))]
        if pool is not None:
            return _capture_graph(run_layers, latest, inputs, pool)
        run_layers()
        return _make_eager_bucket(run_layers, latest, inputs)


def _pad(value: Tensor, dim: int, length: int) -> Tensor:
    sizes = list(value.shape)
    sizes[dim] = length
    padded = value.new_zeros(sizes)
    padded.narrow(dim, 0, value.shape[dim]).copy_(value)
    return padded


def _pad_mask(mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return a mask padded to `length`, and the mask of padding only. Padding attends to itself to avoid NaN."""
    empty = torch.eye(length, dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        empty = mask.new_zeros(length, length).masked_fill_(~empty, torch.finfo(mask.dtype).min)
    padded = empty.expand(*mask.shape[:2], -1, -1).clone()
    padded[..., : mask.shape[-2], : mask.shape[-1]] = mask
    return padded, empty


def _pad_all(value: Any, dim: int, length: int) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_pad(tensor, dim, length) for tensor in value)
    return _pad(value, dim, length)


def _capture_graph(
    run_layers: Callable[[], None], latest: dict[str, Any], inputs: list[tuple[Tensor, int]], pool: _Pool
) -> Bucket:
    device = inputs[0][0].device
    # A failed capture does not restore the current stream, and this context does.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(pool.stream):
            run_layers()  # libraries create their handles during the first run
        torch.cuda.current_stream().wait_stream(pool.stream)
        # The cuBLAS workspace must belong to the memory of the graph. The workspace of the stream may be freed
        # (torch.compile frees it before a capture), and a replay would write to freed memory.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # a capture empties the cache too: without this the difference below is wrong
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"):
                run_layers()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        num_bytes = torch.cuda.memory_reserved() - before + sum(tensor.nbytes for tensor, _ in inputs)
    return Bucket(inputs, **latest, replay=graph.replay, bytes=num_bytes)


def _make_eager_bucket(
    run_layers: Callable[[], None], latest: dict[str, Any], inputs: list[tuple[Tensor, int]]
) -> Bucket:
    """Return a bucket for the CPU: it runs the layers again, and copies the outputs to static tensors."""
    hidden, flat, mask = latest["hidden"], latest["flat"], latest["mask"]

    def replay() -> None:
        run_layers()
        hidden.copy_(latest["hidden"])
        flat.copy_(latest["flat"])

    num_bytes = sum(tensor.nbytes for tensor in (hidden, flat, *(tensor for tensor, _ in inputs)))
    return Bucket(inputs, mask, hidden, flat, latest["shapes"], replay, num_bytes)
