# SPDX-License-Identifier: Apache-2.0
"""Measure times of a computation on a GPU, and determine its bound.

**Bound.** `ms` is the time of a run with PyTorch's launches. `device_ms` is the GPU's busy time: a replay of the run as
a CUDA graph or, if it cannot be captured (the host waits for a value), the sum of its kernels in PyTorch's profiler. If
ms is above 1.1 times device_ms, **launches** bound the row: the GPU waits for the host. Otherwise the larger of two
floors decides: **arithmetic** (FLOPs / FLOP rate of a large matrix product) or **memory** (bytes / bandwidth of a large
copy). A CPU has no launches; there, device_ms is the sum of all operations, which only checks the code.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import cached_property
from statistics import median
from typing import Any

import torch
from common import Clock, ladder
from torch.profiler import ProfilerActivity, profile

import tokenprune.integrations.hf.engine.engine as engine

IDLE = 1.1  # if a run takes longer than this times the busy time, the GPU waits for the host
Run = Callable[[], Any]


def bound(ms: float, device_ms: float | None, arithmetic_ms: float = 0.0, memory_ms: float = 0.0) -> str:
    """Return the bound of a row by the rule above, or "unknown" without a busy time."""
    if device_ms is None:
        return "unknown"
    if ms > IDLE * device_ms:
        return "launches"
    return "memory" if memory_ms > arithmetic_ms else "arithmetic"


class Marks:
    """Time stamps in the stream of a device, read after its work is done."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        if not self.cuda:
            return 1000 * (end - begin)
        end.synchronize()
        return begin.elapsed_time(end)


class Clocks:
    """All clocks of a device. With `tiny`, each run is timed once."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny, self.clock = device, tiny, Clock(device)
        self.cuda, self.marks = device.type == "cuda", Marks(device)
        self._captures = self.cuda  # False after a failed capture, which leaves an undefined state

    def timed(
        self, run: Run, flops: float = 0.0, moved: float = 0.0, rounds: int = 5, graph: bool = True
    ) -> dict[str, Any]:
        """Return the times of a run for a row: ms, graph_ms or the reason against a graph, device_ms, and the bound.

        Args:
            run: The run.
            flops: Minimum number of operations.
            moved: Minimum number of bytes to move.
            rounds: Number of timed runs.
            graph: Whether to try a CUDA graph.
        """
        run()
        milliseconds = [1000 * self.clock(run)[0] for _ in range(1 if self.tiny else rounds)]
        graph_ms, reason = self.graph_ms(run, rounds) if graph else (None, "")
        device_ms = graph_ms if graph_ms is not None else self.busy_ms(run)
        floors = 1e3 * flops / self.flops, 1e3 * moved / self.bandwidth
        return {
            "ms": ladder(milliseconds), "graph_ms": graph_ms, "no_graph": reason, "device_ms": device_ms,
            "arithmetic_ms": floors[0], "memory_ms": floors[1],
            "bound": bound(median(milliseconds), device_ms, *floors),
        }  # fmt: skip

    def graph_ms(self, run: Run, rounds: int = 5) -> tuple[float | None, str]:
        """Return the median milliseconds of a CUDA graph replay, or None and the reason."""
        if not self._captures:
            return None, "no GPU" if not self.cuda else "a capture failed before"
        if reason := self.wait_in(run):
            return None, f"the host waits in {reason}"
        side, before = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(before)
        with torch.cuda.stream(side):
            run()
        before.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError as error:
            self._captures = False
            torch.cuda.set_stream(before)  # a failed capture does not restore the stream
            return None, f"the capture failed: {str(error).splitlines()[0][:200]}"
        graph.replay()
        milliseconds = [1000 * self.clock(graph.replay)[0] for _ in range(rounds)]
        graph.reset()
        torch.cuda.empty_cache()  # frees the graph's memory pool
        return median(milliseconds), ""

    def wait_in(self, run: Run) -> str:
        """Return the code line where the host first waits for the GPU in a run, or "" without a wait."""
        if not self.cuda:
            return ""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{last.name} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    def busy_ms(self, run: Run) -> float | None:
        """Return the kernel milliseconds of a run in the profiler (on a CPU: of operations), or None without events."""
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        with profile(activities=kinds, acc_events=True) as profiler:
            run()
            self.clock.wait()
        events = profiler.key_averages()
        if self.cuda:
            cuda_type = torch.autograd.DeviceType.CUDA
            total = sum(event.self_device_time_total for event in events if event.device_type == cuda_type)
        else:
            total = sum(event.self_cpu_time_total for event in events)
        return total / 1e3 or None

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy, counting reads and writes."""
        words = 2**14 if self.tiny else 2**28
        source, target = (torch.ones(words, device=self.device) for _ in range(2))
        return 2 * source.nbytes / self._best(lambda: target.copy_(source))

    @cached_property
    def flops(self) -> float:
        """FLOPs per second of a large matrix product, in the models' dtype."""
        size = 64 if self.tiny else 8192
        dtype = torch.bfloat16 if self.cuda else torch.float32
        a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * size**3 / self._best(lambda: a @ b)

    def _best(self, run: Run) -> float:
        run()
        return median(self.clock(run)[0] for _ in range(5))


class Choosing:
    """Measure the milliseconds of all cuts inside a `with` block: selection and removal of tokens."""

    def __init__(self, device: torch.device) -> None:
        self.marks, self._spans = Marks(device), []

    def __enter__(self) -> Choosing:
        self._entry, self._layer = engine.cut_entry, engine.Engine._run_step
        engine.cut_entry, engine.Engine._run_step = self._watched(self._entry), self._watched(self._layer)
        return self

    def __exit__(self, *_: Any) -> None:
        engine.cut_entry, engine.Engine._run_step = self._entry, self._layer

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = self.marks.now()
            result = original(*args, **kwargs)
            self._spans.append((begin, self.marks.now()))
            return result

        return run

    @property
    def ms(self) -> float:
        return sum(self.marks.ms(begin, end) for begin, end in self._spans)
