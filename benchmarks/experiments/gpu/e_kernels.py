# SPDX-License-Identifier: Apache-2.0
"""Each kernel beside its reference, the compiled reference, FlashAttention at the same shape, and what the GPU allows.

"floor": the bytes that must be moved, or the FLOPs, at the speeds of a large copy and a large product here, whichever
takes longer. "of the floor": floor / kernel, 1 is perfect. "flash": PyTorch's FlashAttention on queries and keys of the
same shape, with keys for values, which does more. A buffer larger than the cache is written between two runs, so that
inputs come from memory. difference, other_choices (raw data): between kernel and reference, the largest of numbers, and
the share of chosen tokens. Compiled references come last: compiling takes long. Without a GPU, kernels run in Triton's
interpreter: such times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kit import Sheet  # isort: skip
import torch
from clocks import Clocks, bound
from kernel_cases import CASES, Case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenprune.kernels.dispatch import Operation, has_triton, list_operations
from tokenprune_bench.profiling.timing import compute_quantiles

COMPILING = 20.0  # seconds that a case may take for it
SECONDS = 0.2  # for each thing that is timed
COLUMNS = {
    "operation": "operation", "case": "case", "floor_ms": "floor ms", "triton_ms": "kernel ms",
    "floor_share": "of the floor", "reference_ms": "reference ms", "compiled_ms": "compiled ms",
    "flash_ms": "flash ms", "bound": "bound by",
}  # fmt: skip


class Meter:
    """Times calls of operations, each with its inputs in memory."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks, self.marks, self.seconds = clocks, clocks.marks, 0.0 if clocks.tiny else SECONDS
        self.flush = torch.empty(2**28 if clocks.cuda else 1, dtype=torch.uint8, device=clocks.device)

    def time(self, run: Callable[[], Any]) -> dict[str, float]:
        """Return quantiles in milliseconds, after one run that does not count."""
        run()
        taken: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(taken) < (1 if self.clocks.tiny else 3) or (time.perf_counter() < end and len(taken) < 200):
            self.flush.zero_()
            begin = self.marks.now()
            run()
            taken.append(self.marks.ms(begin, self.marks.now()))
        return compute_quantiles(taken)

    def memory(self, run: Callable[[], Any]) -> int | None:
        """Return the peak bytes that a run takes on a GPU beside its input."""
        if not self.clocks.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(meter: Meter, operation: Operation, case: Case) -> dict[str, Any]:
    """Return the row of one case."""

    def call(function: Callable) -> Callable[[], Any]:
        return lambda: function(*case.args, **case.kwargs)

    clocks = meter.clocks
    floors = 1e3 * case.flops / clocks.flops if case.flops else 0.0, 1e3 * case.bytes / clocks.bandwidth
    row: dict[str, Any] = {
        "operation": operation.name, "case": case.name, "dtype": str(case.dtype).removeprefix("torch."),
        "bytes": case.bytes, "flops": case.flops, "floor_ms": round(max(floors), 6),
    }  # fmt: skip
    want = call(operation.reference)()
    if (reason := _obstacle(operation, case)) is not None:
        row["bound"] = f"no kernel: {reason}"
    else:
        kernel = call(operation.triton)
        row["difference"], row["other_choices"] = compare(kernel(), want, case.atol)
        row["triton_ms"], row["triton_bytes"] = meter.time(kernel), meter.memory(kernel)
        device_ms, row["no_graph"] = clocks.graph_ms(kernel)
        row["device_ms"] = clocks.busy_ms(kernel) if device_ms is None else device_ms
        plain = 1e3 * min(clocks.clock(kernel)[0] for _ in range(3))
        row["bound"] = bound(plain, row["device_ms"], *floors)
        row["floor_share"] = row["floor_ms"] / row["triton_ms"]["p50"]
    row["reference_ms"], row["reference_bytes"] = (
        meter.time(call(operation.reference)),
        meter.memory(call(operation.reference)),
    )
    if operation.name.startswith("attention"):
        row["flash_ms"] = meter.time(flash(case))
    return row


def _obstacle(operation: Operation, case: Case) -> str | None:
    """Return why the kernel cannot run a case: its own reason, or, without a GPU, Triton's interpreter."""
    from triton.runtime.errors import InterpreterError

    if (reason := operation.get_unsupported_reason(*case.args, **case.kwargs)) is None:
        try:
            operation.triton(*case.args, **case.kwargs)
        except InterpreterError as error:
            return f"Triton's interpreter: {error}"
    return reason


def flash(case: Case) -> Callable[[], Tensor]:
    """Return a function that runs FlashAttention on a case's queries and keys, with the keys for values."""
    query, key = case.args[:2]
    starts, causal = (case.args[4] if len(case.args) > 4 else None), case.kwargs.get("causal", True)
    if starts is not None:  # sequences of one length, end to end
        pieces = len(starts) - 1
        query, key = (one.unflatten(2, (pieces, -1)).transpose(1, 2).flatten(0, 1) for one in (query, key))
    backend = SDPBackend.FLASH_ATTENTION if query.is_cuda else SDPBackend.MATH
    causal = causal and query.shape[2] == key.shape[2]
    options = {"is_causal": causal, "enable_gqa": query.shape[1] != key.shape[1], "scale": case.kwargs["scaling"]}

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(query, key, key, **options)

    return run


def compiled(meter: Meter, operation: Operation, case: Case) -> dict[str, Any]:
    """Return the row of a case's reference under torch.compile; a tiny run asks for no C++ compiler."""
    torch.compiler.reset()
    made = torch.compile(operation.reference, backend="aot_eager" if meter.clocks.tiny else "inductor")
    run = partial(made, *case.args, **case.kwargs)
    taken = meter.time(run)
    busy = meter.clocks.busy_ms(run)
    return {
        "operation": operation.name, "case": case.name, "compiled_ms": taken, "device_ms": busy,
        "bound": bound(taken["p50"], busy),
    }  # fmt: skip


def compare(got: Any, want: Any, atol: float) -> tuple[float, float]:
    """Return the largest difference between numbers of two results, and the largest share of choices (indices, masks)
    that differ, as they may where numbers all but tie. Raises AssertionError where numbers differ by more than
    `atol`."""
    if isinstance(want, Tensor):
        got, want = (got,), (want,)
    largest = other = 0.0
    for mine, theirs in zip(got, want, strict=True):
        if theirs.is_floating_point():
            torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-3)
            largest = max(largest, float((mine.double() - theirs.double()).nan_to_num(0, 0, 0).abs().max()))
        else:
            other = max(other, float((mine != theirs).double().mean()))
    return largest, round(other, 6)


def main(given: Sequence[str] | None = None) -> int:
    sheet = Sheet("e_kernels", "Kernels", "7 B models", COLUMNS, __doc__, given)
    if not has_triton():
        raise SystemExit("Triton is not installed: pip install triton")
    known = list_operations()
    if missing := known.keys() - CASES.keys():
        raise SystemExit(f"no cases for {', '.join(sorted(missing))}: add a function with @cases(...) to kernel_cases")
    meter = Meter(Clocks(sheet.device, sheet.tiny))
    # A loop of a thousand picks is not compiled in any time.
    for what, run, seconds in (("kernel", measure, None), ("compiled", compiled, None if sheet.tiny else COMPILING)):
        for name in known if what == "kernel" or not sheet.tiny else ("attention_rows", "join"):
            # One case at a time: together they would not fit in memory.
            for case in CASES[name](sheet.device, sheet.tiny):
                sheet.take((what, name, case.name), partial(run, meter, known[name], case), seconds)
                sheet.free()
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
