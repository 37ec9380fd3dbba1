# SPDX-License-Identifier: Apache-2.0
"""Run some decoder layers on a fixed number of tokens again and again, on a GPU as the replay of one CUDA graph."""

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
    """Raised where a call, or some layers, cannot be graphed; its text says why."""


class _Recorder(DynamicCache):
    """A cache that hands out what it is given, and keeps it: `states`, keys and values of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.states: States = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.states[layer] = (keys, values)
        return keys, values


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer: everything that layers of a group read.

    hidden: `[B, L, D]`. tensors: arguments that have an entry for each token, by name, and the dimension of that; a
    tuple of tensors is one argument. mask: `[B, H, L, L]`, bool or to be added. plain: the other arguments, by name.
    caches: whether keys are cached.
    """

    hidden: Tensor
    tensors: Mapping[str, tuple[Any, int]]
    mask: Tensor | None
    plain: Mapping[str, Any]
    caches: bool

    @property
    def key(self) -> Hashable:
        """Everything that a run depends on but the number of tokens."""
        shapes = tuple(
            (name, *((_without(one.shape, dim), one.dtype, one.device) for one in _flat(value)))
            for name, (value, dim) in self.tensors.items()
        )
        shape = (self.hidden.shape[0], self.hidden.shape[2], self.hidden.dtype, self.hidden.device)
        mask = None if self.mask is None else (self.mask.shape[:2], self.mask.dtype)
        return shape, shapes, mask, tuple(self.plain.items()), self.caches


class _Pool:
    """Memory that graphs of one device share, the stream that they are captured on, and the end of the last run."""

    def __init__(self, device: torch.device) -> None:
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.done = torch.cuda.Event()

    def begin(self) -> None:
        """Let the stream of this thread wait for the last run, which may be another thread's."""
        self.done.wait(torch.cuda.current_stream(self.stream.device))

    def end(self) -> None:
        self.done.record(torch.cuda.current_stream(self.stream.device))


def _flat(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)


@dataclass(eq=False)
class Bucket:
    """One run of some layers on `[B, bucket]` tokens; `replay` computes it anew from what `given` holds.

    given: the hidden states, `[B, bucket, D]`, and what else has an entry for each token, with the dimension of that.
    mask: `[B, H, bucket, bucket]`, and what it is where there is no token. hidden: `[B, bucket, D]`, after the last
    layer. flat: keys and values of all layers, one after the other; shapes: of each, `[B, H, bucket, K]`, by layer.
    bytes: what the run holds on to.
    """

    given: list[tuple[Tensor, int]]
    mask: tuple[Tensor, Tensor] | None
    hidden: Tensor
    flat: Tensor
    shapes: dict[int, tuple[torch.Size, torch.Size]]
    replay: Callable[[], None]
    bytes: int

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Return the hidden states, `[B, L, D]`, and keys and values of each layer, for a call of at most `bucket`
        tokens; the next run changes none of them."""
        length = call.hidden.shape[1]
        for (held, dim), new in zip(self.given, _tensors(call), strict=True):
            held.narrow(dim, 0, length).copy_(new)
        # After the prompt there may be what is no number, from an earlier one: no mask would stop that.
        self.given[0][0][:, length:].zero_()
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


def _tensors(call: LayerCall) -> list[Tensor]:
    return [call.hidden, *chain.from_iterable(_flat(value) for value, _ in call.tensors.values())]


class Buckets:
    """The runs that were captured, the one used last at the end; bounded by `graphs`. One thread at a time may use them
    (`lock`). A copy, as one of the model has, is empty."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.lock, self.captured = graphs, threading.RLock(), 0
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()
        self._refused: dict[Hashable, str] = {}  # what failed once is not tried in every call
        self._pool: _Pool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Buckets:
        return type(self)(copy.deepcopy(self.graphs, memo))

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self._buckets.values())

    def clear(self) -> None:
        """Free all runs."""
        with self.lock:
            self._buckets.clear()
            self._refused.clear()
            self._pool = None

    def run(self, layers: Mapping[int, Callable[..., Any]], call: LayerCall) -> tuple[Tensor, States]:
        """Return what `layers`, by index their forwards, make of `call`, as `Bucket.run` does. Raises NotGraphedError
        where they cannot be captured."""
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
        """Return the run of layers for a call, captured where it is new."""
        bucket = self.graphs.bucket(call.hidden.shape[1])
        casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
        key = (tuple(layers), bucket, call.key, casts, torch.get_float32_matmul_precision())
        if key in self._refused:
            raise NotGraphedError(self._refused[key])
        if key not in self._buckets:
            try:
                made = _captured(layers, call, bucket, self._pool)
            except RuntimeError as error:
                self._refuse(key, f"layers could not be captured ({str(error).strip().partition(chr(10))[0]})", error)
            if made.bytes > self.graphs.bytes:
                self._refuse(key, f"a graph of {made.bytes} bytes is more than bytes={self.graphs.bytes}")
            self._buckets[key] = made
            self.captured += 1
        self._buckets.move_to_end(key)
        while len(self._buckets) > self.graphs.number or self.bytes > self.graphs.bytes:
            self._buckets.popitem(last=False)
        return self._buckets[key]

    def _refuse(self, key: Hashable, reason: str, error: Exception | None = None) -> NoReturn:
        self._refused[key] = reason
        raise NotGraphedError(reason) from error


def _captured(layers: Mapping[int, Callable[..., Any]], call: LayerCall, bucket: int, pool: _Pool | None) -> Bucket:
    """Return the run of `layers` on `bucket` tokens."""
    # Not tensors of inference mode, which nobody could write to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        hidden = _wider(call.hidden, 1, bucket)
        held = {name: (_each(value, dim, bucket), dim) for name, (value, dim) in call.tensors.items()}
        mask = None if call.mask is None else _wider_mask(call.mask, bucket)
        latest: dict[str, Any] = {"mask": mask}

        def once() -> None:
            recorder, states = _Recorder(), hidden
            arguments = dict(call.plain) | {name: value for name, (value, _) in held.items()}
            if mask is not None:
                arguments["attention_mask"] = mask[0]
            cache = {compat.CACHE: recorder if call.caches else None}
            for forward in layers.values():
                output = forward(states, **arguments, **cache)
                states = output[0] if isinstance(output, tuple) else output
            made = [one.flatten() for pair in recorder.states.values() for one in pair]
            shapes = {layer: (keys.shape, values.shape) for layer, (keys, values) in recorder.states.items()}
            latest.update(hidden=states, flat=torch.cat(made) if made else states.new_empty(0), shapes=shapes)

        given = [(hidden, 1), *((one, dim) for value, dim in held.values() for one in _flat(value))]
        if pool is not None:
            return _graph(once, latest, given, pool)
        once()
        return _plain(once, latest, given)


def _wider(value: Tensor, dim: int, bucket: int) -> Tensor:
    sizes = list(value.shape)
    sizes[dim] = bucket
    made = value.new_zeros(sizes)
    made.narrow(dim, 0, value.shape[dim]).copy_(value)
    return made


def _wider_mask(mask: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    """Return a mask of all of a bucket, and what it is without tokens: each place sees itself, so that none is NaN."""
    empty = torch.eye(bucket, dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        empty = mask.new_zeros(bucket, bucket).masked_fill_(~empty, torch.finfo(mask.dtype).min)
    made = empty.expand(*mask.shape[:2], -1, -1).clone()
    made[..., : mask.shape[-2], : mask.shape[-1]] = mask
    return made, empty


def _each(value: Any, dim: int, bucket: int) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_wider(one, dim, bucket) for one in value)
    return _wider(value, dim, bucket)


def _graph(once: Callable[[], None], latest: dict[str, Any], given: list[tuple[Tensor, int]], pool: _Pool) -> Bucket:
    device = given[0][0].device
    # A capture that fails does not leave its stream; this does.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(pool.stream):
            once()  # libraries make their handles in a first run
        torch.cuda.current_stream().wait_stream(pool.stream)
        # The workspace of products of matrices is of the graph's own memory then: others give back that of the stream,
        # as torch.compile does before it captures, and a replay would write where it was.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # as a capture does, so that the difference is what it takes
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"):
                once()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        taken = torch.cuda.memory_reserved() - before + sum(one.nbytes for one, _ in given)
    return Bucket(given, **latest, replay=graph.replay, bytes=taken)


def _plain(once: Callable[[], None], latest: dict[str, Any], given: list[tuple[Tensor, int]]) -> Bucket:
    """Return a bucket that runs the layers each time, and writes where their first run did: a graph without a GPU."""
    hidden, flat, mask = latest["hidden"], latest["flat"], latest["mask"]

    def replay() -> None:
        once()
        hidden.copy_(latest["hidden"])
        flat.copy_(latest["flat"])

    taken = sum(tensor.nbytes for tensor in (hidden, flat, *(one for one, _ in given)))
    return Bucket(given, mask, hidden, flat, latest["shapes"], replay, taken)
