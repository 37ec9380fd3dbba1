# SPDX-License-Identifier: Apache-2.0
"""Measure each kernel against its reference, the compiled reference, FlashAttention, and the GPU's limits.

"floor" is the minimum time of the bytes to move (at the bandwidth of a large copy) or of the FLOPs (at the rate of a
large matrix product), whichever is longer. "of the floor" is floor / kernel time; 1 is optimal. "flash" is PyTorch's
FlashAttention on queries and keys of the same shape with keys as values, which computes more. A buffer larger than the
cache is written between runs, so that inputs come from memory. The raw file also has `difference` (maximum difference
of numbers between kernel and reference) and `other_choices` (share of different choices). Compiled references come
last, because compilation takes long. Without a GPU, kernels run in Triton's interpreter, whose times are meaningless.
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

COMPILING = 20.0  # maximum seconds to compile and time a case
SECONDS = 0.2  # duration of each timing
COLUMNS = {
    "operation": "operation", "case": "case", "floor_ms": "floor ms", "triton_ms": "kernel ms",
    "floor_share": "of the floor", "reference_ms": "reference ms", "compiled_ms": "compiled ms",
    "flash_ms": "flash ms", "bound": "bound by",
}  # fmt: skip


class Meter:
    """Time calls of operations, with inputs that are not in the cache."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks, self.marks, self.seconds = clocks, clocks.marks, 0.0 if clocks.tiny else SECONDS
        self.flush = torch.empty(2**28 if clocks.cuda else 1, dtype=torch.uint8, device=clocks.device)

    def time(self, run: Callable[[], Any]) -> dict[str, float]:
        """Return quantiles in milliseconds after a warm-up run."""
        run()
        milliseconds: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(milliseconds) < (1 if self.clocks.tiny else 3) or (
            time.perf_counter() < end and len(milliseconds) < 200
        ):
            self.flush.zero_()
            begin = self.marks.now()
            run()
            milliseconds.append(self.marks.ms(begin, self.marks.now()))
        return compute_quantiles(milliseconds)

    def memory(self, run: Callable[[], Any]) -> int | None:
        """Return the peak bytes that a run allocates on a GPU."""
        if not self.clocks.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(meter: Meter, operation: Operation, case: Case) -> dict[str, Any]:
    """Return the row of a case."""

    def call(function: Callable) -> Callable[[], Any]:
        return lambda: function(*case.args, **case.kwargs)

    clocks = meter.clocks
    floors = 1e3 * case.flops / clocks.flops if case.flops else 0.0, 1e3 * case.bytes / clocks.bandwidth
    row: dict[str, Any] = {
        "operation": operation.name, "case": case.name, "dtype": str(case.dtype).removeprefix("torch."),
        "bytes": case.bytes, "flops": case.flops, "floor_ms": round(max(floors), 6),
    }  # fmt: skip
    expected = call(operation.reference)()
    if (reason := _obstacle(operation, case)) is not None:
        row["bound"] = f"no kernel: {reason}"
    else:
        kernel = call(operation.triton)
        row["difference"], row["other_choices"] = compare(kernel(), expected, case.atol)
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
    """Return the reason why the kernel cannot run a case: its own, or a limit of Triton's interpreter."""
    from triton.runtime.errors import InterpreterError

    if (reason := operation.get_unsupported_reason(*case.args, **case.kwargs)) is None:
        try:
            operation.triton(*case.args, **case.kwargs)
        except InterpreterError as error:
            return f"Triton's interpreter: {error}"
    return reason


def flash(case: Case) -> Callable[[], Tensor]:
    """Return a function that runs FlashAttention on a case's queries and keys, with keys as values."""
    query, key = case.args[:2]
    starts, causal = (case.args[4] if len(case.args) > 4 else None), case.kwargs.get("causal", True)
    if starts is not None:  # concatenated sequences of equal length
        pieces = len(starts) - 1
        query, key = (tensor.unflatten(2, (pieces, -1)).transpose(1, 2).flatten(0, 1) for tensor in (query, key))
    backend = SDPBackend.FLASH_ATTENTION if query.is_cuda else SDPBackend.MATH
    causal = causal and query.shape[2] == key.shape[2]
    options = {"is_causal": causal, "enable_gqa": query.shape[1] != key.shape[1], "scale": case.kwargs["scaling"]}

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(query, key, key, **options)

    return run


def compiled(meter: Meter, operation: Operation, case: Case) -> dict[str, Any]:
    """Return the row of a case's reference under torch.compile. Tiny runs use no C++ compiler."""
    torch.compiler.reset()
    compiled_reference = torch.compile(operation.reference, backend="aot_eager" if meter.clocks.tiny else "inductor")
    run = partial(compiled_reference, *case.args, **case.kwargs)
    quantiles = meter.time(run)
    busy = meter.clocks.busy_ms(run)
    return {
        "operation": operation.name, "case": case.name, "compiled_ms": quantiles, "device_ms": busy,
        "bound": bound(quantiles["p50"], busy),
    }  # fmt: skip


def compare(results: Any, expected: Any, atol: float) -> tuple[float, float]:
    """Return the maximum difference between numbers of two results, and the maximum share of different choices.

    Choices (indices, masks) may differ for nearly equal numbers. Raises AssertionError if numbers differ by more than
    `atol`.
    """
    if isinstance(expected, Tensor):
        results, expected = (results,), (expected,)
    largest = other = 0.0
    for mine, theirs in zip(results, expected, strict=True):
        if theirs.is_floating_point():
            torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-3)
            largest = max(largest, float((mine.double() - theirs.double()).nan_to_num(0, 0, 0).abs().max()))
        else:
            other = max(other, float((mine != theirs).double().mean()))
    return largest, round(other, 6)


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("e_kernels", "Kernels", "7 B models", COLUMNS, __doc__, argv)
    if not has_triton():
        raise SystemExit("Triton is not installed. Run: pip install triton")
    known = list_operations()
    if missing := known.keys() - CASES.keys():
        raise SystemExit(f"{', '.join(sorted(missing))} lacks cases. Add a function with @cases(...) to kernel_cases.")
    meter = Meter(Clocks(sheet.device, sheet.tiny))
    # Tiny runs compile two operations only: a loop over a thousand picks takes too long to compile.
    for kind, run, seconds in (("kernel", measure, None), ("compiled", compiled, None if sheet.tiny else COMPILING)):
        for name in known if kind == "kernel" or not sheet.tiny else ("attention_rows", "join"):
            # One case at a time, because all cases together do not fit in memory.
            for case in CASES[name](sheet.device, sheet.tiny):
                sheet.take((kind, name, case.name), partial(run, meter, known[name], case), seconds)
                sheet.free()
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
