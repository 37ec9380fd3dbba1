# SPDX-License-Identifier: Apache-2.0
"""Captured graphs of groups of layers, within limits of number and memory."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tokenprune.integrations.hf.graphs.capture import GraphPool, NotGraphedError
from tokenprune.integrations.hf.graphs.replay import Bucket, LayerCall, Layers, States
from tokenprune.integrations.hf.graphs.settings import Graphs
from tokenprune.integrations.hf.graphs.steps import StepBucket, count_buffer_bytes

T = TypeVar("T")


class Buckets:
    """LRU cache of captured buckets within the limits of `graphs`.

    Threads take turns through `lock`. A copy starts empty, so `deepcopy(model)` does not share graphs.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.lock, self.captured = graphs, threading.RLock(), 0
        self._buckets: OrderedDict[Hashable, Any] = OrderedDict()
        self._refused: dict[Hashable, str] = {}  # a failed capture is not repeated in each call
        self._uses: Counter[Hashable] = Counter()  # calls before the capture
        self._pool: GraphPool | None = None

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
            self._uses.clear()
            self._pool = None

    def run(self, layers: Layers, call: LayerCall) -> tuple[Tensor, States]:
        """Run `layers` on the tokens of a prompt, and capture their graph first if it is new.

        Args:
            layers: Forwards of a group of layers, by layer index.
            call: Arguments of the first layer.

        Returns:
            Hidden states and key-value states, as `Bucket.run`.

        Raises:
            NotGraphedError: If the layers cannot be captured.
        """
        length = self.graphs.bucket(call.hidden.shape[1])
        key = (tuple(layers), length, call.key, _get_modes())

        def run() -> tuple[Tensor, States]:
            if key not in self._buckets:
                self._capture(key, call, partial(Bucket.capture, layers, call, length, self._pool))
            return self._use(key).run(call)

        return self._run_on(call.hidden.device, run)

    def run_step(self, layers: Layers, call: LayerCall, cached: Sequence[Any]) -> tuple[Tensor, StepBucket]:
        """Run `layers` on one new token per row.

        Args:
            layers: Forwards of a group of layers, by layer index.
            call: Arguments of the first layer.
            cached: Cache layers of `layers`, with equal numbers of slots. They become views of the buffers.

        Returns:
            Hidden states, shape (batch, 1, width), and the bucket with the new keys and values.

        Raises:
            NotGraphedError: If the layers cannot be captured.
        """
        slots = cached[0].keys.shape[2]
        capacity = self.graphs.capacity(slots + 1)
        key = ("step", tuple(layers), capacity, call.key, _get_modes())

        def run() -> tuple[Tensor, StepBucket]:
            bucket = self._get_step(key, layers, call, cached, capacity)
            return bucket.run(call, slots), bucket

        return self._run_on(call.hidden.device, run)

    def _run_on(self, device: torch.device, run: Callable[[], T]) -> T:
        with self.lock:
            if device.type != "cuda":
                return run()
            if self._pool is None or self._pool.stream.device != device:
                self.clear()
                self._pool = GraphPool(device)
            self._pool.begin()
            try:
                return run()
            finally:
                self._pool.end()

    def _get_step(
        self, key: Hashable, layers: Layers, call: LayerCall, cached: Sequence[Any], capacity: int
    ) -> StepBucket:
        """Return a bucket that holds the cache layers. Living caches have different buckets."""
        unused: Hashable = None
        for index in count():
            bucket = self._buckets.get((key, index))
            if bucket is None:
                break
            if bucket.holds(cached):
                return self._use((key, index))
            if unused is None and bucket.is_unused():
                unused = (key, index)
        if unused is not None:
            self._buckets[unused].move(cached)
            return self._use(unused)
        needed, limit = count_buffer_bytes(cached, capacity), self._get_limit(call.hidden.device)
        if needed > limit:
            raise NotGraphedError(f"the buffers of the cache need {needed} bytes, more than bytes={limit}")
        self._capture(key, call, partial(StepBucket.capture, layers, call, cached, capacity, self._pool), index)
        return self._use((key, index))

    def _capture(self, key: Hashable, call: LayerCall, make: Callable[[], Any], index: int | None = None) -> None:
        """Add a captured bucket. index: Number of the bucket, if buckets with the same key may exist."""
        if key in self._refused:
            raise NotGraphedError(self._refused[key])
        self._uses[key] += 1
        if self._uses[key] < self.graphs.min_uses:
            raise NotGraphedError(f"a graph is captured when its shape is used {self.graphs.min_uses} times")
        limit = self._get_limit(call.hidden.device)
        try:
            # Inference tensors could not be written to outside of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                bucket = make()
        except (RuntimeError, NotGraphedError) as error:
            reason = str(error).strip().partition("\n")[0]
            self._refuse(key, f"layers could not be captured ({reason})", error)
        if bucket.bytes > limit:
            self._refuse(key, f"a graph of {bucket.bytes} bytes is more than bytes={limit}")
        self._buckets[key if index is None else (key, index)] = bucket
        self.captured += 1
        while len(self._buckets) > self.graphs.max_graphs or self.bytes > limit:
            self._buckets.popitem(last=False)

    def _use(self, key: Hashable) -> Any:
        self._buckets.move_to_end(key)
        return self._buckets[key]

    def _get_limit(self, device: torch.device) -> int:
        """Return the bytes that all graphs may use."""
        if self.graphs.free_share is None or device.type != "cuda":
            return self.graphs.bytes
        free = torch.cuda.mem_get_info(device)[0] + self.bytes
        return min(self.graphs.bytes, int(self.graphs.free_share * free))

    def _refuse(self, key: Hashable, reason: str, error: Exception | None = None) -> NoReturn:
        self._refused[key] = reason
        raise NotGraphedError(reason) from error


def _get_modes() -> Hashable:
    """Return the modes of torch that a graph depends on."""
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return casts, torch.get_float32_matmul_precision()
