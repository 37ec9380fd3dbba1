# SPDX-License-Identifier: Apache-2.0
"""Times of a computation on a GPU, and what bounds them.

**Bound.** The rule, for every row: `ms` is the time of a run as PyTorch launches it; `device_ms` what the GPU is busy
for: a replay of the same run as a CUDA graph, or, where it cannot be captured (the host waits for a value in it), the
sum of its kernels by PyTorch's profiler. Where ms is above 1.1 times device_ms, **launches** bound the row: the GPU
waits for the host. Else the larger of two floors does: **arithmetic**, FLOPs over what a large product of matrices
reaches here, or **memory**, bytes over what a large copy reaches. On a CPU there are no launches: the sum of its
operations stands in, which proves the code.
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

IDLE = 1.1  # of the time that the GPU is busy: above it, it waits for the host
Run = Callable[[], Any]


def bound(ms: float, device_ms: float | None, arithmetic_ms: float = 0.0, memory_ms: float = 0.0) -> str:
    """Return what bounds a row, by the rule above; without a busy time nothing is said."""
    if device_ms is None:
        return "unknown"
    if ms > IDLE * device_ms:
        return "launches"
    return "memory" if memory_ms > arithmetic_ms else "arithmetic"


class Marks:
    """Points in the stream of a device, to be read when it is done."""

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
    """All clocks of a device. tiny: take the fewest runs."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny, self.clock = device, tiny, Clock(device)
        self.cuda, self.marks = device.type == "cuda", Marks(device)
        self._captures = self.cuda  # until one fails: what a failed capture leaves behind is nobody's to rely on

    def timed(
        self, run: Run, flops: float = 0.0, moved: float = 0.0, rounds: int = 5, graph: bool = True
    ) -> dict[str, Any]:
        """Return what a row says of a run: ms, graph_ms or why there is none, device_ms, and the bound.

        flops, moved: operations, and bytes of memory, that the run cannot do without. graph: whether to capture it.
        """
        run()
        taken = [1000 * self.clock(run)[0] for _ in range(1 if self.tiny else rounds)]
        graph_ms, reason = self.graph_ms(run, rounds) if graph else (None, "")
        device_ms = graph_ms if graph_ms is not None else self.busy_ms(run)
        floors = 1e3 * flops / self.flops, 1e3 * moved / self.bandwidth
        return {
            "ms": ladder(taken), "graph_ms": graph_ms, "no_graph": reason, "device_ms": device_ms,
            "arithmetic_ms": floors[0], "memory_ms": floors[1], "bound": bound(median(taken), device_ms, *floors),
        }  # fmt: skip

    def graph_ms(self, run: Run, rounds: int = 5) -> tuple[float | None, str]:
        """Return the median milliseconds of a replay of the run as a CUDA graph, or None and the reason."""
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
            torch.cuda.set_stream(before)  # a capture that fails does not leave its stream
            return None, f"the capture failed: {str(error).splitlines()[0][:200]}"
        graph.replay()
        taken = [1000 * self.clock(graph.replay)[0] for _ in range(rounds)]
        graph.reset()
        torch.cuda.empty_cache()  # its pool
        return median(taken), ""

    def wait_in(self, run: Run) -> str:
        """Return the place in the code at which the host first waits for the GPU within a run; "" if it never does."""
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
        """Return the milliseconds of all kernels of a run by the profiler (on a CPU, of all operations), or None where
        it sees none."""
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        with profile(activities=kinds, acc_events=True) as seen:
            run()
            self.clock.wait()
        events = seen.key_averages()
        if self.cuda:
            own = torch.autograd.DeviceType.CUDA
            total = sum(one.self_device_time_total for one in events if one.device_type == own)
        else:
            total = sum(one.self_cpu_time_total for one in events)
        return total / 1e3 or None

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written."""
        words = 2**14 if self.tiny else 2**28
        source, target = (torch.ones(words, device=self.device) for _ in range(2))
        return 2 * source.nbytes / self._best(lambda: target.copy_(source))

    @cached_property
    def flops(self) -> float:
        """FLOPs a second of a large product of matrices, in the dtype of the models."""
        size = 64 if self.tiny else 8192
        dtype = torch.bfloat16 if self.cuda else torch.float32
        a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * size**3 / self._best(lambda: a @ b)

    def _best(self, run: Run) -> float:
        run()
        return median(self.clock(run)[0] for _ in range(5))


class Choosing:
    """Milliseconds between the begin and the end of each cut inside a `with` block: choosing, and taking out."""

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
            made = original(*args, **kwargs)
            self._spans.append((begin, self.marks.now()))
            return made

        return run

    @property
    def ms(self) -> float:
        return sum(self.marks.ms(begin, end) for begin, end in self._spans)
