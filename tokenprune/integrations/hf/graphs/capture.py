# SPDX-License-Identifier: Apache-2.0
"""Capture a function as a CUDA graph. On a CPU a replay runs the function again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[], tuple[Tensor, ...]]


class NotGraphedError(Exception):
    """A call or a group of layers cannot use graphs. The message is the reason."""


class GraphPool:
    """Memory pool and capture stream of the graphs of one device, and an event at the end of the last replay."""

    def __init__(self, device: torch.device) -> None:
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.done = torch.cuda.Event()

    def begin(self) -> None:
        """Let the current stream wait for the last replay, which may belong to another thread."""
        self.done.wait(torch.cuda.current_stream(self.stream.device))

    def end(self) -> None:
        self.done.record(torch.cuda.current_stream(self.stream.device))


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured function.

    Attributes:
        outputs: Static outputs, which each replay overwrites.
        replay: Computes the outputs from the current values of the inputs.
        bytes: Memory of the graph with its outputs.
    """

    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    bytes: int


def capture(function: Function, pool: GraphPool | None) -> Captured:
    """Capture `function`, which reads and writes only tensors that stay alive. Without a pool it runs on a CPU."""
    if pool is None:
        return _capture_on_cpu(function)
    # A failed capture does not restore the current stream, and this context does.
    device = pool.stream.device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(pool.stream):
            function()  # libraries create their handles during the first run
        torch.cuda.current_stream().wait_stream(pool.stream)
        # The cuBLAS workspace must belong to the memory of the graph. The workspace of the stream may be freed
        # (torch.compile frees it before a capture), and a replay would write to freed memory.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # a capture empties the cache too: without this the difference below is wrong
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"):
                outputs = function()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return Captured(outputs, graph.replay, torch.cuda.memory_reserved() - before)


def _capture_on_cpu(function: Function) -> Captured:
    outputs = function()

    def replay() -> None:
        for static, output in zip(outputs, function(), strict=True):
            static.copy_(output)

    return Captured(outputs, replay, sum(output.nbytes for output in outputs))
